"""dspy: a call of a model, and a signature."""

import os

import dspy

lm = dspy.LM("openai/demo", api_base=os.environ["BASE_URL"] + "/v1", api_key="none", max_tokens=60, cache=False)


def call():
    assert lm("def read(")


def typed():
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict("question -> yes: bool")(question="a").yes in (True, False)
