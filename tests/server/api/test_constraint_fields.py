"""Fields of three APIs become one constraint, or an error that names the field."""

import json
from typing import Any

import pytest

from moe_serve.attention_dp.constraint import MAX_CHARS, Constraint
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.generate_request import parse_generate
from moe_serve.server.api.openai_requests import parse_completion
from moe_serve.server.api.tool_fields import ToolUse
from moe_serve.structured.grammar import to_grammar

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


def sglang(fields: dict[str, Any]) -> Constraint | None:
    body = json.dumps({"text": "a", "sampling_params": fields}).encode()
    return parse_generate(body, 1).prompts[0].params.constraint


def openai(fields: dict[str, Any]) -> Constraint | None:
    body = json.dumps({"prompt": "a", **fields}).encode()
    return parse_completion(body, 1).options.taken.params.constraint


def test_no_field_or_null_asks_for_nothing() -> None:
    assert sglang({}) is None
    assert sglang({"json_schema": None, "regex": None, "ebnf": None, "structural_tag": None}) is None
    assert openai({"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": {}}) is None


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json_schema": "$$ANY$$"}, "json_schema", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        (
            {"structural_tag": {"structures": [], "triggers": []}},
            "structural_tag",
            '{"structures": [], "triggers": []}',
        ),
    ],
    ids=str,
)
def test_sglangs_fields(fields: dict[str, Any], kind: str, text: str) -> None:
    assert sglang(fields) == Constraint(kind, text)
    assert openai(fields) == Constraint(kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_json": '{"type":"object","properties":{"é":{"type":"string"}}}'},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=str,
)
def test_a_schema_is_the_same_constraint_under_every_name(fields: dict[str, Any]) -> None:
    found = openai(fields)
    assert found == Constraint("json_schema", '{"type":"object","properties":{"é":{"type":"string"}}}')


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"guided_regex": "x"}, "regex"),
        ({"structured_outputs": {"regex": "x"}}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"guided_grammar": "start: A"}, "grammar"),
    ],
    ids=str,
)
def test_openais_and_vllms_fields(fields: dict[str, Any], kind: str) -> None:
    found = openai(fields)
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "x"}, "guided_regex"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice[1]"),
        ({"guided_json": "no json"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "x"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ({"guided_regex": "x" * (MAX_CHARS + 1)}, "guided_regex"),
        ({"guided_regex": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": 3}, "guided_whitespace_pattern"),
        ({"guided_json": "{no json", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {"guided_json": {"x-guidance": {"whitespace_flexible": True}}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
        ),
        ({"guided_json": {"x-guidance": 3}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_names_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        openai(fields)
    assert caught.value.field == says


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
        ({"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " "}, {"whitespace_pattern": " "}),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *"}}, {"whitespace_pattern": " *"}),
        ({"structured_outputs": {"json": True, "disable_any_whitespace": True}}, {"whitespace_flexible": False}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, None),
        (
            {"structured_outputs": {"json": {"x-guidance": {"lenient": True}}, "disable_any_whitespace": True}},
            {"lenient": True, "whitespace_flexible": False},
        ),
    ],
    ids=str,
)
def test_white_space_of_a_schema_is_what_vllms_fields_say(fields: dict[str, Any], option: Any) -> None:
    found = openai(fields)
    assert found is not None
    assert json.loads(found.text).get("x-guidance") == option


def test_parameters_refuse_what_cannot_be_a_constraint_and_one_that_may_never_end() -> None:
    SamplingParams(constraint=Constraint("regex", "a")).validate()
    for constraint in (Constraint("xml", "a"), Constraint("regex", ""), Constraint("regex", "x" * (MAX_CHARS + 1))):
        with pytest.raises(RequestError):
            SamplingParams(constraint=constraint).validate()
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(constraint=Constraint("regex", "a"), ignore_eos=True).validate()


def test_options_of_a_forced_tools_schema_stay_beside_those_of_one_line() -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}, "x-guidance": {"lenient": True}}
    for choice in ("named", "required"):
        found = ToolUse({"f": schema}, choice, "f").constraint()
        assert found is not None
        options = json.loads(found.text)["x-guidance"]
        assert options == {"lenient": True, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        to_grammar(found)
