"""Which windows a plan is made from: a shifted load is believed at once, noise is averaged."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.gate import LoadMemory, Window
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
from moe_serve.eplb.replay.run import GatedRun

NUM_LAYERS, NUM_LOGICAL, NUM_WINDOWS = 4, 32, 4
FACTS = SystemFacts(1, 10_000, token_s=1e-5, expert_s=1e-3, survives_loss=False)


def popularity(seed: int) -> np.ndarray:
    weights = np.exp(0.6 * np.random.default_rng(seed).standard_normal((NUM_LAYERS, NUM_LOGICAL)))
    return weights / weights.sum(axis=1, keepdims=True)


CODE, PROSE = popularity(1), popularity(2)


def drawn(rng: np.random.Generator, shares: np.ndarray, num_tokens: int = 10_000) -> np.ndarray:
    return np.array([rng.multinomial(num_tokens, row) for row in shares])


def memory_of(loads: Iterator[np.ndarray] | list[np.ndarray]) -> LoadMemory:
    memory = LoadMemory(NUM_LAYERS, NUM_WINDOWS, decay=0.5)
    for tokens in loads:
        memory.add(Window(tokens / 10, 10, None, None))
    return memory


def test_the_first_window_is_all_there_is() -> None:
    assert (memory_of([CODE]).weights() == 1).all()


@pytest.mark.parametrize("num_tokens", [200, 10_000])
def test_noise_is_no_shift(num_tokens: int) -> None:
    num_shifts = 0
    for seed in range(20):
        rng, memory = np.random.default_rng(seed), LoadMemory(NUM_LAYERS, NUM_WINDOWS, decay=0.5)
        for _ in range(50):
            memory.add(Window(drawn(rng, CODE, num_tokens).astype(float), 1, None, None))
            num_shifts += int(memory.shifted.sum())
    assert num_shifts == 0


def test_a_window_of_few_tokens_is_no_shift() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        many = [drawn(rng, CODE) for _ in range(10)]
        assert not memory_of([*many, drawn(rng, CODE, 60)]).shifted.any()
        assert memory_of([*many, drawn(rng, PROSE, 1000)]).shifted.all()


def test_a_layer_whose_load_has_shifted_forgets_what_came_before() -> None:
    rng = np.random.default_rng(0)
    mixed = np.where(np.arange(NUM_LAYERS)[:, None] < 2, PROSE, CODE)
    loads = [drawn(rng, CODE) for _ in range(10)] + [drawn(rng, mixed)]
    memory = memory_of(loads)
    assert memory.shifted.tolist() == [True, True, False, False]
    assert (memory.weights()[:2, -1] == 1).all()
    memory.add(Window(drawn(rng, mixed).astype(float), 1, None, None))
    assert (memory.weights()[:2, :-2] == 0).all()
    np.testing.assert_allclose(memory.weights().sum(axis=1), 1)


def test_a_load_that_is_another_each_time_is_averaged() -> None:
    rng = np.random.default_rng(0)
    steady = [drawn(rng, CODE) for _ in range(6)]
    restless = [drawn(rng, popularity(seed)) for seed in range(100, 130)]
    assert not memory_of(steady + restless).shifted.any()


def test_an_empty_layer_is_no_shift() -> None:
    loads = [drawn(np.random.default_rng(seed), CODE) for seed in range(8)]
    loads[:] = [np.where(np.arange(NUM_LAYERS)[:, None] == 1, 0, load) for load in loads]
    memory = memory_of(loads)
    assert np.isfinite(memory.weights()).all()
    assert not memory.shifted[1]


def served(policy: str, loads: Callable[[np.random.Generator], Iterator[np.ndarray]], seed: int) -> list[float]:
    """Returns the balancedness of each window on four ranks, as the live balancer would serve it."""
    start = Placement.trivial(NUM_LAYERS, NUM_LOGICAL, 4, 8)
    run = GatedRun("", make_policy(policy), make_rebalancer(start, BalancerSettings(), FACTS), latency_steps=5)
    found = []
    for index, tokens in enumerate(loads(np.random.default_rng(seed))):
        placement = run.before(index * 60, 60).placement
        found.append(float(balancedness(rank_load(tokens, placement)).mean()))
        step_s = 0.01 + 1e-5 * rank_load(tokens / 60, placement).max(axis=1).sum()
        run.after(LoadRecord(index * 60, 60, "mixed", tokens, step_time_s=step_s))
    return found


def test_a_change_of_domain_is_answered_with_one_move() -> None:
    def loads(rng: np.random.Generator) -> Iterator[np.ndarray]:
        for index in range(20):
            yield drawn(rng, CODE if index < 12 else PROSE)

    for seed in range(5):
        balance = served("incremental", loads, seed)
        settled = np.mean(balance[-4:])
        assert balance[12] < settled - 0.05  # the first window of prose
        # The second window sees the move; from the third on it is whole.
        assert min(balance[14:]) > settled - 0.02, (seed, np.round(balance[11:], 3))
