"""From a checked prompt to a rank's request: what the model cannot serve is named, and samples have their own seeds."""

import msgspec
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.server.prompts import derived_seed, draw_seed, fit_to_model
from moe_serve.server.schemas import Prompt
from tests.server.test_schemas import parse

LIMITS = ModelLimits(
    model_name="demo", vocab_size=100, max_model_len=32, max_prompt_len=30, eos_token_ids=[1], block_size=4
)


def fit(ids, **sampling_params) -> SamplingParams:
    (prompt,) = parse(input_ids=ids or [0], sampling_params=sampling_params).prompts
    return fit_to_model(prompt, ids, LIMITS)


@pytest.mark.parametrize(
    "ids, sampling_params, field, words",
    [
        ([], {}, "input_ids", "no tokens"),
        ([1, 100], {}, "input_ids", r"input_ids\[1\] is 100.*0 to 99"),
        ([-1], {}, "input_ids", r"input_ids\[0\] is -1"),
        ([1] * 31, {}, "input_ids", "31 tokens, at most 30"),
        ([1] * 20, {"max_new_tokens": 13}, "max_new_tokens", "at most 12"),
        ([1] * 20, {"min_new_tokens": 13}, "min_new_tokens", "only 12 tokens fit"),
        ([1], {"stop_token_ids": [100]}, "stop_token_ids", "0 to 99"),
    ],
)
def test_what_a_model_cannot_serve_is_named(ids, sampling_params, field, words):
    with pytest.raises(RequestError, match=words) as caught:
        fit(ids, **sampling_params)
    assert caught.value.field == field


def test_a_length_that_was_not_asked_for_is_cut_to_the_model():
    assert fit([1] * 20).max_new_tokens == 12
    assert fit([1] * 20, max_new_tokens=12).max_new_tokens == 12


def test_a_length_that_was_not_asked_for_is_cut_to_the_cache():
    limits = msgspec.structs.replace(LIMITS, max_model_len=1000)  # of which a rank's cache holds 31
    prompt = Prompt(None, [1] * 20, SamplingParams(), 1, False, None, None)
    assert fit_to_model(prompt, [1] * 20, limits).max_new_tokens == 12  # the last one needs no place there


def test_top_k_beyond_the_vocabulary_means_all_tokens():
    assert fit([1], top_k=10**9).top_k == -1


def test_samples_have_different_seeds_that_depend_on_the_request_alone():
    seeds = [derived_seed(7, sample) for sample in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [derived_seed(7, sample) for sample in range(100)]
    assert all(0 <= seed < 2**63 for seed in [*seeds, draw_seed()])
