"""Outputs are drawn by a form before it is accepted, so that one that would end in mid-stream is refused at once."""

import json
from functools import cache
from typing import Any

import pytest

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.server.workers import grammar_check_process
from moe_serve.server.workers.grammar_check_process import Checked, Walks, check
from moe_serve.structured.grammar import Matcher
from tests.structured.large_vocabulary import large_vocabulary

Schema = dict[str, Any]


@cache
def walks() -> Walks:
    return Walks(large_vocabulary())


def optional(num: int, **fields: Schema) -> Schema:
    """Returns the schema of an object with as many optional properties as these and `num` others."""
    others = {f"bade_{i}fo": {"type": "string"} for i in range(num)}
    return {"type": "object", "properties": {**others, **fields}}


def checked(schema: Any) -> Checked:
    return check(Constraint("json_schema", json.dumps(schema), path="guided_json"), walks())


HUGE = optional(600)
REQUIRED = {f"k{i}": {"type": "string"} for i in range(20)}
DIE_LATER: dict[str, Schema] = {
    "at once": HUGE,
    "in one of 40 optional properties": optional(40, rare=HUGE),
    "in two": optional(30, rare=optional(20, seldom=HUGE)),
    "in the last of 21 required ones": {
        "type": "object", "properties": {**REQUIRED, "last": HUGE}, "required": [*REQUIRED, "last"]
    },
    "in an alternative": {"anyOf": [{"type": "string"}, {"type": "integer"}, HUGE]},
    "in an array": {"type": "array", "items": HUGE},
    "by a reference": {**optional(40, rare={"$ref": "#/$defs/a~1b/items"}), "$defs": {"a/b": {"items": HUGE}}},
    "by references in a circle": {
        **optional(10, own={"$ref": "#"}, rare={"$ref": "#/definitions/a"}),
        "definitions": {"a": optional(2, b={"$ref": "#/definitions/b"}), "b": optional(600, a={"$ref": "#"})},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DIE_LATER)
def test_a_schema_that_would_end_in_mid_stream_is_refused_with_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check_process, "_WALKS_S", 10.0)  # a busy machine draws fewer outputs in its 0.15 s
    found = checked(DIE_LATER[name])
    assert found.grammar is None
    assert found.field == "guided_json"
    assert found.message.startswith("guided_json cannot be served: at one place")
    assert "limit max_items_in_row is 2000" in found.message


def test_a_tag_whose_schema_would_end_in_mid_stream_is_refused() -> None:
    structures = [{"begin": f"<{name}>", "schema": schema, "end": ""} for name, schema in (("a", {}), ("b", HUGE))]
    tag = json.dumps({"structures": structures, "triggers": ["<"]})
    found = check(Constraint("structural_tag", tag, path="response_format"), walks())
    assert found.grammar is None
    assert found.message.startswith("response_format cannot be served: at one place")


@pytest.mark.parametrize(
    "schema",
    [
        {**optional(3), "$defs": {"unused": HUGE}},
        {**optional(3), "examples": [HUGE], "x-guidance": {"lenient": True}},
        optional(3, never={"allOf": [{"type": "string"}, {**optional(60), "type": "object"}]}),
        optional(60, own={"$ref": "#"}),
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "array", "items": {"anyOf": [{"const": i} for i in range(300)]}},
    ],
    ids=lambda schema: str(schema)[-60:],
)  # fmt: skip
def test_what_no_output_comes_to_is_not_held_against_a_schema(schema: Schema) -> None:
    found = checked(schema)
    assert found.grammar is not None, found.message


@pytest.mark.parametrize("num", [54, 200, 350, 498, 499])
@pytest.mark.parametrize("value", [{"type": "string"}, {}], ids=str)
@pytest.mark.parametrize("closed", [False, True])
def test_a_schema_that_is_accepted_does_not_end_in_mid_stream(num: int, value: Schema, closed: bool) -> None:
    names = [f"bade_{i}fo" for i in range(num)]
    schema: Schema = {"type": "object", "properties": dict.fromkeys(names, value)}
    found = checked({**schema, "additionalProperties": False} if closed else schema)
    assert found.grammar is not None or num > 200, found.message
    if found.grammar is None:
        return
    compiled = Matcher.compiled(Constraint("json_schema", found.grammar, is_compiled=True), large_vocabulary())
    for some in ([], names[:1], names[:4], names[num // 2 :: 40], names[-1:]):
        growing = compiled.copy()
        for token in large_vocabulary().tokenizer.tokenize_str(json.dumps(dict.fromkeys(some, "kuno"))):
            growing.mask()
            growing.advance([token])
        growing.mask()
        assert growing.may_end


def test_a_form_whose_masks_take_long_on_the_average_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Constraint("regex", "[a-z]*")
    assert check(form, walks()).grammar is not None
    monkeypatch.setattr(grammar_check_process, "_MOST_MASK_S", 0.0)
    assert "ms to say which tokens may come next, on the average" in check(form, walks()).message


def test_outputs_are_drawn_until_the_time_for_them_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check_process, "_WALKS_S", 0.0)
    drawn: list[int] = []
    monkeypatch.setattr(Matcher, "advance", lambda self, ids: drawn.extend(ids))
    assert check(Constraint("regex", "[a-z]*"), walks()).grammar is not None
    assert len(drawn) == grammar_check_process._FEWEST_MASKS
