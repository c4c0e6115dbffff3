"""openai-python: chats, completions, responses; streams, tools, structured output."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=os.environ["BASE_URL"] + "/v1", timeout=60)
SAY = [{"role": "user", "content": "def read("}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    on: bool


def models():
    assert client.models.list().data[0].id == "demo"


def chat():
    answer = client.chat.completions.create(
        model="demo", messages=SAY, max_tokens=8, logprobs=True, top_logprobs=2, n=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content
    assert answer.choices[0].logprobs.content


def chat_stream():
    stream = client.chat.completions.create(
        model="demo", messages=SAY, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert parts[-1].usage.completion_tokens == 8


def completions():
    answer = client.completions.create(model="demo", prompt=["a", "b"], max_tokens=4, echo=True, logprobs=1)
    assert len(answer.choices) == 2


def tools():
    answer = client.chat.completions.create(
        model="demo", messages=SAY, tools=[TOOL], tool_choice="required", max_tokens=60
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def parse():
    parsing = client.chat.completions if hasattr(client.chat.completions, "parse") else client.beta.chat.completions
    answer = parsing.parse(model="demo", messages=SAY, response_format=Point, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Point)


def responses():
    answer = client.responses.create(model="demo", input="def read(", max_output_tokens=16)
    assert answer.output_text


def responses_parse():
    answer = client.responses.parse(model="demo", input="a", text_format=Point, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Point)


def custom_tool():
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "go " ("left" | "right")'}}
    tools = [{"type": "custom", "custom": {"name": "robot", "format": form}}]
    answer = client.chat.completions.create(
        model="demo",
        messages=SAY,
        tools=tools,
        tool_choice={"type": "custom", "custom": {"name": "robot"}},
        max_tokens=20,
    )
    assert answer.choices[0].message.tool_calls[0].custom.input in ("go left", "go right")


def embeddings():
    assert len(client.embeddings.create(model="demo", input=["a", "b"]).data[1].embedding) > 0
