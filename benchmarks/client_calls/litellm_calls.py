"""litellm: completion and stream by OpenAI's and Anthropic's doors, responses."""

import os

import litellm

BASE = os.environ["BASE_URL"]
SAY = [{"role": "user", "content": "def read("}]


def completion():
    answer = litellm.completion("hosted_vllm/demo", SAY, api_base=BASE + "/v1", max_tokens=8)
    assert answer.choices[0].message.content


def stream():
    parts = litellm.completion("openai/demo", SAY, api_base=BASE + "/v1", max_tokens=8, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts)


def anthropic():
    answer = litellm.completion("anthropic/demo", SAY, api_base=BASE, max_tokens=8)
    assert answer.choices[0].message.content


def responses():
    assert litellm.responses(model="openai/demo", input="a", api_base=BASE + "/v1", max_output_tokens=16).output


def embedding():
    answer = litellm.embedding("hosted_vllm/demo", ["a", "b"], api_base=BASE + "/v1")
    assert len(answer.data[1]["embedding"]) > 0


def rerank():
    answer = litellm.rerank("hosted_vllm/demo", query="a", documents=["a", "b"], api_base=BASE, top_n=1)
    assert len(answer.results) == 1
