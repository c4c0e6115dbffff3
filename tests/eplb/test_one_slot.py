"""One slot per rank: the edits are the fewest, and reach the lowest heaviest replica that these moves allow."""

from functools import cache
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.incremental import nearest_counts
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.topology import Topology
from tests.eplb.loads import drifting, lognormal, same_slots


@cache
def all_counts(num_experts, num_slots):
    """[X, E]: every way to hand out at most this many slots."""
    ids = np.array(list(combinations_with_replacement(range(num_experts + 1), num_slots)))
    return (ids[:, :, None] == np.arange(num_experts)).sum(axis=1)


def fewest_moves(weight, fixed, now, num_slots, least, max_moves):
    """The lowest heaviest replica within max_moves, and the fewest moves that reach it; missing replicas come first."""
    tried = all_counts(len(weight), num_slots)
    tried = tried[(tried >= least).all(axis=1)]
    moves = np.maximum(tried - now, 0).sum(axis=1)
    within = moves <= max(max_moves, np.maximum(least - now, 0).sum())
    top = (weight / tried + fixed).max(axis=1)
    best = top[within].min()
    return best, moves[within & (top == best)].min()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_counts_with_as_few_moves_are_better(data):
    num_experts = data.draw(st.integers(1, 5))
    num_slots = data.draw(st.integers(num_experts, 8))
    least = data.draw(st.integers(1, min(2, num_slots // num_experts)))
    weight = np.array(
        data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 6, 7, 12, 60]), min_size=num_experts, max_size=num_experts)),
        float,
    )
    fixed = np.array(
        data.draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=num_experts, max_size=num_experts)), float
    )
    slots = np.array(data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_slots, max_size=num_slots)))
    max_moves = data.draw(st.integers(0, num_slots))
    now = np.bincount(slots[slots >= 0], minlength=num_experts)
    found = nearest_counts(
        weight[None], now[None], np.array([(slots < 0).sum()]), np.zeros(1), max_moves, fixed[None], least
    )[0]
    best, fewest = fewest_moves(weight, fixed, now, num_slots, least, max_moves)
    assert found.sum() <= num_slots
    assert (found >= least).all()
    assert (weight / found + fixed).max() == best
    assert np.maximum(found - now, 0).sum() == fewest


def plan(tokens, ranks, current, topology=None, **more):
    options = {"slack": more.pop("slack")} if "slack" in more else {}
    request = PlanRequest(tokens, topology or Topology(1, ranks), ranks, current=current, **more)
    return make_policy("incremental", **options).plan(request)


@pytest.mark.parametrize(("experts", "ranks"), [(256, 288), (256, 320), (37, 37), (1, 5)])
def test_a_few_moves_reach_the_balance_of_a_plan_from_scratch(experts, ranks):
    current = None
    for tokens in drifting(4, 3, experts, 0.98):
        anew = make_policy("refined").plan(PlanRequest(tokens, Topology(1, ranks), ranks))
        made = plan(tokens, ranks, current)
        np.testing.assert_allclose(made.balancedness, anew.balancedness, rtol=1e-12)
        if current is not None:
            assert made.num_moves <= 0.05 * 3 * ranks
        current = made.placement


def test_moves_count_and_every_other_slot_stays():
    now, later = drifting(2, 3, 64, 0.9)
    current = plan(now, 80, None).placement
    made = plan(later, 80, current, max_moves=3)
    changed = made.placement.physical_to_logical != current.physical_to_logical
    assert (changed.sum(axis=1) <= 3).all()
    assert changed.sum() == made.num_moves > 0
    assert (made.balancedness > balancedness(rank_load(later, current)) - 1e-12).all()
    unlimited = plan(later, 80, current)
    assert (unlimited.balancedness >= made.balancedness).all()
    assert same_slots(plan(later, 80, current, max_moves=0).placement, current)


def test_slack_ends_the_edits_earlier():
    now, later = drifting(2, 8, 64, 0.9)
    current = plan(now, 80, None).placement
    best, made = plan(later, 80, current), plan(later, 80, current, slack=0.1)
    assert made.num_moves < best.num_moves
    assert (made.balancedness >= 0.9 * best.balancedness - 1e-12).all()


def test_a_lost_rank_costs_the_experts_that_only_it_had():
    tokens = lognormal(4, 16, 0.8)
    current = plan(tokens, 24, None).placement
    made = plan(tokens, 24, current, excluded_ranks=(3, 20), max_moves=0)
    lost = current.without_ranks([3, 20])[0].replica_count == 0
    assert made.num_moves == lost.sum()
    assert (made.placement.physical_to_logical[:, [3, 20]] == -1).all()
    assert (made.placement.replica_count >= 1).all()
    back = plan(tokens, 24, made.placement)
    np.testing.assert_allclose(back.balancedness, plan(tokens, 24, None).balancedness)


def test_second_replicas_and_costs_of_their_own_are_kept():
    tokens = lognormal(3, 8, 0.8)
    table = np.tile(np.append(np.arange(8), np.zeros(12, dtype=int)), (3, 1))
    made = plan(tokens, 20, Placement(table, 8, 20), min_replicas=2, objective="step_time", cost=RankCost(1e-6, 1e-2))
    assert (made.placement.replica_count >= 2).all()
    scratch = make_policy("refined").plan(
        PlanRequest(tokens, Topology(1, 20), 20, min_replicas=2, objective="step_time", cost=RankCost(1e-6, 1e-2))
    )
    np.testing.assert_array_equal(
        np.sort(made.placement.replica_count, axis=1), np.sort(scratch.placement.replica_count, axis=1)
    )


def test_under_a_hierarchy_experts_stay_on_their_home_nodes():
    tokens = lognormal(2, 16, 0.8)
    top = Topology(4, 6)
    current = make_policy("refined").plan(PlanRequest(tokens, top, 24, num_groups=4, off_home=0.0)).placement
    made = plan(lognormal(2, 16, 0.8, seed=2), 24, current, top, num_groups=4, off_home=0.0)
    assert (made.off_home <= 1e-12).all()


def test_no_load_at_all_moves_nothing():
    current = plan(lognormal(2, 6, 0.8), 8, None).placement
    assert plan(np.zeros((2, 6), dtype=int), 8, current).num_moves == 0
