"""Which tokens may come next: complete outputs alone may end, and only what came before decides."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.engine.output.sampler import _Form
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.structured import grammar
from moe_serve.structured.grammar import FormTooComplex, Matcher
from moe_serve.structured.json_schema import lenient, undescribed
from moe_serve.structured.vocabulary import Vocabulary
from tests.structured.large_vocabulary import large_vocabulary

EOS = 1


TEXT = Tokenizer.from_folder(model_dir(load_config().model))


@cache
def demo_tokens() -> list[bytes | None]:
    return TEXT.token_bytes(2050)


@cache
def demo_vocabulary() -> Vocabulary:
    return Vocabulary(demo_tokens(), [EOS])


def matcher_of(kind: str, text: str) -> Matcher:
    return Matcher.compiled(Constraint(kind, text), demo_vocabulary())


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), count=demo_vocabulary().size, bitorder="little")
    return np.flatnonzero(bits).tolist()


def draw_output(matcher: Matcher, seed: int, most: int = 400) -> list[int]:
    """Returns tokens drawn from the masks up to the end; it ends where it can, so that outputs stay short."""
    draw, output = random.Random(seed), []
    while len(output) < most:
        ids = allowed(matcher)
        if EOS in ids and (len(ids) == 1 or draw.random() < 0.5):
            return output
        output.append(draw.choice([token for token in ids if token != EOS]))
        matcher.advance(output[-1:])
    raise AssertionError(f"no end after {most} tokens: {text_of(output)!r}")


def text_of(output: list[int]) -> str:
    return b"".join(demo_tokens()[token] or b"?" for token in output).decode()


FORMS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "regex": ("regex", "(ab|cd){1,3}-[0-9]{2}", lambda text: re.fullmatch("(ab|cd){1,3}-[0-9]{2}", text)),
    "choice": ("choice", '["yes", "no", "yes, \\"é\\""]', lambda text: text in ("yes", "no", 'yes, "é"')),
    "gbnf": ("grammar", 'root ::= "x" ("y" | "z") tail\ntail ::= "!"?', lambda text: re.fullmatch("x[yz]!?", text)),
    "lark": ("grammar", 'start: "x" A\nA: /[yz]{2}/', lambda text: re.fullmatch("x[yz]{2}", text)),
    "schema": (
        "json_schema",
        '{"type":"object","properties":{"a":{"enum":[1,"b",null]}},"required":["a"],"additionalProperties":false}',
        lambda text: json.loads(text)["a"] in (1, "b", None),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_output_that_ends_has_its_form(form: str) -> None:
    kind, text, has_form = FORMS[form]
    compiled = matcher_of(kind, text)
    outputs = {text_of(draw_output(compiled.copy(), seed)) for seed in range(8)}
    assert all(map(has_form, outputs)), outputs
    assert len(outputs) > 1


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_a_function_of_the_tokens_so_far(form: str) -> None:
    kind, text, _ = FORMS[form]
    compiled = matcher_of(kind, text)
    output = draw_output(compiled.copy(), seed=3)
    growing = compiled.copy()
    for count in range(len(output) + 1):
        anew = matcher_of(kind, text)
        anew.advance(output[:count])
        assert (anew.mask() == growing.mask()).all()
        assert anew.may_end == growing.may_end
        assert anew.must_end == growing.must_end
        growing.advance(output[count : count + 1])


def test_the_end_may_come_only_where_the_output_is_complete_and_must_where_nothing_follows() -> None:
    matcher = matcher_of("regex", "ab?")
    assert EOS not in allowed(matcher)
    tokens = {each: token for token, each in enumerate(demo_tokens()) if each}
    matcher.advance([tokens[b"a"]])
    assert set(allowed(matcher)) == {EOS, tokens[b"b"]}
    assert (matcher.may_end, matcher.must_end) == (True, False)
    matcher.advance([tokens[b"b"]])
    assert allowed(matcher) == [EOS]
    assert matcher.must_end


scalars = st.sampled_from(
    [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}, {"type": "null"}, {"enum": ["é", "x", 7]},
     {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]{2}$"}, {"const": {"k": [1]}}]
)  # fmt: skip
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}),
        st.dictionaries(st.sampled_from(["a", "b é", 'c"']), inner, max_size=3).map(
            lambda fields: {
                "type": "object", "properties": fields, "required": list(fields)[:2], "additionalProperties": False
            }
        ),
    ),
    max_leaves=4,
)  # fmt: skip


@given(schema=schemas, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_outputs_under_a_schema_parse_and_validate(schema: dict[str, Any], seed: int) -> None:
    text = text_of(draw_output(matcher_of("json_schema", json.dumps(schema)), seed))
    assert_valid(json.loads(text), schema)


def in_a_tag(schema: dict[str, Any] | bool) -> tuple[str, str]:
    structure = {"begin": "<f>", "schema": schema, "end": "</f>"}
    return "structural_tag", json.dumps({"structures": [structure], "triggers": ["<f>"]})


@pytest.mark.parametrize("is_in_tag", [False, True], ids=["json_schema", "structural_tag"])
def test_json_is_written_on_one_line(is_in_tag: bool) -> None:
    """A small model loses itself in white space that does not end."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}}}
    begin, end = ("<f>", "</f>") if is_in_tag else ("", "")
    compiled = matcher_of(*(in_a_tag(schema) if is_in_tag else ("json_schema", json.dumps(schema))))
    whole = compiled.copy()
    whole.advance(TEXT.encode(begin + json.dumps({"a": [{"b": 1}, {"c": [2, 3]}]}) + end))
    assert whole.may_end
    for blank in " \n\t":
        growing = compiled.copy()
        growing.advance(TEXT.encode(begin + "{"))
        with pytest.raises(RequestError, match="cannot be served"):
            growing.advance(TEXT.encode(blank))


