"""Words that llguidance does not know hold to the letter: what is valid is taken, what is not is refused."""

import json
import re
import time
from typing import Any

import pytest

from moe_serve.errors import RequestError
from tests.structured.test_grammar import demo_vocabulary, draw_output, matcher_of, text_of

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
KIND = {"kind": {"enum": ["x", "y", "z"]}}
A, B = {"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}
CLOSED = {"additionalProperties": False}


def rule(kind: str, *names: str) -> dict[str, Any]:
    return {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": {"required": [*names]}}


# name -> a schema, values that it takes, values that it does not
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "not const": ({"not": {"const": "ab"}}, ["", "a", "abc", "b\n", 1, None], ["ab"]),
    "not enum": ({"type": ["string", "number"], "not": {"enum": ["a", "", 2]}}, ["b", "aa", 1, 3, 2.5], ["a", "", 2]),
    "not type": ({"not": {"type": ["string", "object"]}}, [1, 1.5, [], None, True], ["", {}]),
    "not required": ({**OBJECT, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": ""}], [{"a": 1, "b": ""}]),
    "not anyOf": ({**OBJECT, "not": {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}},
                  [{}, {"b": ""}], [{"a": 1}, {"b": "", "c": 1}]),
    "not bounds": ({"type": "integer", "not": {"minimum": 3}}, [2, -5], [3, 10]),
    "not length": ({"type": "string", "not": {"minLength": 2}}, ["", "é"], ["ab"]),
    "not beginning": ({"type": "string", "not": {"pattern": "^x-"}}, ["", "x", "y-", "ax-"], ["x-", "x-a"]),
    "not character": ({"type": "string", "not": {"pattern": "[ ~]"}}, ["", "ab"], [" ", "a~b"]),
    "not texts with marks": ({"type": "string", "not": {"enum": ['a"b', "\\", "c\n"]}},
                             ["", "a", '"', 'a"', "a\\", "c", "c\\n"], ['a"b', "\\", "c\n"]),
    "not beginning with a mark": ({"type": "string", "not": {"pattern": '^a"'}}, ["", "a", '"a'], ['a"', 'a"b']),
    "names without a mark": ({"type": "object", "propertyNames": {"not": {"enum": ['a"b']}}}, [{"a": 1}], [{'a"b': 1}]),
    "a class without a mark": ({"type": "string", "pattern": '^[^"]$'}, ["\\", "a", "\n"], ['"', "ab", ""]),
    "a class without many": ({"type": "string", "pattern": r"^[^-\[\\]\P{L}$"},
                             ["]1", 'a"', "b\\"], ["\\1", "-1", "[1", "ab"]),
    "names by a pattern without marks": ({"type": "object", "patternProperties": {'^[^"]*$': {}}, **CLOSED},
                                         [{"a\\": 1}, {"": 1}], [{'a"': 1}, {'"': 1}]),
    "numbers but some": ({"type": "number", "not": {"enum": [-1.5, -1, 0, 0.5, 1, 1.5, 10, 10.5]}},
                         [-2, -1.25, -0.5, 0.25, 1.25, 2, 10.25, 11], [-1.5, -1, 0, 0.5, 1, 1.5, 10, 10.5]),
    "above a whole number": ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["", 1.25, 1.001], [1, 1.5, 2, 1.75]),
    "above none": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.25, 0.0001], [0, 1, -0.25, 0.75]),
    "below a whole number": ({"type": "number", "allOf": [{"minimum": -1.5}, {"exclusiveMaximum": -1}]},
                             [-1.5, -1.25], [-1, -1.75, 0]),
    "above a whole number in draft 4": ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "number",
                                         "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, [1.25, 1.5], [1, 2]),
    "not nothing": ({"properties": {"a": {"not": {}}}}, [{}, {"b": 1}], [{"a": 1}]),
    "if const": ({"type": "object", "properties": KIND, **rule("x", "a")},
                 [{"kind": "x", "a": 1}, {"kind": "y"}, {}, {"a": 1}], [{"kind": "x"}, {"kind": "w"}]),
    "rules of one property": ({"type": "object", "properties": KIND, "allOf": [rule("x", "a"), rule("y", "b")]},
                              [{"kind": "x", "a": 1}, {"kind": "y", "b": 1}, {"kind": "z"}, {}],
                              [{"kind": "x", "b": 1}, {"kind": "y", "a": 1}, {"kind": "w"}]),
    "rules say nothing of others": ({"allOf": [rule("x", "a"), rule("y", "b")]}, [3, [], {"kind": 1}], [{"kind": "x"}]),
    "if and else": ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}},
                    ["a", None], ["ab", 1]),
    "not a rule": ({"type": "object", "not": rule("x", "a")}, [{"kind": "x"}], [{}, {"kind": "x", "a": 1}, {"a": 1}]),
    "then alone": ({"then": {"const": 1}}, [1, 2], []),
    "oneOf that overlaps": ({"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
                            [{"a": 1}, {"b": 1, "c": 2}], [{}, {"a": 1, "b": 1}]),
    "oneOf of closed objects": ({"oneOf": [{**A, **CLOSED}, {**B, **CLOSED}]}, [{"a": 1}, {"b": 1}], [{}, {"c": 1}]),
    "oneOf of references": ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                             "$defs": {"a": {"type": "string", "enum": ["p"]}, "b": {"type": "array"}}},
                            ["p", []], ["q"]),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"b": ["a"]}},
                          [{}, {"a": 1}, {"a": 1, "b": ""}], [{"b": ""}]),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}}}},
                         [{"b": "y"}, {"a": 1, "b": "x"}], [{"a": 1, "b": "y"}]),
    "names by pattern": ({"propertyNames": {"pattern": "^[a-z]+$"}}, [{}, {"ab": 1}, 3], [{"A": 1}, {"a1": 1}]),
    "names by enum": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1, "b": 2}], [{"c": 1}]),
    "names by length": ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "names that are not": ({"type": "object", "propertyNames": {"not": {"enum": ["a"]}}}, [{"b": 1}], [{"a": 1}]),
    "different values": ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
                         [[], ["c"], ["b", "a"], ["c", "a", "b"]], [["a", "a"], ["a", "b", "a"], ["d"]]),
    "different booleans": ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
                           [[True, False], [False, True]], [[True], [True, True]]),
    "one item": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
                 [["a"]], [["a", "b"]]),
    "unevaluated": ({"allOf": [{"$ref": "#/$defs/base"}], "properties": {"b": {}}, "unevaluatedProperties": False,
                     "$defs": {"base": {"properties": {"a": {}}}}}, [{"a": 1}, {"b": 1}], [{"c": 1}]),
    "one property at least": ({**OBJECT, "minProperties": 1}, [{"a": 1}, {"c": 1}], [{}]),
    "one property": ({**OBJECT, "minProperties": 1, "maxProperties": 1}, [{"a": 1}, {"c": 1}], [{}, {"a": 1, "b": ""}]),
    "dynamic references": ({"$dynamicAnchor": "x", "type": ["object", "null"],
                            "properties": {"a": {"$dynamicRef": "#x"}}},
                           [{"a": {"a": None}}], [{"a": 1}]),
}  # fmt: skip


