"""No call may ask for more log probabilities than a front end can hold and send."""

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.logprobs import MAX_ENTRIES
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.server.requests.open_request import RequestSpec
from moe_serve.server.requests.prompts import check_call, fit_logprobs

LIMITS = ModelLimits("m", 150_000, 2**21, 2**21, [], 16)
MILLION = [0] * 1_000_000


def spec(prompt: list[int], **fields) -> RequestSpec:
    return RequestSpec(prompt, SamplingParams(**fields), 0)


def test_a_million_tokens_are_scored_but_not_with_twenty_likeliest_each():
    alone = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    assert fit_logprobs(alone, len(MILLION), LIMITS) == alone
    with pytest.raises(RequestError, match=f"21000021 log probabilities.*at most {MAX_ENTRIES}"):
        fit_logprobs(SamplingParams(max_new_tokens=1, prompt_logprobs=20, logprobs=20), len(MILLION), LIMITS)
    tail = SamplingParams(max_new_tokens=1, prompt_logprobs=20, prompt_logprobs_start=990_000)
    assert fit_logprobs(tail, len(MILLION), LIMITS) == tail


def test_a_small_vocabulary_has_no_more_likeliest_tokens():
    small = ModelLimits("m", 3, 100, 100, [], 16, max_logprobs=5)
    assert fit_logprobs(SamplingParams(logprobs=5), 4, small).logprobs == 3
    with pytest.raises(RequestError, match="at most 5"):
        fit_logprobs(SamplingParams(logprobs=6), 4, small)


def test_calls_are_bounded_as_a_whole():
    check_call([spec(MILLION, max_new_tokens=1, prompt_logprobs=0)], False, False)
    with pytest.raises(RequestError, match="one answer may have 2000000"):
        check_call([spec(MILLION, max_new_tokens=1, prompt_logprobs=0)] * 2, False, False)
    with pytest.raises(RequestError, match=r"first event of a stream.*stream: false"):
        check_call([spec(MILLION, max_new_tokens=1, prompt_logprobs=0)], True, True)
    long = spec([1], max_new_tokens=4096, logprobs=5)
    check_call([long], True, True)
    with pytest.raises(RequestError, match="incremental"):
        check_call([long], True, False)
