"""Sampling parameters are parsed alike for `/generate` and OpenAI's bodies, each with its own names."""

import json

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.openai_requests import REST_OF_CONTEXT, parse_chat
from moe_serve.server.api.openai_routes import CHAT_NAMES
from moe_serve.server.api.sampling_fields import (
    OPENAI_NAMES,
    SGLANG_NAMES,
    SglangParams,
    TakenParams,
    sampling_params,
)


def openai(**body) -> TakenParams:
    return parse_chat(json.dumps({"messages": [{"role": "user"}], **body}).encode()).options.taken


def test_openai_names_mean_the_same_fields():
    given = {"temperature": 0.5, "seed": 3, "stop": "a", "stop_token_ids": [7], "ignore_eos": True, "top_k": 4}
    taken = openai(max_tokens=5, min_tokens=2, include_stop_str_in_output=True, n=3, **given)
    assert taken == TakenParams(
        SamplingParams(
            max_new_tokens=5, min_new_tokens=2, temperature=0.5, seed=3, stop=("a",), stop_token_ids=(7,),
            ignore_eos=True, top_k=4, no_stop_trim=True, n=3,
        ),
        given=frozenset(given) | {"max_new_tokens", "min_new_tokens", "no_stop_trim", "n"},
    )  # fmt: skip


def test_two_names_of_one_field_must_agree():
    assert openai(max_completion_tokens=5, max_tokens=5).params.max_new_tokens == 5
    assert openai(max_completion_tokens=6).params.max_new_tokens == 6
    with pytest.raises(RequestError, match="max_tokens is 4 and max_completion_tokens is 5") as caught:
        openai(max_completion_tokens=5, max_tokens=4)
    assert caught.value.field == "max_tokens"


def test_defaults_stand_where_the_body_says_nothing():
    defaults = SamplingParams(max_new_tokens=16, top_p=0.9)
    taken = sampling_params(SglangParams(max_new_tokens=None, top_p=0.5), SGLANG_NAMES, defaults)
    assert taken == TakenParams(SamplingParams(max_new_tokens=16, top_p=0.5), frozenset({"top_p"}))


def test_a_top_k_of_0_means_all_tokens():
    assert openai(top_k=0) == openai(top_k=-1) == openai(top_k=-1.0)
    assert openai().params.max_new_tokens == REST_OF_CONTEXT


@pytest.mark.parametrize(
    "body, words",
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3 but max_tokens is 2; lower min_tokens or raise"),
        ({"seed": -1}, "seed is -1"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_errors_are_in_the_clients_names(body, words):
    with pytest.raises(RequestError, match=f"^{words}") as caught:
        openai(**body)
    assert caught.value.field == words.partition(" ")[0]


def test_an_error_after_parsing_is_translated_too():
    error = RequestError("max_new_tokens is 9, ask for fewer", field="max_new_tokens")
    assert str(OPENAI_NAMES.translated(error)) == "max_tokens is 9, ask for fewer"
    assert OPENAI_NAMES.translated(error).field == "max_tokens"
    limit = RequestError("logprobs is 21; serve with a larger engine.max_logprobs (--max-logprobs)", field="logprobs")
    assert str(CHAT_NAMES.translated(limit)) == f"top_{limit}"
    assert SGLANG_NAMES.translated(error, "sampling_params.").field == "sampling_params.max_new_tokens"