def test_a_schema_with_its_own_options_decides_about_white_space() -> None:
    for options, fits in (({"whitespace_flexible": True}, True), ({"whitespace_flexible": False}, False)):
        matcher = matcher_of("json_schema", json.dumps({"type": "object", "x-guidance": options}))
        if fits:
            matcher.advance(TEXT.encode("{" + " " * 50))
        else:
            with pytest.raises(RequestError, match="cannot be served"):
                matcher.advance(TEXT.encode("{ "))
    one_space = matcher_of("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}))
    one_space.copy().advance(TEXT.encode("{ "))
    with pytest.raises(RequestError, match="cannot be served"):
        one_space.advance(TEXT.encode("{  "))


@pytest.mark.parametrize("options", [{"lenient": True}, {"coerce_one_of": True}, {"key_separator": ":"}, {}], ids=str)
@pytest.mark.parametrize("is_in_tag", [False, True], ids=["json_schema", "structural_tag"])
def test_options_of_a_schema_that_say_nothing_of_white_space_do_not_free_it(
    options: dict[str, Any], is_in_tag: bool
) -> None:
    """As with {"lenient": true}, where small models went on in line feeds."""
    schema = {"type": "object", "x-guidance": options}
    matcher = matcher_of(*(in_a_tag(schema) if is_in_tag else ("json_schema", json.dumps(schema))))
    matcher.advance(TEXT.encode(("<f>" if is_in_tag else "") + '{"a"' + options.get("key_separator", ": ") + "1, "))
    with pytest.raises(RequestError, match="cannot be served"):
        matcher.advance(TEXT.encode("\n"))


def test_a_lenient_schema_leaves_out_references_to_other_documents_and_names_them() -> None:
    own = {"$id": "https://a.example/own", "type": "integer"}
    properties = {"a": {"$ref": "https://a.example/other#/x"}, "b": {"$ref": "#/$defs/own"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "$defs": {"own": own}}
    with pytest.raises(RequestError, match=r"a\.example/other"):
        matcher_of("json_schema", json.dumps(schema))
    matcher = matcher_of("json_schema", json.dumps(lenient(schema)))
    assert "$dynamicRef" in matcher.not_held
    assert lenient(schema)["properties"]["b"] == {"$ref": "#/$defs/own"}
    assert properties["a"] == {"$ref": "https://a.example/other#/x"}, "the schema that was given is as it was"
    matcher.advance(TEXT.encode('{"a": [1], "b": 2}'))
    assert matcher.may_end


def test_properties_that_are_called_as_descriptions_are_stay() -> None:
    schema = {"dependentRequired": {"title": ["a"]}, "dependencies": {"default": ["b"]}, "properties": {"title": {}}}
    assert undescribed({**schema, "title": "T"}) == schema


def test_a_schema_may_describe_a_reference_to_a_schema_around_it() -> None:
    """As check-jsonschema's schema of CircleCI does."""
    around = {"$ref": "#/$defs/logic", "markdownDescription": "the opposite of a statement", "description": "not"}
    logic = {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"not": around}, "required": ["not"]}]}
    schema = {"$ref": "#/$defs/logic", "$defs": {"logic": logic}}
    with pytest.raises(RequestError, match="sibling keys"):
        matcher_of("json_schema", json.dumps(schema))
    matcher = matcher_of("json_schema", json.dumps(undescribed(schema)))
    assert matcher.not_held == ""
    matcher.advance(TEXT.encode('{"not": {"not": true}}'))
    assert matcher.may_end


