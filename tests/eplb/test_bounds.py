import numpy as np
import pytest

from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.packing import balancedness_bound, lightest_top
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology
from tests.eplb.brute_force import best_top
from tests.eplb.loads import one_hot


def compare_with_brute_force(num_cases, seed):
    draw = np.random.default_rng(seed)
    for num_experts, num_ranks, slots in [(5, 3, 2), (6, 3, 2), (4, 4, 2), (5, 2, 3), (4, 3, 3), (5, 2, 4)]:
        tokens = np.round(1000 * np.exp(draw.uniform(0.2, 2) * draw.standard_normal((num_cases, num_experts))))
        best = np.array([w.sum() / num_ranks / best_top(w, num_ranks, slots) for w in tokens])
        cheap = balancedness_bound(tokens, num_ranks, slots)
        assert (cheap >= best * (1 - 1e-9)).all()


def test_no_placement_beats_a_bound():
    compare_with_brute_force(4, 0)


@pytest.mark.slow
def test_no_placement_of_thousands_beats_a_bound():
    for seed in range(1, 16):
        compare_with_brute_force(12, seed)


@pytest.mark.parametrize(
    "num_experts, num_ranks, slots, min_replicas",
    [(6, 2, 3, 1), (7, 2, 4, 1), (5, 3, 2, 1), (6, 3, 2, 1), (4, 2, 3, 1), (4, 4, 2, 2), (3, 2, 3, 2), (3, 3, 3, 2)],
)
def test_no_rank_can_be_brought_below_the_lightest_top(num_experts, num_ranks, slots, min_replicas):
    draw = np.random.default_rng(num_experts * num_ranks * slots)
    weight = np.round(1000 * np.exp(draw.uniform(0.2, 3, (8, 1)) * draw.standard_normal((8, num_experts))))
    for fixed in (np.zeros(weight.shape), draw.uniform(0, 500, weight.shape)):
        least = lightest_top(weight, num_ranks, slots, fixed, min_replicas)
        best = [best_top(w, num_ranks, slots, min_replicas, f) for w, f in zip(weight, fixed, strict=True)]
        assert (least <= np.array(best) * (1 + 1e-9)).all()


def test_the_lightest_top_of_one_hot_expert_is_what_can_be_reached():
    # Without a spare slot the hot expert has 63 of the lightest beside it; with four, 5 replicas share the 35 lightest.
    for num_experts, num_ranks, slots in [(128, 2, 64), (128, 4, 32), (60, 8, 8)]:
        tokens = one_hot(2, num_experts, 0.9)
        least = lightest_top(tokens.astype(np.float64), num_ranks, slots)
        plan = make_policy("refined").plan(PlanRequest(tokens, Topology(1, num_ranks), num_ranks * slots))
        np.testing.assert_allclose(plan.balancedness, tokens.sum(axis=1) / num_ranks / least, rtol=2e-4)


def test_no_load_is_perfect():
    assert balancedness_bound(np.zeros((2, 4)), 2, 3).tolist() == [1.0, 1.0]
