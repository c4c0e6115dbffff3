"""lm-eval: log likelihoods, and texts; the tokenizer is the server's."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

BASE = os.environ["BASE_URL"]


def _completions():
    return LocalCompletionsAPI(
        base_url=BASE + "/v1/completions", model="demo", tokenizer_backend="remote", num_concurrent=1, max_retries=1
    )


def _instance(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def loglikelihood():
    ((value, _),) = _completions().loglikelihood([_instance("loglikelihood", "def read(", "self")])
    assert value < 0


def generate_until():
    wanted = {"until": ["\n\n"], "max_gen_toks": 8}
    assert len(_completions().generate_until([_instance("generate_until", "def read(", wanted)])) == 1


def chat():
    chat = LocalChatCompletion(base_url=BASE + "/v1/chat/completions", model="demo", max_retries=1)
    from lm_eval.models.api_models import JsonChatStr

    prompt = JsonChatStr('[{"role": "user", "content": "a"}]')
    assert len(chat.generate_until([_instance("generate_until", prompt, {"max_gen_toks": 8})])) == 1
