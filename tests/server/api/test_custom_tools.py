"""OpenAI's custom tools: models call them as functions of one text, which a grammar holds where the call is forced."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from moe_serve.attention_dp.constraint import MAX_CHARS
from moe_serve.errors import RequestError
from moe_serve.server.api.openai_requests import parse_chat
from moe_serve.server.api.parsed_output import NewOutput, ParsedOutput, merged
from moe_serve.server.api.tool_fields import ReasoningUse, tool_use
from moe_serve.server.api.tools.json_calls import HermesParser, input_of
from tests.server.api.calls import CHAT, HI, TEXT, answer, says, stream, with_template
from tests.server.api.test_responses import RESPONSES, events_of
from tests.server.fake_worker import LIMITS
from tests.server.served import in_event_loop, serving

LARK = 'start: "go " ("left" | "right")'
REGEX = "[ab]{2}|c"


def custom(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    form = (
        {}
        if syntax is None
        else {"format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}}
    )
    return {"type": "custom", "custom": {"name": name, "description": "Moves.", **form}}


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as responses have it."""
    form = tool["custom"].get("format")
    inner = {**tool["custom"], **({"format": {"type": "grammar", **form["grammar"]}} if form else {})}
    return {"type": "custom", **inner}


ROBOT, LETTERS, NOTE = custom("robot", "lark", LARK), custom("letters", "regex", REGEX), custom("note")
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "robot", "arguments": {"input": "say \\"a\\"\\n\\ud83d\\ude00"}}\n</tool_call>'
QWEN = "server.tool_call_parser=qwen25"


@in_event_loop
async def test_a_call_of_a_custom_tool_has_its_input_as_text(tmp_path: Path):
    template = with_template(tmp_path, "{{ tools | tojson }}{{ messages | tojson }}")
    large = structs.replace(LIMITS, max_prompt_len=2000, max_model_len=3000)
    async with serving(1, template, QWEN, reply=says("So." + CALL), limits=large) as served:
        fields = {"messages": HI, "tools": [ROBOT, NOTE, FUNCTION], "max_tokens": 100}
        whole = await answer(served, CHAT, **fields)
        events = await stream(served, CHAT, **fields)
        given = {"input": "hi", "tools": [*map(flat, (ROBOT, NOTE)), {"type": "function", "name": "f"}]}
        response = await answer(served, RESPONSES, **given)
        of_response = await events_of(served, **given)
        again = [{"type": "custom_tool_call_output", "call_id": "1", "output": "done"}]
        before = [{key: item[key] for key in item if key != "id"} for item in response["output"][1:]]
        await answer(served, RESPONSES, input=[*before, *again], tools=given["tools"])
        seen = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    ChatCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So.")
    (call,) = choice["message"]["tool_calls"]
    text = 'say "a"\n😀'
    assert (call["type"], call["custom"]) == ("custom", {"name": "robot", "input": text})
    streamed = merged([event["choices"][0]["delta"] for event in events])
    assert [(each["type"], each["custom"]) for each in streamed["tool_calls"]] == [(call["type"], call["custom"])]
    assert "<tool_call>" not in streamed["content"]
    Response.model_validate(response, strict=True)
    item = response["output"][1]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "robot",
        text,
        "completed",
    )
    of_input = [event for event in of_response if "custom_tool_call_input" in event["type"]]
    assert "".join(event.get("delta", "") for event in of_input) == of_input[-1]["input"] == text
    assert of_response[-1]["response"]["output"][1]["input"] == text
    tools, _ = json.JSONDecoder().raw_decode(seen[0])
    assert [tool["type"] for tool in tools] == ["function"] * 3
    assert LARK in tools[0]["function"]["description"]
    assert tools[0]["function"]["parameters"]["required"] == ["input"]
    messages = json.loads(seen[-1].removeprefix(json.dumps(tools)))
    assert messages[0]["tool_calls"][0]["function"] == {"name": "robot", "arguments": {"input": text}}
    assert messages[1]["content"] == "done"


NAMED = {"type": "custom", "custom": {"name": "robot"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@in_event_loop
async def test_the_output_of_a_forced_call_is_the_input_alone(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says(" go left")) as served:
        for choice, reason in ((NAMED, "stop"), (ALLOWED, "tool_calls")):
            fields = {"messages": HI, "tools": [LETTERS, ROBOT], "tool_choice": choice, "max_tokens": 20}
            whole = (await answer(served, CHAT, **fields))["choices"][0]
            streamed = merged([event["choices"][0]["delta"] for event in await stream(served, CHAT, **fields)])
            for calls in (whole["message"]["tool_calls"], streamed["tool_calls"]):
                assert [call["custom"] for call in calls] == [{"name": "robot", "input": " go left"}]
            assert whole["finish_reason"] == reason
        forms = {
            (submit.params.constraint.kind, submit.params.constraint.text) for submit in served.workers[0].submitted
        }
    assert len(forms) == 1, "compiled once"


@pytest.mark.parametrize("text", [r"a\)|b", "[)(]", "[]()]+", "[^])]", "[a[)]b](c)", "(?i:a)", r"\[(a)", r"(?P<x>a)"])
def test_a_group_is_told_from_its_brackets(text: str):
    assert form_of([custom("a", "regex", text)], "required").text == text


def form_of(tools: list[dict[str, Any]], choice: object):
    body = json.dumps({"messages": HI, "tools": tools, "tool_choice": choice})
    return parse_chat(body.encode()).options.taken.params.constraint


def test_the_form_of_a_forced_call_is_the_tools_own_where_it_can_be():
    assert (form_of([ROBOT], "required").kind, form_of([ROBOT], "required").text) == ("grammar", LARK)
    assert (form_of([LETTERS, NOTE], {"type": "custom", "custom": {"name": "letters"}}).kind) == "regex"
    assert form_of([ROBOT, NOTE], "auto") is None
    several = json.loads(form_of([LETTERS, NOTE, FUNCTION], "required").text)
    assert several["$defs"]["letters"]["properties"]["input"] == {"type": "string", "pattern": f"^(?:{REGEX})$"}
    named = json.loads(form_of([NOTE, FUNCTION], {"type": "custom", "custom": {"name": "note"}}).text)
    assert named["required"] == ["input"]
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    beside = json.loads(
        form_of([NOTE, {"type": "function", "function": {"name": "f", "parameters": unique}}], "required").text
    )
    assert beside["x-guidance"]["lenient"], "a custom tool takes nothing from the functions beside it"


def allowing(*tools: object) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(tools)}}


