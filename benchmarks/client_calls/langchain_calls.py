"""langchain-openai: chats, streams, batches, tools, structured output."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="demo", base_url=os.environ["BASE_URL"] + "/v1", max_tokens=60, timeout=60)


class Point(BaseModel):
    """A point."""

    x: int = Field(ge=0, le=9)


def invoke():
    assert llm.invoke("def read(").usage_metadata["output_tokens"] > 0


def stream():
    assert "".join(part.content for part in llm.stream("def read("))


def batch():
    assert len(llm.batch(["a", "b"])) == 2


def tools():
    assert llm.bind_tools([Point], tool_choice="Point").invoke("a").tool_calls[0]["name"] == "Point"


def structured_output():
    assert isinstance(llm.with_structured_output(Point).invoke("a"), Point)
