"""guidance: select over vLLM's and SGLang's fields."""

import os

import guidance
from guidance.models.experimental import SglangModel, VLLMModel

BASE = os.environ["BASE_URL"] + "/v1"


def _select(kind):
    answer = kind("demo", base_url=BASE, api_key="none")
    with guidance.user():
        answer += "a"
    with guidance.assistant():
        answer += guidance.select(["yes", "no"], name="word")
    assert answer["word"] in ("yes", "no")


def vllm_select():
    _select(VLLMModel)


def sglang_select():
    _select(SglangModel)
