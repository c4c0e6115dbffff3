"""Reasoning and tool calls in chats: settings, fields of requests, messages, deltas, usage."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from moe_serve.attention_dp.constraint import Constraint, FormStart
from moe_serve.config import load_config, model_dir
from moe_serve.errors import ConfigError
from moe_serve.launcher.preflight import look_at_secrets
from moe_serve.models.tokenizer import Tokenizer, tokenizer_file
from moe_serve.server.api.parsed_output import NewOutput, OutputParsers, ParsedOutput, merged
from moe_serve.server.api.tool_fields import ReasoningUse, ToolUse
from moe_serve.server.api.tools.harmony import analysis_tokens
from moe_serve.server.api.tools.json_calls import HermesParser
from moe_serve.server.api.tools.registry import REASONING_PARSERS, TOOL_CALL_PARSERS, known_name
from moe_serve.server.api.tools.think import ThinkParser, ThinkTags, up_to
from tests.server.api.calls import CHAT, COMPLETIONS, HI, TEXT, answer, post, says, stream, with_template
from tests.server.served import in_event_loop, serving

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
QWEN = ("server.reasoning_parser=qwen3", "server.tool_call_parser=qwen25")


def checked(message: dict[str, Any], num_calls: int = 2) -> None:
    assert message["role"] == "assistant"
    assert message["reasoning_content"] == message["reasoning"] == "Where?"
    assert message["content"] == "I look."
    calls = message["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls) == num_calls
    for call in calls:
        assert call["type"] == "function"
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


@in_event_loop
async def test_reasoning_and_calls_are_fields_of_the_message(tmp_path: Path):
    async with serving(1, with_template(tmp_path), *QWEN, reply=says(ANSWER)) as served:
        answer = (await post(served, CHAT, messages=HI, tools=TOOLS, max_tokens=150)).json()
        events = await stream(served, CHAT, messages=HI, tools=TOOLS, max_tokens=150, n=2)
        one = (await post(served, CHAT, messages=HI, tools=TOOLS, max_tokens=150, parallel_tool_calls=False)).json()
        continuous = await stream(
            served, CHAT, messages=HI, tools=TOOLS, max_tokens=150,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )  # fmt: skip
    (choice,) = answer["choices"]
    checked(choice["message"])
    assert choice["finish_reason"] == "tool_calls"
    assert all("index" not in call for call in choice["message"]["tool_calls"])
    for deltas in (
        [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == 1],
        [event["choices"][0]["delta"] for event in continuous if event["choices"]],
    ):
        assert deltas[0] == {"role": "assistant", "content": ""}
        message = merged([delta for delta in deltas if delta])
        checked(message)
        assert [call["index"] for call in message["tool_calls"]] == [0, 1]
        names = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
        assert [call["function"]["name"] for call in names] == ["get_weather"] * 2
    assert {event["choices"][0]["finish_reason"] for event in events} == {None, "tool_calls"}
    checked(one["choices"][0]["message"], num_calls=1)


@in_event_loop
async def test_without_parsers_all_text_is_content(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says(ANSWER)) as served:
        answer = (await post(served, CHAT, messages=HI, tools=TOOLS, max_tokens=150)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    assert answer["choices"][0]["finish_reason"] == "stop"


@in_event_loop
async def test_what_the_client_does_not_want_is_left_out(tmp_path: Path):
    template = "{{ tools | length if tools else 'no tools' }}"
    async with serving(1, with_template(tmp_path, template), *QWEN, reply=says(ANSWER)) as served:

        async def message(**fields: Any) -> dict[str, Any]:
            answer = await post(served, CHAT, messages=HI, tools=TOOLS, max_tokens=150, **fields)
            found = answer.json()["choices"][0]["message"]
            assert isinstance(found, dict)
            return found

        assert "reasoning" not in await message(include_reasoning=False)
        joined = await message(separate_reasoning=False)
        assert joined["content"] == "<think>\nWhere?\n</think>\n\nI look."
        none = await message(tool_choice="none")
        assert none["content"] == f"I look.\n{CALL}\n{CALL}"
        prompts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    assert prompts == ["1", "1", "no tools"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": TOOLS * 2}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"function": {"name": "f", "description": "x" * 2**20}}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"separate_reasoning": 1}, "separate_reasoning"),
]


def test_wrong_tools_are_refused_with_the_field(tmp_path: Path):
    @in_event_loop
    async def check():
        async with serving(1, with_template(tmp_path), *QWEN) as served:
            for fields, param in WRONG:
                response = await post(served, CHAT, messages=HI, **fields)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    check()


def output(parser: ParsedOutput, text: str) -> dict[str, Any]:
    return merged(
        [delta for char in text for delta in parser.push(NewOutput(char, [], None))]
        + parser.push(NewOutput("", [], "stop"))
    )


@in_event_loop
async def test_a_form_is_content_where_outputs_begin_inside_the_reasoning(tmp_path: Path):
    template = with_template(tmp_path, "{{ messages[0].content }}<think>")
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 12}}}
    async with serving(1, template, "server.reasoning_parser=deepseek-r1", reply=says("12")) as served:
        free = await answer(served, CHAT, messages=HI, max_tokens=50)
        held = await answer(served, CHAT, messages=HI, max_tokens=50, response_format=form)
        events = await stream(served, CHAT, messages=HI, max_tokens=50, response_format=form)
        text = {"format": {"type": "json_schema", **form["json_schema"]}}
        response = (await post(served, "/v1/responses", input="hi", text=text)).json()
    assert (free["choices"][0]["message"]["reasoning_content"], free["choices"][0]["message"]["content"]) == ("12", "")
    assert held["choices"][0]["message"] == {"role": "assistant", "content": "12"}
    assert merged([event["choices"][0]["delta"] for event in events])["content"] == "12"
    assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [("message", "12")]


@pytest.mark.parametrize(
    "said, output, reasoning, content",
    [
        ("The answer is", " 12.", "", " 12."),  # where deepseek-r1 else begins inside its reasoning
        ("<think>\nI count:", " 12</think>\n\n12.", " 12", "12."),
        ("<think>\nSo.\n</think>\n\nIt is", " 12 <think>", "", " 12 <think>"),
    ],
)
@pytest.mark.parametrize("parser", ["deepseek-r1", "qwen3"])
def test_an_output_that_continues_a_message_is_what_the_message_was_in(
    tmp_path: Path, parser: str, said: str, output: str, reasoning: str, content: str
):
    @in_event_loop
    async def check():
        template = with_template(tmp_path, "{{ messages[-1].content }}")
        fields = {"messages": [*HI, {"role": "assistant", "content": said}], "continue_final_message": True}
        async with serving(1, template, f"server.reasoning_parser={parser}", reply=says(output)) as served:
            message = (await answer(served, CHAT, max_tokens=50, **fields))["choices"][0]["message"]
            events = await stream(served, CHAT, max_tokens=50, **fields)
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
        streamed = merged([event["choices"][0]["delta"] for event in events])
        assert (streamed.get("reasoning", ""), streamed["content"]) == (reasoning, content)

    check()


@pytest.mark.parametrize("kind, reasoning", [("regex", None), ("structural_tag", "12")])
def test_tags_leave_room_for_reasoning_and_other_forms_do_not(kind: str, reasoning: str | None):
    config = load_config(overrides=["server.reasoning_parser=deepseek-r1"]).server
    parser = OutputParsers(config, TEXT).of(ToolUse({}), ReasoningUse(), [], Constraint(kind, "12"))()
    assert output(parser, "12").get("reasoning") == reasoning


def test_a_named_function_gets_the_whole_output_as_its_arguments():
    tools = ToolUse({"f": {"properties": {"a": {"type": "integer"}}}}, "named", "f", parallel=False)
    parser = OutputParsers(load_config().server, TEXT).of(tools, ReasoningUse(), [])()
    (call,) = output(parser, '{"a": 5}')["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 5}'}
    assert parser.finish_reason("stop") == "stop"
    constraint = tools.constraint()
    assert constraint is not None
    schema = json.loads(constraint.text)
    assert (schema["type"], schema["properties"]) == ("object", {"a": {"type": "integer"}})


def test_required_calls_are_a_list_of_names_and_parameters():
    tools = ToolUse({"f": {}, "g": {"type": "object"}}, "required", parallel=False)
    constraint = tools.constraint()
    assert constraint is not None
    schema = json.loads(constraint.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["f", "g"]
    parser = OutputParsers(load_config().server, TEXT).of(ToolUse({"f": {}, "g": {}}, "required"), ReasoningUse(), [])()
    message = output(parser, '[{"name": "g", "parameters": {"x": [1]}}, {"name": "f", "parameters": {}}]')
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "g", "arguments": '{"x": [1]}'},
        {"name": "f", "arguments": "{}"},
    ]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_reasoning_can_come_in_one_piece():
    stages = [ThinkParser(ThinkTags(), "")]
    parser = ParsedOutput(stages, ToolUse({}), ReasoningUse(streamed=False))
    deltas = [delta for char in "<think>one two</think>three" for delta in parser.push(NewOutput(char, [], None))]
    assert deltas[0] == {"reasoning_content": "one two", "reasoning": "one two"}
    assert "reasoning" not in merged(deltas[1:])


@pytest.mark.parametrize(
    "ids, text, count", [([7, 7, 9, 5], "<think>a</think>b", 3), ([7, 7], "<think>a", 2), ([5, 5], "b", 0)]
)
def test_tokens_of_the_reasoning_are_counted_with_its_end(ids, text, count):
    parser = ParsedOutput([ThinkParser(ThinkTags(), "")], ToolUse({}), ReasoningUse(), partial(up_to, 9))
    parser.push(NewOutput(text, ids, "stop"))
    assert parser.reasoning_tokens() == count


@cache
def tokenizer_with_marks() -> Tokenizer:
    """The demo model's, with marks of reasoning and of harmony as tokens of their own."""
    backend = Backend.from_file(str(tokenizer_file(model_dir(load_config().model))))
    backend.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"])
    backend.add_tokens(["<think>", "</think>", "analysis", "final"])
    return Tokenizer(backend)