@pytest.mark.parametrize("name", ["RowCol<(Title[]|null)>", "a b", "Größe", "x%3Cy", "a~1b"])
def test_a_reference_may_name_what_no_uri_may_hold(name: str) -> None:
    """As tools for TypeScript write it, and vega-lite's schema has it."""
    key = name.replace("~1", "/").replace("%3C", "<")
    schema = {"$ref": f"#/definitions/{name}", "definitions": {key: {"enum": ["one"]}}}
    matcher = matcher_of("json_schema", json.dumps(schema))
    matcher.advance(TEXT.encode('"one"'))
    assert matcher.must_end


def test_options_that_are_no_object_are_refused() -> None:
    with pytest.raises(RequestError, match="json_schema cannot be served"):
        matcher_of("json_schema", '{"x-guidance": 3}')


@pytest.mark.parametrize("is_in_tag", [False, True], ids=["json_schema", "structural_tag"])
def test_the_schema_true_takes_any_json_on_one_line(is_in_tag: bool) -> None:
    matcher = matcher_of(*(in_a_tag(True) if is_in_tag else ("json_schema", "true")))
    matcher.advance(TEXT.encode("<f>[1, " if is_in_tag else "[1, "))
    with pytest.raises(RequestError, match="cannot be served"):
        matcher.advance(TEXT.encode("\n"))


