import dataclasses
import math

import msgspec
import pytest

from moe_serve.attention_dp.request import MAX_SEED, Request, SamplingParams
from moe_serve.attention_dp.sampling_params import plain
from moe_serve.errors import RequestError


def test_valid_parameters_reach_a_rank_as_they_are():
    edges = SamplingParams(max_new_tokens=1, temperature=0, top_k=1, top_p=1, seed=MAX_SEED, stop=("\n",))
    for params in (SamplingParams(), edges):
        params.validate()
        assert msgspec.convert(msgspec.to_builtins(plain(params)), SamplingParams) == params


def test_a_length_that_is_left_out_is_at_least_the_shortest_one():
    params = SamplingParams(min_new_tokens=200)
    params.validate()
    assert plain(params).max_new_tokens == 200


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("max_new_tokens", 1.5),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", None),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("stop", ("",)),
        ("stop", "word"),
        ("stop", ("x",) * 65),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", 1),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(field, value):
    params = dataclasses.replace(SamplingParams(max_new_tokens=128), **{field: value})
    with pytest.raises(RequestError, match=field) as caught:
        params.validate()
    assert caught.value.field == field


def test_token_ids_cross_prompt_and_output():
    request = Request("r", 0, [1, 2, 3], [4, 5], SamplingParams(), seed=0)
    known = [1, 2, 3, 4, 5]
    for start in range(6):
        for end in range(start, 6):
            assert request.token_ids(start, end) == known[start:end]
    assert request.num_known == 5