def ids_of(text: str) -> list[int]:
    return tokenizer_with_marks().encode(text, add_special_tokens=False)


ANY, AUTO, NAMED = ToolUse({}), ToolUse({"f": {}}, "auto"), ToolUse({"f": {}}, "named", "f")
OPENING, ENDING = ids_of("<think></think>")
CHANNEL, FINAL, MESSAGE = ids_of("<|channel|>final<|message|>")
BEHIND_FINAL = ((CHANNEL, FINAL), (MESSAGE,))


@pytest.mark.parametrize(
    "parser, prompt, tools, start",
    [
        ("qwen3", "hi<think>\n", ANY, FormStart(((ENDING,),))),
        ("deepseek-r1", "hi", ANY, FormStart(((ENDING,),))),
        ("deepseek-r1", "hi", NAMED, FormStart(((ENDING,),))),
        ("qwen3", "hi", ANY, FormStart(((ENDING,),), opens=OPENING)),
        ("qwen3", "hi<think>\n\n</think>\n\n", ANY, None),
        ("deepseek-r1", "hi</think>", AUTO, None),
        ("gpt-oss", "hi", ANY, FormStart(BEHIND_FINAL)),
        ("gpt-oss", "hi", AUTO, FormStart(BEHIND_FINAL, may_end=True)),
        ("gpt-oss", "hi", NAMED, None),
        ("null", "hi<think>", ANY, None),
    ],
)
def test_a_form_begins_behind_the_reasoning(parser, prompt, tools, start):
    config = load_config(overrides=[f"server.reasoning_parser={parser}"]).server
    assert OutputParsers(config, tokenizer_with_marks()).form_start(prompt, tools) == start
    assert OutputParsers(config, TEXT).form_start(prompt, tools) is None, "no tokens of their own mark a reasoning"


