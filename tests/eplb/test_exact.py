import numpy as np
import pytest

from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology
from tests.eplb.brute_force import best_top


@pytest.mark.parametrize(("num_experts", "num_ranks", "slots"), [(5, 3, 2), (5, 2, 3), (4, 3, 3)])
def test_the_program_finds_the_optimum_of_brute_force(num_experts, num_ranks, slots):
    tokens = np.random.default_rng(num_experts).integers(0, 1000, (4, num_experts))
    plan = make_policy("milp").plan(PlanRequest(tokens, Topology(1, num_ranks), num_ranks * slots))
    assert not plan.truncated
    best = [w.sum() / num_ranks / best_top(w, num_ranks, slots) for w in tokens.astype(float)]
    np.testing.assert_allclose(plan.balancedness, best, rtol=1e-6)


def test_the_program_finds_the_best_plan_with_two_replicas_of_each():
    tokens = np.random.default_rng(7).integers(0, 1000, (2, 4))
    plan = make_policy("milp").plan(PlanRequest(tokens, Topology(1, 3), 9, min_replicas=2))
    best = [w.sum() / 3 / best_top(w, 3, 3, min_replicas=2) for w in tokens.astype(float)]
    np.testing.assert_allclose(plan.balancedness, best, rtol=1e-6)


def test_moves_stay_within_the_budget_and_more_moves_never_hurt():
    draw = np.random.default_rng(3)
    top = Topology(1, 3)
    current = make_policy("milp").plan(PlanRequest(draw.integers(1, 900, (1, 5)), top, 9)).placement
    tokens = draw.integers(1, 900, (1, 5))
    plans = [make_policy("milp").plan(PlanRequest(tokens, top, 9, current=current, max_moves=n)) for n in (0, 1, 2, 9)]
    assert [p.num_moves <= n for p, n in zip(plans, (0, 1, 2, 9), strict=True)] == [True] * 4
    reached = [float(p.balancedness[0]) for p in plans]
    assert reached == sorted(reached)


def test_the_hierarchy_is_kept():
    tokens = np.array([[900, 100, 100, 100, 100, 100]])
    hard, soft, free = (
        make_policy("milp").plan(PlanRequest(tokens, Topology(2, 2), 8, off_home=share)) for share in (0.0, 0.25, 1.0)
    )
    assert hard.off_home[0] == 0
    assert soft.off_home[0] <= 0.25 + 1e-9
    assert hard.balancedness[0] < soft.balancedness[0] <= free.balancedness[0] + 1e-9


def test_incremental_edits_come_close_to_the_best_within_the_same_moves():
    draw = np.random.default_rng(5)
    top = Topology(1, 3)
    ratios = []
    for _ in range(4):
        current = make_policy("refined").plan(PlanRequest(draw.integers(50, 900, (1, 6)), top, 9)).placement
        tokens = draw.integers(50, 900, (1, 6))
        best = make_policy("milp").plan(PlanRequest(tokens, top, 9, current=current, max_moves=3))
        ours = make_policy("incremental", slack=0.0).plan(PlanRequest(tokens, top, 9, current=current, max_moves=3))
        assert ours.num_moves <= 3
        ratios.append(float(ours.balancedness[0] / best.balancedness[0]))
    assert max(ratios) <= 1 + 1e-6
    assert np.mean(ratios) > 0.93


def test_large_cases_are_refused_with_the_way_out():
    with pytest.raises(PlacementError, match="refined"):
        make_policy("milp").plan(PlanRequest(np.ones((1, 256)), Topology(4, 8), 288))
