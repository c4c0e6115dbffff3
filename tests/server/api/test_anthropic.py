"""`/v1/messages` as Anthropic's own client reads it: blocks in and out, streams, counts, errors."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from msgspec import structs

from moe_serve.server.edge.keys import API_KEY_VARIABLE
from tests.server.api.calls import HI, TEXT, post, says, with_template
from tests.server.api.test_parsed_output import ANSWER, QWEN, WEATHER
from tests.server.fake_worker import LIMITS
from tests.server.served import Served, in_event_loop, serving

MESSAGES = "/v1/messages"
LONG = structs.replace(LIMITS, max_model_len=1024, max_prompt_len=1000)
TOOLS: list[Any] = [{"name": WEATHER["name"], "description": "of a city", "input_schema": WEATHER["parameters"]}]


def client_of(served: Served, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=str(served.client.base_url), api_key=key, max_retries=0)


def without_ids(message: Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]


@in_event_loop
async def test_a_message_and_its_stream_say_the_same(tmp_path: Path):
    fields: dict[str, Any] = {
        "model": "demo", "max_tokens": 150, "system": "Be brief.", "messages": HI, "tools": TOOLS,
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    async with serving(1, with_template(tmp_path), *QWEN, reply=says(ANSWER)) as served:
        client = client_of(served)
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        one = await client.messages.create(
            **fields, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )  # fmt: skip
        count = await client.messages.count_tokens(
            model="demo", system="Be brief.", messages=HI, tools=TOOLS, thinking={"type": "disabled"}
        )
        prompts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    assert prompts == ["<system>Be brief.\n<user>hi\n<assistant>"] * 3
    assert whole.id.startswith("msg_")
    assert (whole.role, whole.model, whole.stop_reason, whole.stop_sequence) == ("assistant", "demo", "tool_use", None)
    call = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
    assert without_ids(whole) == [
        {"type": "thinking", "thinking": "Where?", "signature": ""}, {"type": "text", "text": "I look."}, call, call,
    ]  # fmt: skip
    assert without_ids(streamed) == without_ids(whole)
    assert [block["type"] for block in without_ids(one)].count("tool_use") == 1
    assert len({block.id for block in whole.content if block.type == "tool_use"}) == 2
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(TEXT.encode(ANSWER)) + 1
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == count.input_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


@in_event_loop
async def test_a_conversation_is_sent_whole(tmp_path: Path):
    template = "{{ enable_thinking }};{{ add_generation_prompt }};{{ messages | tojson }}"
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Where?", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    async with serving(1, with_template(tmp_path, template), *QWEN, reply=says("Rain."), limits=LONG) as served:
        fields: dict[str, Any] = {"model": "demo", "max_tokens": 9, "thinking": {"type": "disabled"}}
        await client_of(served).messages.create(
            messages=conversation, tools=TOOLS, system=[{"type": "text", "text": "Be brief."}], **fields
        )
        await client_of(served).messages.create(messages=[*HI, {"role": "assistant", "content": "Ra"}], **fields)
        sent, continued = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    thinks, asks, text = sent.split(";", 2)
    messages = json.loads(text)
    assert (thinks, asks) == ("False", "True")
    assert continued.startswith("False;False;")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert [message["content"] for message in messages] == ["Be brief.", "hi", "I look.", "rain", "So?"]
    assert messages[2]["reasoning_content"] == "Where?"
    assert messages[2]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert messages[3]["tool_call_id"] == messages[2]["tool_calls"][0]["id"] == "c1"


@in_event_loop
async def test_an_answer_says_why_it_ended(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says("one two three four")) as served:
        client = client_of(served)
        reasons = []
        for more in (
            {},
            {"max_tokens": 2},
            {"stop_sequences": ["thr"]},
            {"tools": TOOLS, "tool_choice": {"type": "none"}},
        ):
            fields: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 20, **more}
            whole = await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                streamed = await stream.get_final_message()
            assert (streamed.stop_reason, without_ids(streamed)) == (whole.stop_reason, without_ids(whole))
            reasons.append((whole.stop_reason, whole.stop_sequence))
    assert reasons == [("end_turn", None), ("max_tokens", None), ("stop_sequence", "thr"), ("end_turn", None)]


@in_event_loop
async def test_a_call_that_is_forced_and_a_form_are_held(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says('{"city": "Rome"}')) as served:
        client = client_of(served)
        message = await client.messages.create(
            model="demo", messages=HI, max_tokens=50, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"}
        )
        await client.messages.create(
            model="demo", messages=HI, max_tokens=50,
            output_config={"format": {"type": "json_schema", "schema": WEATHER["parameters"]}},
        )  # fmt: skip
        constraints = [submit.params.constraint for submit in served.workers[0].submitted]
    assert message.stop_reason == "tool_use"
    assert without_ids(message) == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}}]
    assert [constraint.kind for constraint in constraints if constraint is not None] == ["json_schema"] * 2


@in_event_loop
async def test_keys_and_errors_are_those_of_anthropics_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    async with serving(1, with_template(tmp_path), reply=says("yes")) as served:
        fields: dict[str, Any] = {"max_tokens": 5, "messages": HI}
        assert (await client_of(served, "secret").messages.create(model="demo", **fields)).content
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(served, "guess").messages.create(model="demo", **fields)
        with pytest.raises(anthropic.NotFoundError):
            await client_of(served, "secret").messages.create(model="claude", **fields)
        with pytest.raises(anthropic.BadRequestError, match=r"top_p is 7") as wrong:
            await client_of(served, "secret").messages.create(model="demo", extra_body={"top_p": 7}, **fields)
    body: Any = wrong.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


MESSAGE = {"messages": HI, "max_tokens": 5}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": HI}, "max_tokens"),
    ({"messages": [], "max_tokens": 5}, "messages"),
    ({**MESSAGE, "max_tokens": 0}, "max_tokens"),
    ({**MESSAGE, "max_tokens": 500}, "max_tokens"),
    ({**MESSAGE, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({**MESSAGE, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
     "messages[0].content[1].type"),
    ({**MESSAGE, "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]}, "messages[0].content[0].content[0].type"),
    ({**MESSAGE, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
     "messages[0].content[0].name"),
    ({**MESSAGE, "stop": ["x"]}, "stop"),
    ({**MESSAGE, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({**MESSAGE, "tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({**MESSAGE, "tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
    ({**MESSAGE, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({**MESSAGE, "tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({**MESSAGE, "tool_choice": {"type": "any"}}, "tool_choice"),
    ({**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
     "output_config.format.schema"),
    ({**MESSAGE, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]  # fmt: skip


@in_event_loop
async def test_a_wrong_field_is_named(tmp_path: Path):
    async with serving(1, with_template(tmp_path)) as served:
        for fields, param in WRONG:
            response = await post(served, MESSAGES, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        response = await post(served, f"{MESSAGES}/count_tokens", messages=HI, max_tokens=5)
        assert response.json()["error"]["param"] == "max_tokens"