def assert_valid(value: Any, schema: dict[str, Any]) -> None:
    """Checks a value against the few words that `schemas` uses."""
    if "anyOf" in schema:
        failures = []
        for each in schema["anyOf"]:
            try:
                assert_valid(value, each)
            except AssertionError as error:
                failures.append(error)
        assert len(failures) < len(schema["anyOf"]), failures
        return
    if "enum" in schema:
        assert value in schema["enum"]
    elif "const" in schema:
        assert value == schema["const"]
    elif schema["type"] == "integer":
        assert type(value) is int
        assert 0 <= value <= 99
    elif schema["type"] == "boolean":
        assert isinstance(value, bool)
    elif schema["type"] == "null":
        assert value is None
    elif schema["type"] == "string":
        assert isinstance(value, str)
        assert len(value) <= schema.get("maxLength", 2)
        assert re.search(schema.get("pattern", ""), value)
    elif schema["type"] == "array":
        assert isinstance(value, list)
        assert len(value) <= 2
        for item in value:
            assert_valid(item, schema["items"])
    else:
        assert isinstance(value, dict)
        assert set(schema["required"]) <= set(value) <= set(schema["properties"])
        for name, item in value.items():
            assert_valid(item, schema["properties"][name])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(("), ("json_schema", "{"), ("json_schema", '{"type":"nothing"}'), ("grammar", "root ::= other"),
        ("json_schema", '{"$ref":"http://example.org/schema"}'), ("grammar", "???"), ("choice", "7"),
        ("structural_tag", "{}"), ("structural_tag", '{"structures":[{"begin":"<f>"}],"triggers":["<f"]}'),
        ("structural_tag", '{"structures":[{"begin":"<f>","end":"","schema":{}}],"triggers":["<g"]}'),
        ("json_schema", "[" * 5000), ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("regex", "a{1000000000}{1000}b\\b"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_kind(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind}") as caught:
        matcher_of(kind, text).mask()
    assert caught.value.field == kind
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("num", [54, 100, 250])
def test_objects_with_many_optional_properties_are_served_with_a_vocabulary_of_real_size(num: int) -> None:
    """From 40 to 54 on, they were ended in mid-stream for their masks."""
    schema = {"type": "object", "properties": {f"bade_{i}fo": {"type": "string"} for i in range(num)}}
    vocabulary = large_vocabulary()
    compiled = Matcher.compiled(Constraint("json_schema", json.dumps(schema)), vocabulary)
    for names in ((), (0,), (num // 2, num - 1), range(num)):
        growing = compiled.copy()
        for token in vocabulary.tokenizer.tokenize_str(json.dumps({f"bade_{i}fo": "kuno" for i in names})):
            assert growing.mask()[token // 32] >> token % 32 & 1
            growing.advance([token])
        assert growing.must_end


@pytest.mark.parametrize("num", [500, 10_000])
def test_a_choice_of_many_words_is_served_with_a_vocabulary_of_real_size(num: int) -> None:
    words, vocabulary = [f"word {i}" for i in range(num)], large_vocabulary()
    compiled = Matcher.compiled(Constraint("choice", json.dumps(words)), vocabulary)
    for word in (words[0], words[-1]):
        growing = compiled.copy()
        for token in vocabulary.tokenizer.tokenize_str(word):
            assert growing.mask()[token // 32] >> token % 32 & 1
            growing.advance([token])
        assert growing.may_end


ODD_WORDS = ["a\x7fb", "\x7f", "\0", "é", "🎉x", "\\", '"', "/", "\n", "\u2028", " ", "a", "ab", "a b", "[x]", "$"]


@pytest.mark.parametrize("word", ODD_WORDS, ids=repr)
def test_a_choice_of_any_characters_takes_them_and_nothing_else(word: str) -> None:
    compiled = matcher_of("choice", json.dumps(ODD_WORDS, ensure_ascii=False))
    matcher = compiled.copy()
    matcher.advance(TEXT.encode(word, add_special_tokens=False))
    assert matcher.may_end
    others = matcher_of("choice", json.dumps([other for other in ODD_WORDS if other != word], ensure_ascii=False))
    with pytest.raises(RequestError, match="cannot be served"):
        others.advance([*TEXT.encode(word, add_special_tokens=False), EOS])


@pytest.mark.parametrize(
    "text", ['root ::= "a\x7fb"', 'start: "a\x7fb"', "start: /a\x7fb/", 'root ::= "a" [\x7f] "b"'], ids=repr
)
def test_grammars_may_hold_the_delete_character(text: str) -> None:
    matcher = matcher_of("grammar", text)
    matcher.advance(TEXT.encode("a\x7fb", add_special_tokens=False))
    assert matcher.must_end


@pytest.mark.parametrize("text", ['["\\ud800", "x"]', "[]", "[3]", "7"])
def test_a_choice_that_is_no_list_of_texts_says_so(text: str) -> None:
    with pytest.raises(RequestError, match=r"list of texts|surrogate"):
        matcher_of("choice", text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"$ref":"#"}'), ("json_schema", '{"anyOf":[{"$ref":"#"}]}'), ("grammar", "root ::= root root"),
        ("grammar", 'root ::= x\nx ::= x "a"'), ("regex", r"[^\s\S]"),
    ],
    ids=str,
)  # fmt: skip
def test_a_form_that_nothing_has_is_told_in_words(kind: str, text: str) -> None:
    """It said NoExtensionBias."""
    with pytest.raises(RequestError, match=f"^{kind} .* no token of this model may come .* refers to itself"):
        matcher_of(kind, text).mask()


MANY = json.dumps({"type": "object", "properties": {f"bade_{i}": {"type": "integer"} for i in range(100)}})
LIMITS: dict[str, tuple[int, str, str]] = {
    "max_items_in_row": (50, "json_schema", MANY),
    "step_max_items": (100, "json_schema", MANY),
    "max_grammar_size": (100, "json_schema", MANY),
    "initial_lexer_fuel": (1000, "json_schema", MANY),
    "step_lexer_fuel": (50, "regex", "(.*a.{1,200}b.*)+"),
    "max_lexer_states": (50, "regex", "(.*a.{1,200}b.*)+"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_form_beyond_a_limit_names_it(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, kind, text = LIMITS[limit]
    monkeypatch.setattr(grammar, "_OF_OTHERS", replace(grammar._OF_OTHERS, **{limit: most}))
    with pytest.raises(
        FormTooComplex, match=rf"^{kind} cannot be served: .*'s limit {limit} is {most}; send a simpler"
    ):
        draw_output(matcher_of(kind, text), seed=1)


@pytest.mark.parametrize("is_in_tag", [False, True])
def test_a_format_that_is_not_known_is_an_annotation_and_others_hold(is_in_tag: bool) -> None:
    """As a model class of pydantic asks with Path and UUID."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "default": {"$ref": "#/$defs/format"},
            "kind": {"const": {"format": "path"}},
        },
        "required": ["format", "default", "kind"],
        "additionalProperties": False,
        "$defs": {"format": {"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null", "format": "none"}]}},
    }
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    kind = "structural_tag" if is_in_tag else "json_schema"
    matcher = matcher_of(kind, json.dumps(tag if is_in_tag else schema))

    def takes(default: Any) -> bool:
        text = json.dumps({"format": "a/b", "default": default, "kind": {"format": "path"}})
        attempt = matcher.copy()
        try:
            attempt.advance(TEXT.encode(f"<f>{text}</f>" if is_in_tag else text))
        except RequestError:
            return False
        return attempt.may_end

    assert takes(None)
    assert takes("123e4567-e89b-12d3-a456-426614174000")
    assert not takes("no uuid")


def test_tags_constrain_what_follows_their_trigger_and_nothing_else() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": [12]}, "end": "</f>"}], "triggers": ["<f"]}
    matcher = matcher_of("structural_tag", json.dumps(tag))
    tokens = {each: token for token, each in enumerate(demo_tokens()) if each}
    assert EOS in allowed(matcher)
    matcher.advance([tokens[bytes([byte])] for byte in b"x <f>"])
    assert {(demo_tokens()[token] or b"")[:1] for token in allowed(matcher)} == {b"1"}
    matcher.advance([tokens[bytes([byte])] for byte in b"12</f>"])
    assert EOS in allowed(matcher)


def test_bytes_of_byte_level_tokens_are_those_of_the_text() -> None:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    for text in ("def f(x):\n\treturn 'é ß 漢字 🎉'", " \x00\x7f\u00a0\u00ad"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(demo_tokens()[token] or b"" for token in ids) == text.encode()
    assert demo_tokens()[:2] == [None, None], "special tokens stand for no text"
    assert demo_tokens()[2048:] == [None, None], "ids beyond the vocabulary do not, either"


def test_bytes_of_sentencepiece_tokens_have_spaces_and_byte_tokens() -> None:
    words = {"<s>": 0, "▁the": 1, "<0x0A>": 2, "é": 3, "<think>": 4}
    backend = Backend(models.BPE(words, []))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    assert Tokenizer(backend).token_bytes(6) == [None, b" the", b"\n", "é".encode(), b"<think>", None]


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend).token_bytes(2)


def test_a_model_without_an_end_serves_no_constraints() -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        Vocabulary([b"a", b"b"], [])


def test_a_draft_that_is_too_complex_to_go_on_from_ends_no_request() -> None:
    """Which the mask in front of it allows; what is drawn instead is not too complex."""
    matcher = matcher_of("grammar", 'start: s "."*\ns: s s | s s s | "a"\n')
    (letter,), (point,) = (demo_vocabulary().tokenizer.tokenize_str(text) for text in "a.")
    params = SamplingParams(constraint=Constraint("grammar", ""), max_new_tokens=5000)
    request = Request("a", 0, [5], [], params, 0, matcher=matcher)
    form = _Form(request, [1], demo_vocabulary().size)
    for _ in range(5000):
        request.output_ids.append(letter)
        assert form.mask(may_stop=True) is not None
        if len(form.behind([letter, letter])) == 1:
            break
    else:
        raise AssertionError("the grammar is never too complex")
    request.output_ids.append(point)
    mask = form.mask(may_stop=True)
    assert mask is not None
    assert mask.any(), request.why_none_left
