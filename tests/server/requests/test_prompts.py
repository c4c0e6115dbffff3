"""From a checked prompt to a rank's request: what the model cannot serve is named, and samples have their own seeds."""

import json
from typing import ClassVar

import msgspec
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.logprobs import MAX_ENTRIES
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.requests.open_request import RequestSpec
from moe_serve.server.requests.prompts import (
    Prompt,
    check_call,
    check_num_expressions,
    derived_seed,
    draw_seed,
    encode_prompt,
    fit_logprobs,
    fit_to_model,
    with_bad_words,
)
from tests.server.api.test_native import parse

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
        ([1], {"logit_bias": {"3": 1, "100": 1}}, "logit_bias", "holds 100.*0 to 99"),
        ([1], {"allowed_token_ids": [4, 100]}, "allowed_token_ids", "0 to 99"),
        ([1], {"bad_words_ids": [[4], [100, 3]]}, "bad_words_ids", "0 to 99"),
    ],
)
def test_what_a_model_cannot_serve_is_named(ids, sampling_params, field, words):
    with pytest.raises(RequestError, match=words) as caught:
        fit(ids, **sampling_params)
    assert caught.value.field == field


class Unread(list):
    def __iter__(self):
        raise AssertionError("a prompt that is too long is refused for its length")


def test_the_ids_of_a_prompt_that_is_too_long_are_not_looked_at():
    (prompt,) = parse(input_ids=[0]).prompts
    with pytest.raises(RequestError, match="500000 tokens, at most 30"):
        fit_to_model(prompt, Unread([1] * 500_000), LIMITS)


def test_a_length_that_was_not_asked_for_is_cut_to_the_model():
    assert fit([1] * 20).max_new_tokens == 12
    assert fit([1] * 20, max_new_tokens=12).max_new_tokens == 12


def test_a_length_that_was_not_asked_for_is_cut_to_the_cache():
    limits = msgspec.structs.replace(LIMITS, max_model_len=1000)  # of which a rank's cache holds 31
    prompt = Prompt(None, [1] * 20, SamplingParams(), False, None, None)
    assert fit_to_model(prompt, [1] * 20, limits).max_new_tokens == 12  # the last one needs no place there


def test_top_k_beyond_the_vocabulary_means_all_tokens():
    assert fit([1], top_k=10**9).top_k == -1


def test_samples_have_different_seeds_that_depend_on_the_request_alone():
    seeds = [derived_seed(7, sample) for sample in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [derived_seed(7, sample) for sample in range(100)]
    assert all(0 <= seed < 2**63 for seed in [*seeds, draw_seed()])


class Words:
    """A tokenizer that knows a few texts, as one that writes a space into the token after it."""

    ids: ClassVar = {"bad": [7, 8], " bad": [9], "worse": [3], " worse": [3], "long": [5] * 65, " long": [5]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens, "a word in the middle of a text has none"
        return self.ids[text]


def bad_words(*prompts, tokenizer) -> list[SamplingParams]:
    text = parse(text=["x"] * len(prompts), sampling_params=[*prompts])
    return [prompt.params for prompt in with_bad_words(text.prompts, tokenizer)]


def test_bad_words_become_ids_as_they_stand_at_the_beginning_and_after_a_space():
    both, spaced, none = bad_words(
        {"bad_words": ["bad", "worse"], "bad_words_ids": [[1, 2]]}, {"bad_words": " bad"}, {}, tokenizer=Words()
    )
    assert both.bad_words_ids == ((1, 2), (7, 8), (9,), (3,))
    assert both.bad_words == ()
    assert spaced.bad_words_ids == ((7, 8), (9,))
    assert none == SamplingParams()


def test_bad_words_that_cannot_be_encoded_are_refused():
    with pytest.raises(RequestError, match="a word of 65 tokens, at most 64"):
        bad_words({"bad_words": ["long"]}, tokenizer=Words())
    with pytest.raises(RequestError, match=r"bad_words needs a tokenizer.*send bad_words_ids"):
        bad_words({"bad_words": ["bad"]}, tokenizer=None)
    assert bad_words({}, tokenizer=None) == [SamplingParams()]
    with pytest.raises(RequestError, match="lone surrogate"):
        with_bad_words([Prompt("x", None, SamplingParams(bad_words=("\ud800",)), False, None, None)], Words())


def test_a_stop_regex_is_read_before_its_request_is_accepted():
    (prompt,) = parse(input_ids=[1], sampling_params={"stop_regex": ["a+", "(a"]}).prompts
    with pytest.raises(RequestError, match="without its") as caught:
        encode_prompt(prompt, Words(), LIMITS)
    assert caught.value.field == "stop_regex"
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        encode_prompt(prompt, None, LIMITS)


def test_the_expressions_of_one_call_are_bounded():
    def prompts(num_different: int):
        params = [{"stop_regex": [f"a{i % num_different}", f"b{i % num_different}"]} for i in range(20)]
        return parse_generate(json.dumps({"input_ids": [[1]] * 20, "sampling_params": params}).encode(), 20).prompts

    check_num_expressions(prompts(16))
    with pytest.raises(RequestError, match="34 different expressions in one call, at most 32"):
        check_num_expressions(prompts(17))


# No call may ask for more log probabilities than a front end can hold and send.


LARGE_LIMITS = ModelLimits("m", 150_000, 2**21, 2**21, [], 16)
MILLION = [0] * 1_000_000


def spec(prompt: list[int], **fields) -> RequestSpec:
    return RequestSpec(prompt, SamplingParams(**fields), 0)


def test_a_million_tokens_are_scored_but_not_with_twenty_likeliest_each():
    alone = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    assert fit_logprobs(alone, len(MILLION), LARGE_LIMITS) == alone
    with pytest.raises(RequestError, match=f"21000021 log probabilities.*at most {MAX_ENTRIES}"):
        fit_logprobs(SamplingParams(max_new_tokens=1, prompt_logprobs=20, logprobs=20), len(MILLION), LARGE_LIMITS)
    tail = SamplingParams(max_new_tokens=1, prompt_logprobs=20, prompt_logprobs_start=990_000)
    assert fit_logprobs(tail, len(MILLION), LARGE_LIMITS) == tail


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