def test_a_form_of_an_output_that_continues_a_message_begins_behind_its_reasoning():
    parsers = OutputParsers(load_config(overrides=["server.reasoning_parser=qwen3"]).server, tokenizer_with_marks())
    assert parsers.form_start("hi<think>so", ANY, continued="<think>so") == FormStart(((ENDING,),))
    assert parsers.form_start("hi It is", ANY, continued="It is") is None


@in_event_loop
async def test_forms_and_forced_calls_stand_behind_the_reasoning(tmp_path: Path):
    template = with_template(tmp_path, "{{ messages[0].content }}")
    ids = [*ids_of('<think>so</think>{"a": 1}'), 1]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    fields = {"messages": HI, "max_tokens": 50}
    settings = ("server.reasoning_parser=qwen3",)
    async with serving(1, template, *settings, tokenizer=tokenizer_with_marks(), reply=lambda submit: ids) as served:
        held = (await post(served, CHAT, **fields, response_format=form)).json()
        forced = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        called = (await post(served, CHAT, **fields, **forced)).json()
        events = await stream(served, CHAT, **fields, **forced)
        plain = (await post(served, COMPLETIONS, prompt="hi", max_tokens=50, response_format=form)).json()
        starts = [submit.params.constraint.start for submit in served.workers[0].submitted]
    assert starts == [FormStart(((ENDING,),), opens=OPENING)] * 3 + [None]
    assert held["choices"][0]["message"]["content"] == '{"a": 1}'
    assert plain["choices"][0]["text"].endswith('{"a": 1}')
    streamed = merged([event["choices"][0]["delta"] for event in events])
    for message in (called["choices"][0]["message"], streamed):
        assert message["reasoning"] == "so"
        assert not message["content"]
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"a": 1}'}
    assert called["usage"]["completion_tokens_details"] == {"reasoning_tokens": ids.index(ENDING) + 1}


