"""Calls that a client forces are what the ranks' grammar lets a model write, and what the parsers read."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from moe_serve.config import load_config, model_dir
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.parsed_output import NewOutput, OutputParsers, whole_message
from moe_serve.server.api.tool_fields import ReasoningUse, ToolUse
from tests.engine.offline import prompts_with_shared_beginnings, submits_of
from tests.engine.test_identity import PLAIN, SEEDS
from tests.engine.test_structured import SAMPLED, serve_at_once
from tests.structured.test_grammar import TEXT, matcher_of

CHOICE = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/Number"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"Number": {"enum": [1, 22]}},  # as pydantic writes it
}
TOOLS = {"pick": CHOICE, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
USES = [ToolUse(TOOLS, "named", "pick", parallel=False), ToolUse(TOOLS, "required", parallel=False)]


def test_forced_calls_are_calls_of_the_clients_functions() -> None:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    submits = [
        msgspec.structs.replace(submit, params=replace(SAMPLED, max_new_tokens=80, constraint=USES[i % 2].constraint()))
        for i, submit in enumerate(submits_of(prompts_with_shared_beginnings(8, 2048, max_len=30), SAMPLED, SEEDS[:8]))
    ]
    served = serve_at_once(1, submits, PLAIN)
    num_whole = 0
    for i, submit in enumerate(submits):
        text = tokenizer.decode(served.tokens[submit.request_id])
        parser = OutputParsers(load_config().server, tokenizer).of(USES[i % 2], ReasoningUse(), [])()
        (call,) = whole_message(parser.push(NewOutput(text, [], "stop")))["tool_calls"]
        assert call["function"]["name"] in (("pick",) if i % 2 == 0 else ("pick", "now"))
        if text.rstrip().endswith(("}", "]")):
            num_whole += 1
            arguments = json.loads(call["function"]["arguments"])
            assert arguments in (({"n": 1}, {"n": 22}) if call["function"]["name"] == "pick" else ({},))
    assert num_whole == len(submits)


CLOSED = {"type": "object", "additionalProperties": False}
NODE = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"definitions": {"type": "integer"}}}, {"definitions": 1}, {"definitions": "x"}),
        (
            {"properties": {"default": {"$ref": "#/definitions/N"}}, "definitions": {"N": {"type": "integer"}}},
            {"default": 1},
            {"default": "x"},
        ),
        (
            {"properties": {"v": {"type": "integer"}, "child": NODE}},
            {"v": 1, "child": {"v": 2, "child": None}},
            {"v": 1, "child": {"v": "x", "child": None}},
        ),
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"a": 1, "b": 2}, {"b": "x"}),
        ({"properties": {"a": {"const": {"$ref": "#/x"}}}}, {"a": {"$ref": "#/x"}}, {"a": {"$ref": "#/y"}}),
        ({"type": ["object", "null"]}, {}, None),
    ],
    ids=["definitions", "default", "recursion", "pointer", "const", "null"],
)
@pytest.mark.parametrize("choice", ["named", "required"])
def test_forced_calls_have_the_form_of_any_schema(choice: Any, schema: dict[str, Any], good: Any, bad: Any) -> None:
    constraint = ToolUse({"f.1": {**CLOSED, "required": [*good], **schema}}, choice, "f.1").constraint()
    assert constraint is not None

    def may_be(arguments: Any) -> bool:
        text = json.dumps(arguments if choice == "named" else [{"name": "f.1", "parameters": arguments}])
        matcher = matcher_of(constraint.kind, constraint.text)
        try:
            matcher.advance(TEXT.encode(text, add_special_tokens=False))
        except RequestError:
            return False
        return matcher.may_end

    assert may_be(good)
    assert not may_be(bad)
