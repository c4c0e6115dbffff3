import numpy as np
import pytest

from moe_serve.eplb.policies.bounds import balancedness_bound, counting_bound
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology
from tests.eplb.brute_force import best_top
from tests.eplb.loads import zipf


def compare_with_brute_force(num_cases, seed):
    draw = np.random.default_rng(seed)
    for num_experts, num_ranks, slots in [(5, 3, 2), (6, 3, 2), (4, 4, 2), (5, 2, 3), (4, 3, 3), (5, 2, 4)]:
        tokens = np.round(1000 * np.exp(draw.uniform(0.2, 2) * draw.standard_normal((num_cases, num_experts))))
        best = np.array([w.sum() / num_ranks / best_top(w, num_ranks, slots) for w in tokens])
        cheap = balancedness_bound(tokens, num_ranks, slots)
        tight = counting_bound(tokens, num_ranks, slots)
        assert (cheap >= best * (1 - 1e-9)).all()
        assert (tight >= best * (1 - 1e-9)).all()
        assert (tight <= cheap + 1e-9).all()


def test_no_placement_beats_a_bound():
    compare_with_brute_force(4, 0)


@pytest.mark.slow
def test_no_placement_of_thousands_beats_a_bound():
    for seed in range(1, 16):
        compare_with_brute_force(12, seed)


def test_the_tight_bound_halves_the_gap_with_two_slots_per_rank():
    tokens = zipf(1, 256, 0.5)
    plan = make_policy("refined", prove=True).plan(PlanRequest(tokens, Topology(18, 8), 288))
    assert plan.bound[0] < 0.88  # the cheap bound is 1
    assert plan.gap[0] < 0.06


def test_no_load_is_perfect():
    assert balancedness_bound(np.zeros((2, 4)), 2, 3).tolist() == [1.0, 1.0]
    assert counting_bound(np.zeros((2, 4)), 2, 3).tolist() == [1.0, 1.0]
