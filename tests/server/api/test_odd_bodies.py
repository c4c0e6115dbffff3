"""Whatever bodies of OpenAI's routes hold, they are parsed or refused with an error that can be sent."""

import json
from functools import partial
from typing import Any

import pytest

from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.api.openai_requests import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from moe_serve.server.api.openapi import body_schemas
from moe_serve.server.api.responses import parse_response
from moe_serve.server.edge.errors import error_of, json_bytes
from tests.server.edge.test_hostile_bytes import examples, mutated, run

HI = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ROUTES: list[tuple[str, Any, dict[str, Any]]] = [
    ("GenerateRequest", partial(parse_generate, max_prompts=4), {"text": "a"}),
    ("CompletionRequest", partial(parse_completion, max_prompts=4), {"prompt": "a"}),
    ("ChatRequest", parse_chat, {"messages": HI, "tools": [TOOL]}),
    ("ResponseRequest", parse_response, {"input": "a"}),
    ("TokenizeRequest", parse_tokenize, {"messages": HI}),
    ("DetokenizeRequest", parse_detokenize, {"tokens": [5]}),
]
ODD: list[Any] = [
    True, 0, -1, 1.5, 1e300, 2**63 - 1, -(2**63), 2**64, 10**400, "", "x", "{", "\u0000", "a" * 2000, [],
    [None], [1], ["x"],
    [[]], [{}], {}, {"": None}, {"type": None}, {"type": []}, {"type": "json_schema"}, {"type": "function"},
    [{"type": "function", "function": []}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}], {"a": {"b": [[[[[]]]]]}},
]  # fmt: skip


def parsed_or_refused(parse: Any, body: bytes) -> None:
    try:
        parse(body)
    except RequestError as error:
        sent = json_bytes(error_of(error))
        assert len(sent) < 8192
        assert json.loads(sent)["error"]["code"] == 400


@pytest.mark.parametrize(("name", "parse", "body"), ROUTES, ids=[name for name, _, _ in ROUTES])
def test_an_odd_value_in_any_field_is_taken_or_refused(name, parse, body):
    for field in body_schemas()[name]["properties"]:
        for value in ODD:
            parsed_or_refused(parse, json.dumps({**body, field: value}).encode())


@examples(50)
@pytest.mark.parametrize(("name", "parse", "body"), ROUTES, ids=[name for name, _, _ in ROUTES])
def test_mutated_bodies_are_parsed_or_refused(name, parse, body, number):
    rich = {**body, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}, "response_format": {"type": "text"}}
    run(number, mutated([json.dumps(rich).encode()]), lambda data: parsed_or_refused(parse, data))
