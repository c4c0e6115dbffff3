"""anthropic-python: messages, streams, tools, counting."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], timeout=60)
SAY = [{"role": "user", "content": "def read("}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def messages():
    answer = client.messages.create(model="demo", max_tokens=8, messages=SAY)
    assert answer.content[0].text
    assert answer.usage.output_tokens == 8


def stream():
    with client.messages.stream(model="demo", max_tokens=8, messages=SAY, system="x") as events:
        assert "".join(events.text_stream)
        assert events.get_final_message().stop_reason == "max_tokens"


def tools():
    answer = client.messages.create(
        model="demo", max_tokens=80, messages=SAY, tool_choice={"type": "any"},
        tools=[{"name": "weather", "input_schema": SCHEMA}],
    )  # fmt: skip
    assert answer.content[0].type == "tool_use"
    assert answer.content[0].input["city"] in ("Rome", "Oslo")


def count_tokens():
    assert client.messages.count_tokens(model="demo", messages=SAY).input_tokens > 0
