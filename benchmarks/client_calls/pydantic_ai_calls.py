"""pydantic-ai: an agent's text, its stream, and a typed output."""

import asyncio
import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=os.environ["BASE_URL"] + "/v1", api_key="none"))
SETTINGS = {"max_tokens": 60, "timeout": 60}


class Point(BaseModel):
    x: int = Field(ge=0, le=9)


def text():
    assert Agent(model, model_settings=SETTINGS).run_sync("def read(").output


def stream():
    async def run():
        async with Agent(model, model_settings=SETTINGS).run_stream("def read(") as answer:
            return await answer.get_output()

    assert asyncio.run(run())


def typed_by_a_call():
    assert 0 <= Agent(model, output_type=Point, model_settings=SETTINGS).run_sync("a").output.x <= 9


def typed_by_a_schema():
    assert 0 <= Agent(model, output_type=NativeOutput(Point), model_settings=SETTINGS).run_sync("a").output.x <= 9
