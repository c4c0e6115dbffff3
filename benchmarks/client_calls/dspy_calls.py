"""dspy: calls of a model, with a text and with messages; what its adapters parse needs a model that follows."""

import os

import dspy

lm = dspy.LM("openai/demo", api_base=os.environ["BASE_URL"] + "/v1", api_key="none", max_tokens=60, cache=False)


def call():
    assert lm("def read(")


def messages():
    assert lm(messages=[{"role": "user", "content": "def read("}])
