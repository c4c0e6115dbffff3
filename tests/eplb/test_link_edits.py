"""Edits for the exact split: alike in C and in Python, within limits, never less level, and close to the best."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.placement import count_arrivals
from moe_serve.eplb.policies import link_edits
from moe_serve.eplb.policies.edits import EditState
from moe_serve.eplb.policies.link_edits import edit_links
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.objectives import sample_batches, split_balance
from moe_serve.eplb.policies.packing import Deadline, duplicate_slots
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.policies.problem import holds, problem_of
from moe_serve.eplb.policies.single_edits import EditGoal
from moe_serve.topology import Topology
from tests.eplb.brute_force import all_placements

RELAXED = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def edited(table, weight, budget, **limits):
    """Returns the table [1, R, K] after edits for one batch, the load [E], from the placement in use, and the log."""
    table, weight = np.asarray(table, dtype=np.int32), np.asarray(weight, dtype=np.float64)[None]
    state = EditState(weight, table.copy(), holds(table, weight.shape[1]), 30.0, **limits)
    goal = EditGoal(np.array([1.0]), np.array([budget]), 1e-3, 60)
    log, truncated = edit_links(state, weight[:, None], goal, Deadline())
    assert not truncated
    return state.table, log


def tops(weight, on_ranks):
    """The heaviest rank under the best split, from all sets of ranks: [E], [n, R, E] who holds what -> [n]."""
    num_ranks, top = on_ranks.shape[1], np.zeros(len(on_ranks))
    for size in range(1, num_ranks + 1):
        for ranks in combinations(range(num_ranks), size):
            confined = ~np.delete(on_ranks, ranks, axis=1).any(axis=1)
            top = np.maximum(top, confined @ weight / size)
    return top


def drifted(seed, num_layers, num_experts, topology, num_slots, **rules):
    """Returns the request of an edit: a plan for one load is in use, and another load is to be planned for."""
    rng = np.random.default_rng(seed)
    tokens = rng.lognormal(5, 1, (num_layers, num_experts))
    first = PlanRequest(tokens.astype(np.int64), topology, num_slots, planned_split="exact",
                        min_replicas=rules.get("min_replicas", 1))  # fmt: skip
    later = (tokens * rng.lognormal(0, 0.5, tokens.shape)).astype(np.int64)
    current = make_policy("refined").plan(first).placement
    return PlanRequest(later, topology, num_slots, current=current, planned_split="exact", **rules)


def test_the_heaviest_rank_is_linked_to_the_lightest_one():
    """Rank 0 has the only replica of the heavy expert 0, and the light rank 2 one of 5 that rank 1 can serve."""
    table, log = edited([[[0, 1, 2], [3, 4, 5], [5, 6, 7]]], [90, 10, 10, 30, 30, 10, 20, 10], 9)
    assert sorted(table[0, 2]) == [0, 6, 7]
    assert (log.expert.tolist(), log.moves.tolist()) == ([0], [1])
    assert log.gain[0] == pytest.approx((110 - 70) / 70)


def test_experts_trade_places_where_no_replica_is_spare():
    table, log = edited([[[0, 1], [2, 3]]], [40, 30, 20, 10], 9)
    assert {frozenset(rank) for rank in table[0].tolist()} == {frozenset({0, 3}), frozenset({1, 2})}
    assert (log.expert.tolist(), log.moves.tolist()) == ([-1], [2])


def test_empty_slots_are_filled_before_a_replica_is_given_up():
    table, _ = edited([[[0, 1, 2], [2, 3, -1]]], [60, 30, 10, 5], 1)
    assert sorted(table[0, 0]) == [0, 1, 2]
    assert sorted(table[0, 1]) == [0, 2, 3]


@RELAXED
@given(seed=st.integers(0, 2**32), data=st.data())
def test_c_and_python_make_the_same_edits_within_all_limits(seed, data):
    num_ranks, slots = data.draw(st.integers(2, 7)), data.draw(st.integers(2, 7))
    num_experts = data.draw(st.integers(2, num_ranks * slots - num_ranks // 2 - 1))
    least = data.draw(st.integers(1, min(2, num_ranks * slots // num_experts)))
    limit = data.draw(st.sampled_from([{}, {"max_moves": 3}, {"max_rank_moves": 1}, {"max_total_moves": 4},
                                       {"min_gain": 0.0}]))  # fmt: skip
    request = drifted(seed, 2, num_experts, Topology(1, num_ranks), num_ranks * slots, min_replicas=least, **limit)
    plans, found = [], link_edits.find_library
    for library in (found, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_edits, "find_library", library)
            plans.append(make_policy("incremental").plan(request))
    np.testing.assert_array_equal(plans[0].placement.physical_to_logical, plans[1].placement.physical_to_logical)
    problem, table = problem_of(request), plans[0].placement.by_rank
    arrived = count_arrivals(problem.current, table)
    assert not plans[0].unkept
    assert arrived.sum() <= request.max_total_moves if request.max_total_moves is not None else True
    assert arrived.sum(axis=1).max() <= (num_ranks * slots if request.max_moves is None else request.max_moves)
    assert arrived.max() <= (slots if request.max_rank_moves is None else request.max_rank_moves)
    assert (holds(table, num_experts).sum(axis=1) >= least).all()
    assert not duplicate_slots(table.reshape(-1, num_ranks, slots)).any()
    batches = sample_batches(problem.weight, num_ranks, request.seed)
    served = [split_balance(problem, each, batches) for each in (problem.current, table)]
    assert (served[1] >= served[0] - 0.003).all(), "the split of the edits ends a little before that of split_balance"


def test_edits_come_close_to_the_best_of_all_placements():
    reached = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        spare = int(rng.integers(1, 4))
        num_ranks, slots = 3, 3 if spare == 3 else 2
        num_experts = num_ranks * slots - spare
        weight = rng.lognormal(4, 1, num_experts)
        ids = np.concatenate([np.arange(num_experts), rng.choice(num_experts, spare, replace=False)])
        start = np.sort(ids).reshape(slots, num_ranks).T[None]
        table, _ = edited(start, weight, 99)
        top, before = (tops(weight, holds(each.astype(np.int32), num_experts))[0] for each in (table, start))
        assert top <= before * (1 + 1e-9)
        reached.append(tops(weight, all_placements(num_experts, num_ranks, slots)).min() / top)
    assert np.mean(np.array(reached) > 1 - 1e-3) > 0.9
    assert np.mean(reached) > 0.99
    assert min(reached) > 0.8


@pytest.mark.parametrize(("num_experts", "num_slots"), [(64, 72), (16, 24)])
@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_a_plan_for_the_exact_split_is_served_better_by_it_with_fewer_moves(spread, num_experts, num_slots):
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.normal(0, 0.8, (4, num_experts)))
    changed = popularity * np.exp(rng.normal(0, spread, popularity.shape))
    loads = [(1e4 * each).astype(np.int64) for each in (popularity, changed)]
    topology, served, moves = Topology(1, 8), {}, {}
    first = make_policy("refined").plan(PlanRequest(loads[0], topology, num_slots, planned_split="exact")).placement
    for split in ("even", "exact"):
        request = PlanRequest(loads[1], topology, num_slots, current=first, planned_split=split)
        plan = make_policy("incremental").plan(request)
        problem = problem_of(request)
        served[split] = split_balance(problem, plan.placement.by_rank, sample_batches(problem.weight, 8, 1)).mean()
        moves[split] = plan.num_moves
    assert served["exact"] > served["even"]
    assert moves["exact"] < moves["even"]


def test_plans_for_one_load_end_in_no_moves():
    request = drifted(3, 4, 40, Topology(1, 8), 48)
    for _ in range(4):
        plan = make_policy("incremental").plan(request)
        rounded = request.tokens + np.random.default_rng(plan.num_moves).integers(-1, 2, request.tokens.shape)
        request = PlanRequest(np.maximum(rounded, 0), request.topology, 48, current=plan.placement,
                              planned_split="exact")  # fmt: skip
    assert plan.num_moves == 0


def test_layers_without_load_stay_and_a_deadline_ends_the_edits():
    request = drifted(1, 3, 20, Topology(1, 4), 24)
    tokens = request.tokens.copy()
    tokens[1] = 0
    request = PlanRequest(tokens, request.topology, 24, current=request.current, planned_split="exact")
    plan = make_policy("incremental").plan(request)
    arrived = count_arrivals(request.current.by_rank, plan.placement.by_rank).sum(axis=1)
    assert arrived[1] == 0
    assert arrived.any()
    late = PlanRequest(tokens, request.topology, 24, current=request.current, planned_split="exact", time_budget_s=1e-9)
    cut = make_policy("incremental").plan(late)
    assert cut.truncated
    np.testing.assert_array_equal(cut.placement.physical_to_logical, request.current.physical_to_logical)


def test_with_few_redundant_experts_both_splits_have_one_plan():
    request = drifted(2, 2, 33, Topology(1, 6), 36)
    even = PlanRequest(request.tokens, request.topology, 36, current=request.current)
    plans = [make_policy("incremental").plan(each).placement.physical_to_logical for each in (request, even)]
    np.testing.assert_array_equal(*plans)
