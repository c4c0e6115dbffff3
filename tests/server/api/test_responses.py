"""`/v1/responses` is a chat with items in and out; answers and events are what OpenAI's own types accept."""

import json
from pathlib import Path
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.api.calls import HI, TEXT, post, says, with_template
from tests.server.api.test_parsed_output import ANSWER, QWEN, WEATHER
from tests.server.served import Served, in_event_loop, serving

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", **WEATHER}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    found, before = [], ""
    async with served.client.stream("POST", RESPONSES, json={"stream": True, **fields}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                assert before == f"event: {found[-1]['type']}"
            before = line
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        EVENT.validate_python(event)
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({item["id"] for item in items}) == len(items)
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@in_event_loop
async def test_items_and_events_say_the_same(tmp_path: Path):
    async with serving(1, with_template(tmp_path), *QWEN, reply=says(ANSWER)) as served:
        fields = {"input": "hi", "tools": TOOLS, "max_output_tokens": 150, "instructions": "Be brief.", "store": True}
        response = await post(served, RESPONSES, **fields)
        events = await events_of(served, **fields)
        prompts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    answer = response.json()
    assert response.status_code == 200, response.text
    Response.model_validate(answer, strict=True)
    assert prompts == ["<system>Be brief.\n<user>hi\n<assistant>"] * 2
    assert (answer["status"], answer["store"], answer["instructions"]) == ("completed", False, "Be brief.")
    assert answer["id"].startswith("resp_")
    call = {"type": "function_call", "status": "completed", "name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert without_ids(answer["output"]) == [
        {"type": "reasoning", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Where?"}]},
        {"type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        call, call,
    ]  # fmt: skip
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:2] == ["created", "in_progress"]
    assert types[-1] == "completed"
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(answer["output"])
    assert final["usage"] == usage
    for kind, at, whole in (("reasoning_text", 0, "Where?"), ("output_text", 1, "I look."),
                            ("function_call_arguments", 3, '{"city": "Paris"}')):  # fmt: skip
        deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta" and e["output_index"] == at]
        assert "".join(deltas) == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]


@in_event_loop
async def test_a_conversation_is_sent_whole(tmp_path: Path):
    template = "{{ messages | tojson }}"
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Where?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    async with serving(1, with_template(tmp_path, template), *QWEN, reply=says("Rain.")) as served:
        response = await post(served, RESPONSES, input=items, tools=TOOLS, tool_choice="auto", max_output_tokens=9)
        messages = json.loads(TEXT.decode(served.workers[0].submitted[0].prompt_ids))
    assert response.status_code == 200, response.text
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "Where?"
    assert messages[2]["content"] == "I look."
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}


@in_event_loop
async def test_an_output_that_is_too_long_is_incomplete(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says("one two three four")) as served:
        answer = (await post(served, RESPONSES, input="hi", max_output_tokens=2)).json()
        events = await events_of(served, input="hi", max_output_tokens=2)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
    ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "hi", "background": True}, "background"),
    ({"input": "hi", "instructions": 5}, "instructions"),
    ({"input": "hi", "messages": HI}, "messages"),
    ({"input": "hi", "n": 2}, "n"),
    ({"input": "hi", "reasoning": "high"}, "reasoning"),
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "hi", "max_output_tokens": 500}, "max_output_tokens"),
    ({"input": "hi", "maxtokens": 5}, "maxtokens"),
    ({"input": "hi", "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
    ({"input": "hi", "top_logprobs": 5}, "top_logprobs"),
]


def test_a_wrong_field_is_named(tmp_path: Path):
    @in_event_loop
    async def check():
        async with serving(1, with_template(tmp_path)) as served:
            for fields, param in WRONG:
                response = await post(served, RESPONSES, **fields)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
            assert (await post(served, RESPONSES, input="hi", model="gpt-4")).status_code == 404

    check()
