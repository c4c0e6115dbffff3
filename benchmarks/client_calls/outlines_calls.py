"""outlines: text and JSON by OpenAI's door; JSON, choice and regex as for vLLM and SGLang."""

import os
import re
from typing import Literal

import openai
import outlines
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", timeout=60)


class Point(BaseModel):
    x: int = Field(ge=0, le=9)


def openai_json():
    assert Point.model_validate_json(outlines.from_openai(client, "demo")("a", Point, max_tokens=60))


def vllm_json():
    assert Point.model_validate_json(outlines.from_vllm(client, "demo")("a", Point, max_tokens=60))


def vllm_choice():
    assert outlines.from_vllm(client, "demo")("a", Literal["yes", "no"], max_tokens=8) in ("yes", "no")


def sglang_regex():
    answer = outlines.from_sglang(client, "demo")("a", outlines.types.Regex("[ab]{3}"), max_tokens=8)
    assert re.fullmatch("[ab]{3}", answer)
