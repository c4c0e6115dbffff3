"""Clients that users have, against the demo model as `moe-serve serve` serves it: openai, litellm, langchain-openai.

The last two are in the extra `clients`, since they bring much and want older packages than the suite has; `.ci/run`
installs it in an environment of its own.
"""

import json
from typing import Literal

import pytest
from pydantic import BaseModel, Field

SAID = [{"role": "user", "content": "def read(self, size=-1):"}]
LENGTH = 12
ENOUGH = 700  # tokens for the longest form of Person that there is


class Person(BaseModel):
    age: int = Field(ge=0, le=150)
    kind: Literal["a", "b"]
    tags: list[Literal["x", "y"]] = Field(max_length=3)


@pytest.fixture(scope="module")
def address(demo):
    with demo.client(timeout_s=120) as client:
        return str(client.base_url)


@pytest.fixture(scope="module")
def client(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openais_client_completes_and_streams_the_same_text(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    fields = {"model": "demo", "prompt": SAID[0]["content"], "max_tokens": LENGTH, "temperature": 0}
    whole = client.completions.create(**fields)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == LENGTH
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    extra = client.completions.create(**fields, n=2, extra_body={"min_tokens": 2, "top_k": 1, "ignore_eos": True})
    assert [choice.text for choice in extra.choices] == [whole.choices[0].text] * 2


def test_openais_client_chats_and_streams_the_same_text(client):
    fields = {"model": "demo", "messages": SAID, "max_completion_tokens": LENGTH, "temperature": 0}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert len(choice.logprobs.content) == LENGTH
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == LENGTH


def test_openais_client_parses_what_a_model_class_asks_for(client):
    fields = {"model": "demo", "messages": SAID, "max_tokens": ENOUGH, "seed": 3, "response_format": Person}
    whole = client.chat.completions.parse(**fields).choices[0]
    assert whole.finish_reason == "stop"
    assert isinstance(whole.message.parsed, Person)
    with client.chat.completions.stream(**fields) as events:
        streamed = events.get_final_completion().choices[0]
    assert (streamed.message.content, streamed.message.parsed) == (whole.message.content, whole.message.parsed)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "person"}}], ids=["any", "named"]
)
def test_openais_client_streams_the_calls_of_functions(client, choice):
    schema = Person.model_json_schema() | {"additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "person", "parameters": schema, "strict": True}}]
    fields = {
        "model": "demo", "messages": SAID, "max_tokens": ENOUGH, "seed": 3, "tools": tools, "tool_choice": choice,
        "parallel_tool_calls": False,
    }  # fmt: skip
    (whole,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
    with client.chat.completions.stream(**fields) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("person", whole.function.arguments)
    Person.model_validate(json.loads(whole.function.arguments))


def test_openais_client_raises_its_own_errors(client):
    import openai

    with pytest.raises(openai.NotFoundError, match="this server serves 'demo'") as missing:
        client.chat.completions.create(model="gpt-4", messages=SAID)
    assert (missing.value.status_code, missing.value.param) == (404, "model")
    with pytest.raises(openai.BadRequestError, match="max_tokens is 5000") as wrong:
        client.completions.create(model="demo", prompt="a", max_tokens=5000)
    assert (wrong.value.param, wrong.value.type) == ("max_tokens", "invalid_request_error")


def test_an_echoed_prompt_scores_what_was_generated_as_when_it_was_generated(client):
    fields = {"model": "demo", "temperature": 0, "logprobs": 1}
    made = client.completions.create(**fields, prompt=[5, 6, 7], max_tokens=4, extra_body={"return_token_ids": True})
    ids = made.choices[0].model_extra["token_ids"]
    scored = client.completions.create(**fields, prompt=[5, 6, 7, *ids], max_tokens=0, echo=True).choices[0].logprobs
    assert scored.token_logprobs[0] is None
    assert scored.token_logprobs[3:] == made.choices[0].logprobs.token_logprobs
    for logprob, top in zip(scored.token_logprobs[3:], scored.top_logprobs[3:], strict=True):
        assert logprob == max(top.values())  # greedy, as an evaluation sees it


def test_litellm_chats_and_streams_the_same_text(address, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for prices on the internet
    litellm = pytest.importorskip("litellm")
    fields = {
        "model": "hosted_vllm/demo", "api_base": f"{address}/v1", "api_key": "none", "messages": SAID,
        "max_tokens": LENGTH, "temperature": 0,
    }  # fmt: skip
    whole = litellm.completion(**fields)
    assert whole.usage.completion_tokens == LENGTH
    chunks = litellm.completion(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text


def test_langchain_chats_and_streams_the_same_text(address):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model="demo", max_tokens=LENGTH, temperature=0
    )
    whole = model.invoke(SAID)
    assert whole.usage_metadata["output_tokens"] == LENGTH
    assert "".join(chunk.content for chunk in model.stream(SAID)) == whole.content
    assert whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_what_a_model_class_asks_for(address, method):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model="demo", max_tokens=ENOUGH, temperature=0.7, seed=3
    )
    assert isinstance(model.with_structured_output(Person, method=method).invoke(SAID), Person)