def has_form(schema: dict[str, Any], value: Any) -> bool:
    matcher = matcher_of("json_schema", json.dumps(schema))
    try:
        matcher.advance(demo_vocabulary().tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False)))
    except RequestError:
        return False
    return matcher.may_end


@pytest.mark.parametrize("case", CASES)
def test_values_have_the_form_where_the_schema_takes_them(case: str) -> None:
    schema, taken, refused = CASES[case]
    assert [value for value in taken if not has_form(schema, value)] == []
    assert [value for value in refused if has_form(schema, value)] == []


@pytest.mark.parametrize(
    "schema, word",
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "integer"}}, "not"),  # numbers with a fraction
        ({"not": {"pattern": "a.*b"}}, "not"),
        ({"if": {"contains": {"const": 1}}, "then": {"type": "array"}}, "if"),
        ({"contains": {"const": 1}}, "contains"),
        ({"type": "object", "minProperties": 2}, "minProperties"),  # {"a": 1, "a": 1} has one property
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "oneOf"),
        ({"type": "object", "propertyNames": {"format": "email"}}, "propertyNames"),
    ],
)
def test_a_word_without_an_exact_form_is_refused_with_the_way_out(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=rf'json_schema cannot be served: .*"{word}".*leave that out, or "strict"'):
        matcher_of("json_schema", json.dumps(schema))


def test_a_lenient_schema_leaves_its_words_out_and_names_them() -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}, "x-guidance": {"lenient": True}}
    assert matcher_of("json_schema", json.dumps(schema)).not_held == 'Unimplemented keys: ["propertyNames"]'
    assert has_form(schema, {"b": 1})


def test_properties_called_as_words_are_no_words() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "integer"}, "if": {"enum": [1]}},
        "required": ["not", "if"],
    }
    assert has_form(schema, {"not": 3, "if": 1})
    assert json.loads(text_of(draw_output(matcher_of("json_schema", json.dumps(schema)), 0))).keys() == {"not", "if"}


