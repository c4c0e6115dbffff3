"""Sampling parameters and forms of outputs are parsed alike for all APIs, each with its own names."""

import json
from typing import Any

import pytest

from moe_serve.attention_dp.constraint import MAX_CHARS, Constraint
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.api.openai_requests import REST_OF_CONTEXT, parse_chat, parse_completion
from moe_serve.server.api.openai_routes import CHAT_NAMES
from moe_serve.server.api.params import (
    OPENAI_NAMES,
    SGLANG_NAMES,
    SglangParams,
    TakenParams,
    sampling_params,
)
from moe_serve.server.api.tool_fields import ToolUse
from moe_serve.structured.grammar import to_grammar


def chat(**body) -> TakenParams:
    return parse_chat(json.dumps({"messages": [{"role": "user"}], **body}).encode()).options.taken


def test_openai_names_mean_the_same_fields():
    given = {"temperature": 0.5, "seed": 3, "stop": "a", "stop_token_ids": [7], "ignore_eos": True, "top_k": 4}
    taken = chat(max_tokens=5, min_tokens=2, include_stop_str_in_output=True, n=3, **given)
    assert taken == TakenParams(
        SamplingParams(
            max_new_tokens=5, min_new_tokens=2, temperature=0.5, seed=3, stop=("a",), stop_token_ids=(7,),
            ignore_eos=True, top_k=4, no_stop_trim=True, n=3,
        ),
        given=frozenset(given) | {"max_new_tokens", "min_new_tokens", "no_stop_trim", "n"},
    )  # fmt: skip


def test_two_names_of_one_field_must_agree():
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_new_tokens == 5
    assert chat(max_completion_tokens=6).params.max_new_tokens == 6
    with pytest.raises(RequestError, match="max_tokens is 4 and max_completion_tokens is 5") as caught:
        chat(max_completion_tokens=5, max_tokens=4)
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError, match="include_stop_str_in_output is true and no_stop_trim is false"):
        chat(no_stop_trim=False, include_stop_str_in_output=True)


def test_defaults_stand_where_the_body_says_nothing():
    defaults = SamplingParams(max_new_tokens=16, top_p=0.9)
    taken = sampling_params(SglangParams(max_new_tokens=None, top_p=0.5), SGLANG_NAMES, defaults)
    assert taken == TakenParams(SamplingParams(max_new_tokens=16, top_p=0.5), frozenset({"top_p"}))


def test_a_top_k_of_0_means_all_tokens():
    assert chat(top_k=0) == chat(top_k=-1) == chat(top_k=-1.0)
    assert chat().params.max_new_tokens == REST_OF_CONTEXT


@pytest.mark.parametrize(
    "body, words",
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3 but max_tokens is 2; lower min_tokens or raise"),
        ({"seed": -1}, "seed is -1"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_errors_are_in_the_clients_names(body, words):
    with pytest.raises(RequestError, match=f"^{words}") as caught:
        chat(**body)
    assert caught.value.field == words.partition(" ")[0]


def test_an_error_after_parsing_is_translated_too():
    error = RequestError("max_new_tokens is 9, ask for fewer", field="max_new_tokens")
    assert str(OPENAI_NAMES.translated(error)) == "max_tokens is 9, ask for fewer"
    assert OPENAI_NAMES.translated(error).field == "max_tokens"
    limit = RequestError("logprobs is 21; serve with a larger engine.max_logprobs (--max-logprobs)", field="logprobs")
    assert str(CHAT_NAMES.translated(limit)) == f"top_{limit}"
    assert SGLANG_NAMES.translated(error, "sampling_params.").field == "sampling_params.max_new_tokens"


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


def test_options_of_a_forced_tools_schema_are_those_of_its_form() -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}, "x-guidance": {"lenient": True}}
    for choice in ("named", "required"):
        found = ToolUse({"f": schema}, choice, "f").constraint()
        assert found is not None
        options = json.loads(found.text)["x-guidance"]
        assert options == {"lenient": True}
        to_grammar(found)