@pytest.mark.parametrize(
    "text, count",
    [
        ("<|channel|>analysis<|message|>so<|end|><|start|>x<|channel|>final<|message|>12<|return|>", None),
        ("<|channel|>analysis<|message|>so and", 99),
        ("<|channel|>final<|message|>12<|return|>", 0),
    ],
)
def test_tokens_of_harmonys_analysis_are_counted(text, count):
    config = load_config(overrides=["server.reasoning_parser=gpt-oss"]).server
    parser = OutputParsers(config, tokenizer_with_marks()).of(ANY, ReasoningUse(), [])()
    ids = ids_of(text)
    parser.push(NewOutput(text, ids, "stop"))
    expected = ids.index(ids_of("<|end|>")[0]) + 1 if count is None else min(count, len(ids))
    assert parser.reasoning_tokens() == expected


@pytest.mark.parametrize(
    "ids, count",
    [
        ([], 0),
        ([1], 0),  # the name of the channel has not come
        ([1, 2, 9, 4, 8, 8], 4),  # with the end, and nothing behind it
        ([1, 2, 9, 3, 1, 8], 3),  # a message that the next one cuts off
        ([1, 2, 4, 1, 2, 9], 6),  # two messages
    ],
)
def test_each_message_of_the_analysis_counts_from_its_channel_to_its_end(ids, count):
    assert analysis_tokens(1, 2, 3, 4, ids) == count


@pytest.mark.parametrize("prompt_end, begins", [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
@pytest.mark.parametrize("begins_inside", [True, False])
def test_the_prompt_says_whether_the_output_begins_inside_the_reasoning(prompt_end, begins, begins_inside):
    tags = ThinkTags(begins_inside=begins_inside)
    assert tags.inside(prompt_end) == (begins or (begins_inside and not prompt_end))


def test_calls_are_found_behind_the_reasoning_only():
    stages = [ThinkParser(ThinkTags(), ""), HermesParser({"get_weather": {}})]
    tools = ToolUse({"get_weather": {}}, "auto")
    message = output(ParsedOutput(stages, tools, ReasoningUse()), f"<think>{CALL}</think>{CALL}")
    assert message["reasoning"] == CALL
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    "given, name",
    [
        ("deepseek_r1", "deepseek-r1"),
        ("DeepSeek-R1", "deepseek-r1"),
        ("openai_gptoss", "gpt-oss"),
        ("kimi-k2", "kimi_k2"),
    ],
)
def test_names_of_both_engines_are_known(given, name):
    assert known_name("x", given, REASONING_PARSERS) == name
    assert known_name("x", "qwen", TOOL_CALL_PARSERS) == "qwen25"
    assert known_name("x", "minimax_m2", TOOL_CALL_PARSERS) == "minimax-m2"


def test_the_page_names_every_parser():
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    named = {
        cell for line in page.splitlines() if line.startswith("| `") for cell in line.split("|")[1].split("`")[1::2]
    }
    assert named >= {*REASONING_PARSERS, *TOOL_CALL_PARSERS}


@pytest.mark.parametrize("setting", ["reasoning_parser", "tool_call_parser"])
def test_an_unknown_parser_is_refused_before_anything_starts(setting):
    with pytest.raises(ConfigError, match=rf"server\.{setting} is 'gemma'.*gpt-oss"):
        look_at_secrets(load_config(overrides=[f"server.{setting}=gemma"]))