WRONG = [
    ([custom("robot", "peg", "x")], "auto", "tools[0].custom.format", "lark"),
    ([custom("robot", "lark", "")], "auto", "tools[0].custom.format", "not empty"),
    ([custom("robot", "lark", "x" * (MAX_CHARS + 1))], "auto", "tools[0].custom.format", "send a smaller one"),
    ([{"type": "custom", "custom": {"name": "a", "format": 5}}], "auto", "tools[0].custom.format", "is 5"),
    ([{"type": "custom", "name": "a"}], "auto", "tools[0].custom", "is null"),
    ([{"type": "custom", "custom": {"name": "a b"}}], "auto", "tools[0].custom.name", "letters"),
    *[([custom("a", "regex", text), *more], "required", "tools[0].custom.format", said)
      for more in ([], [NOTE])  # the same alone and beside another
      for text, said in (("a|b)(c", "closes no group"), ("(a", "not closed"), ("(?x) a b # c", "flag x"))],
    ([ROBOT, custom("robot")], "auto", "tools[1].custom.name", "a tool before it"),
    ([ROBOT, NOTE], "required", "tool_choice", "custom.format is a grammar"),
    ([ROBOT], {"type": "custom", "custom": {"name": "x"}}, "tool_choice", "none of the tools"),
    ([ROBOT], allowing({"type": "function"}), "tool_choice", "none of the tools"),
    ([ROBOT], allowing(7), "tool_choice", "tool 0, 7 without a name"),
    ([ROBOT], allowing({"type": "custom", "custom": 7}), "tool_choice", "none of the tools"),
    ([ROBOT, {"type": "function"}], allowing(NAMED, {"type": "web_search"}), "tool_choice", "tool 1, an object"),
    ([ROBOT], allowing(), "tool_choice", "at least one"),
]  # fmt: skip


@pytest.mark.parametrize("tools, choice, field, said", WRONG)
def test_a_mistake_in_a_custom_tool_is_named(tools: list[dict[str, Any]], choice: object, field: str, said: str):
    with pytest.raises(RequestError, match=said) as caught:
        form_of(tools, choice)
    assert caught.value.field == field


ARGUMENTS = {
    '{"input": "a\\"b\\\\\\u00e9\\ud83d\\ude00"}': 'a"b\\é😀',
    ' { "input" : "\\ud83dx\\ude00" , "other": 5}': "\ufffdx\ufffd",
    '{"input": ""}': "",
    '{"other": "x", "input": "y"}': "y",
    '{"text": "x"}': '{"text": "x"}',
    '{"input": 5}': '{"input": 5}',
    '{"input": "cut \\u00': None,
    '{"input": "ls \\. b"}': None,
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_the_input_is_a_text_of_its_arguments(text: str):
    assert input_of(text) == ARGUMENTS[text]


GOOD = '<tool_call>{"name": "robot", "arguments": {"input": "b"}}</tool_call>'


@pytest.mark.parametrize(
    "arguments", ['{"input": "ls \\. b"}', '{"input": "a\\u12G4 b"}', '{"input": "a" b"}', '{"input": "ls']
)
@pytest.mark.parametrize("size", [1, 7, 500])
def test_a_call_whose_arguments_are_no_json_is_text(arguments: str, size: int):
    tools = tool_use([NOTE, ROBOT], "auto", None)
    reader = ParsedOutput([HermesParser(tools.schemas)], tools, ReasoningUse())
    is_cut = not arguments.endswith("}")
    text = '<tool_call>{"name": "note", "arguments": ' + arguments + ("" if is_cut else "}</tool_call>" + GOOD)
    deltas = [reader.push(NewOutput(text[at : at + size], [], None)) for at in range(0, len(text), size)]
    message = merged([*chain(*deltas), *reader.push(NewOutput("", [], "stop"))])
    assert message["content"].startswith(arguments)
    calls = [(call["index"], call["custom"]) for call in message.get("tool_calls", [])]
    assert calls == ([] if is_cut else [(0, {"name": "robot", "input": "b"})])
    assert reader.finish_reason("stop") == ("stop" if is_cut else "tool_calls")
