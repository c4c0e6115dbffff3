import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.engine.output.sampler import Sampler, has_finite_best
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.kernels.sampling import NONE_LEFT, NOT_FINITE


def request(params: SamplingParams, seed: int = 0, output_ids: list[int] | None = None) -> Request:
    return Request("r", 0, [1, 2], output_ids or [], params, seed)


def sample(
    logits: torch.Tensor, requests: list[Request], eos_token_ids: list[int], compiled: bool = False
) -> list[int]:
    return Sampler(eos_token_ids, compiled)(logits, requests)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [request(SamplingParams(temperature=0))] * 2, []) == [1, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 4), [], []) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**63 - 1), st.integers(0, 100), st.floats(0.1, 3), st.floats(0.05, 1))
def test_a_token_depends_on_its_own_row_alone(
    rows: int, seed: int, index: int, temperature: float, top_p: float
) -> None:
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(rows))
    params = SamplingParams(temperature=temperature, top_p=top_p)
    mine = request(params, seed, list(range(index)))
    others = [request(SamplingParams(temperature=float(i % 2)), i) for i in range(rows - 1)]
    together = sample(logits.clone(), [*others, mine], [])[-1]
    alone = sample(logits[-1:].clone(), [mine], [])[0]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("faulty", [[3.0, np.nan, 9.0, 0.0], [np.inf, 1.0, 2.0, 3.0], [np.nan] * 4, [-np.inf] * 4])
def test_a_row_that_is_not_finite_gives_no_token_and_the_others_theirs(faulty: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 4.0, 2.0], faulty, [5.0, 1.0, -np.inf, 2.0]])
    params = SamplingParams(temperature=temperature, min_new_tokens=2, stop_token_ids=(1,))
    requests = [request(params, seed) for seed in range(3)]
    assert has_finite_best(logits) == [True, False, True]
    first, none, last = sample(logits.clone(), requests, [0])
    assert none == NOT_FINITE
    assert [first, last] == sample(logits[[0, 2]], [requests[0], requests[2]], [0])


def test_nothing_ends_before_min_new_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]])
    early = request(SamplingParams(temperature=0, min_new_tokens=2, stop_token_ids=(1,)), output_ids=[5])
    assert sample(logits.clone(), [early], eos_token_ids=[0]) == [2]
    done = request(SamplingParams(temperature=0, min_new_tokens=2, stop_token_ids=(1,)), output_ids=[5, 5])
    assert sample(logits.clone(), [done], eos_token_ids=[0]) == [0]


@torch.inference_mode()
def logits_of_a_forward() -> torch.Tensor:
    return torch.tensor([[9.0, 8.0, 1.0]]) + 0


def test_the_logits_of_a_forward_can_be_masked() -> None:
    early = request(SamplingParams(temperature=0, min_new_tokens=1))
    assert sample(logits_of_a_forward(), [early], eos_token_ids=[0]) == [1]


def test_a_stop_id_beyond_the_vocabulary_is_harmless() -> None:
    early = request(SamplingParams(temperature=0, min_new_tokens=2, stop_token_ids=(99,)))
    assert sample(torch.tensor([[1.0, 2.0]]), [early], []) == [1]


def test_a_row_whose_tokens_are_all_banned_says_so() -> None:
    early = [request(SamplingParams(temperature=t, min_new_tokens=2, stop_token_ids=(1,))) for t in (0.0, 1.0)]
    assert sample(torch.zeros(2, 2), early, [0]) == [NONE_LEFT, NONE_LEFT]


def test_the_compiled_sampler_chooses_the_same_tokens() -> None:
    if find_cpu_library() is None:
        pytest.skip("no C compiler")
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=5, min_p=0.2),
        SamplingParams(top_p=0.8, min_new_tokens=3, stop_token_ids=(7, 200)),
    ]
    requests = [request(params[i % 4], seed=i, output_ids=[5] * (i % 3)) for i in range(8)]
    ids = sample(logits.clone(), requests, [3])
    assert sample(logits.clone(), requests, [3], compiled=True) == ids
    assert len(set(ids)) > 4, "rows of one token show little"


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_of_the_same_requests_and_of_others_choose_as_a_sampler_that_knows_none(compiled: bool) -> None:
    if compiled and find_cpu_library() is None:
        pytest.skip("no C compiler")
    params = [
        SamplingParams(),
        SamplingParams(min_new_tokens=3, stop_token_ids=(7,)),
        SamplingParams(top_k=5, repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={2: 1.0}),
    ]
    requests = [request(params[i % 3], seed=i) for i in range(9)]
    kept = Sampler([3], compiled)
    draw = torch.Generator().manual_seed(0)
    for step in range(12):
        taking_part = [requests[:6], requests[:6], requests[3:], requests[:1], []][step // 2 % 5]
        logits = torch.randn(len(taking_part), 20, generator=draw)
        tokens = kept(logits.clone(), taking_part)
        assert tokens == Sampler([3], compiled)(logits.clone(), list(taking_part))
        for each, token in zip(taking_part, tokens, strict=True):
            each.output_ids.append(token)
