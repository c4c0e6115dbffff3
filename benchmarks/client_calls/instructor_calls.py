"""instructor: models by forced calls and by schemas."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

openai = OpenAI(base_url=os.environ["BASE_URL"] + "/v1", timeout=60)
SAY = [{"role": "user", "content": "a"}]


class Point(BaseModel):
    x: int = Field(ge=0, le=9)


def _ask(mode):
    client = instructor.from_openai(openai, mode=mode)
    point = client.chat.completions.create(
        model="demo", messages=SAY, response_model=Point, max_retries=0, max_tokens=60
    )
    assert 0 <= point.x <= 9


def tools():
    _ask(instructor.Mode.TOOLS)


def json_schema():
    _ask(instructor.Mode.JSON_SCHEMA)