@pytest.mark.parametrize("num_options", [100, 300])
def test_unions_of_many_options_that_one_property_tells_apart_are_taken(num_options: int) -> None:
    options = {
        f"o{index}": {"type": "object", "properties": {"kind": {"const": index}, "a": {"type": "string"}}, **CLOSED,
                      "required": ["kind"]}
        for index in range(num_options)
    }  # fmt: skip
    matcher = matcher_of(
        "json_schema", json.dumps({"oneOf": [{"$ref": f"#/$defs/{name}"} for name in options], "$defs": options})
    )
    for value, is_taken in (({"kind": 99, "a": ""}, True), ({"kind": 0}, True), ({"kind": 300}, False), ({}, False)):
        copy = matcher.copy()
        tokens = demo_vocabulary().tokenizer.tokenize_str(json.dumps(value))
        assert all(map(copy.takes, tokens)) is is_taken


def test_values_told_by_name_are_compared_by_thousands() -> None:
    names = [f"v{index}" for index in range(4000)]
    assert has_form({"oneOf": [{"enum": names[:2000]}, {"enum": names[2000:]}]}, "v7")
    with pytest.raises(RequestError, match='its "uniqueItems" cannot be held'):
        matcher_of("json_schema", json.dumps({"type": "array", "items": {"enum": names}, "uniqueItems": True}))


@pytest.mark.parametrize(
    "schema, said",
    [
        ({"not": {"required": 3}}, '"required" at #/not is 3, and has to be a list of names'),
        ({"minProperties": 1, "properties": [1]}, '"properties" at # is [1], and has to be an object of schemas'),
        ({"oneOf": [{"minItems": "x"}, {"maxItems": 1}]}, '"minItems" at #/oneOf/0 is "x", and has to be a number'),
        ({"if": True, "then": {"properties": {"a": 3}}}, '"properties" at #/then is {"a": 3}, and has to be an object'),
    ],
)
def test_a_word_with_a_value_of_another_kind_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"json_schema cannot be served: {said}")):
        matcher_of("json_schema", json.dumps(schema))


def test_what_stands_in_words_that_nobody_knows_is_no_schema() -> None:
    schema = {"type": "string", "not": {"const": "a"}, "errorMessage": {"not": "other than a", "required": "more"}}
    assert has_form(schema, "b")
    assert not has_form(schema, "a")


def test_names_of_no_length_are_none() -> None:
    schema = {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 1}}
    assert has_form(schema, {})
    assert not has_form(schema, {"a": 1})


def chain(word: str, width: int, depth: int, leaf: dict[str, Any]) -> dict[str, Any]:
    """Returns definitions d0, d1 .. each of which refers to the next so many times."""
    steps = {f"d{index}": {word: [{"$ref": f"#/$defs/d{index + 1}"}] * width} for index in range(depth)}
    return {**steps, f"d{depth}": leaf}


def test_rules_without_an_end_and_many_options_take_bounded_work() -> None:
    first = {"$ref": "#/$defs/d0"}
    endless = {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "not": {"$ref": "#/$defs/a"}}
    hostile: list[dict[str, Any]] = [
        endless,
        {"oneOf": [{"type": "object", "required": [f"p{index}"]} for index in range(200)]},
        {"$defs": chain("allOf", 60, 4, {"type": "object"}), "oneOf": [first, first]},
        {"$defs": chain("allOf", 8, 11, {}), **first, "unevaluatedProperties": False},
        {"$defs": chain("anyOf", 60, 4, {"const": 1}), "not": first},
        {"$defs": chain("anyOf", 60, 4, {"const": 1}), "type": "array", "uniqueItems": True, "items": first},
        {"$defs": chain("allOf", 8, 11, {"minLength": 1}), "propertyNames": first},
        {"minProperties": 1, "maxProperties": 1, "properties": {f"p{index}": {} for index in range(3000)}},
        {"oneOf": [{"required": ["a"], "not": {"enum": [f"{j:0500}" for j in range(99)]}} for _ in range(99)]},
    ]
    for schema in hostile:
        begin = time.thread_time()
        with pytest.raises(RequestError, match="json_schema cannot be served") as raised:
            matcher_of("json_schema", json.dumps(schema))
        assert schema is endless or "takes more than one schema may take; leave that out" in str(raised.value)
        assert time.thread_time() - begin < 10  # mostly 0.1 s; hours where the work has no bound
