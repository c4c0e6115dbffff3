import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.engine.sampler import candidates, gumbel, has_finite_best, philox, sample, sample_row


def request(params: SamplingParams, seed: int = 0, output_ids: list[int] | None = None) -> Request:
    return Request("r", 0, [1, 2], output_ids or [], params, seed)


def test_philox_gives_the_published_numbers() -> None:
    # Random123's known answers for philox4x32-10.
    zero = (np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert [int(word[0]) for word in philox(zero, (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


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


def test_sampling_follows_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    params = SamplingParams(temperature=1.0)
    drawn = [sample_row(logits, params, seed, seed % 7) for seed in range(20_000)]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.015)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 40))
def test_top_k_keeps_what_a_whole_sort_keeps(values: list[int], top_k: int) -> None:
    logits = np.array(values, dtype=np.float64)
    best = sorted(range(len(values)), key=lambda index: (-values[index], index))[:top_k]
    assert candidates(logits, SamplingParams(top_k=top_k)).tolist() == sorted(best)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e308])
@pytest.mark.parametrize("top_p", [5e-324, 0.5, 1.0])
def test_no_temperature_ends_the_engine(temperature: float, top_p: float) -> None:
    logits = np.array([-np.inf, 4.0, 9.0, -3.0])
    token = sample_row(logits, SamplingParams(temperature=temperature, top_p=top_p), seed=3, output_index=0)
    assert token == 2 if temperature < 1 else token in (1, 2, 3)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan], ids=["all banned", "overflow", "not a number"])
def test_a_row_without_a_finite_maximum_gives_some_token(value: float) -> None:
    for params in (SamplingParams(top_p=0.5), SamplingParams(top_k=2), SamplingParams()):
        assert 0 <= sample_row(np.full(4, value), params, seed=3, output_index=0) < 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("faulty", [[3.0, np.nan, 9.0, 0.0], [np.inf, 1.0, 2.0, 3.0], [np.nan] * 4, [-np.inf] * 4])
def test_a_row_that_is_not_finite_gives_no_token_and_the_others_theirs(faulty: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 4.0, 2.0], faulty, [5.0, 1.0, -np.inf, 2.0]])
    params = SamplingParams(temperature=temperature, min_new_tokens=2, stop_token_ids=(1,))
    requests = [request(params, seed) for seed in range(3)]
    assert has_finite_best(logits) == [True, False, True]
    first, none, last = sample(logits.clone(), requests, [0])
    assert none is None
    assert [first, last] == sample(logits[[0, 2]], [requests[0], requests[2]], [0])


def test_neighbouring_indices_and_ids_draw_independent_noise() -> None:
    ids = np.arange(2000)
    noise = np.stack([gumbel(7, index, ids) for index in range(5)])
    assert np.abs(np.corrcoef(noise) - np.eye(5)).max() < 0.08
    assert abs(np.corrcoef(noise[0, :-1], noise[0, 1:])[0, 1]) < 0.08
    assert abs(noise.mean() - np.euler_gamma) < 0.05


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert candidates(logits, SamplingParams(top_k=2)).tolist() == [1, 3]
    assert candidates(logits, SamplingParams(top_p=0.5)).tolist() == [1, 3], "0.4 is not enough, 0.4 + 0.3 is"
    assert candidates(logits, SamplingParams(top_p=0.39)).tolist() == [1]
    assert candidates(logits, SamplingParams(top_k=3, top_p=0.75)).tolist() == [1, 3], "top_p counts what top_k left"
    assert candidates(np.zeros(4), SamplingParams(top_k=2)).tolist() == [0, 1], "of equal ones the lowest ids"


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_top_p_is_the_fewest_tokens_that_reach_it(vocab: int, top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=vocab)
    kept = candidates(logits, SamplingParams(top_p=top_p))
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert probabilities[kept].sum() >= top_p - 1e-9
    assert len(kept) == 1 or probabilities[kept].sum() - probabilities[kept].min() < top_p + 1e-9


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
