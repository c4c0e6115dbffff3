"""Edits of the placement in use keep to their budget and never hurt.

With one slot per rank they are the fewest, and reach the lowest heaviest replica that these moves allow.
"""

from functools import cache
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.edits import EditState, all_overwrites, apply_edits, best_overwrites, best_swaps
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.one_slot import nearest_counts
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.eplb.policies.problem import holds
from moe_serve.eplb.policies.single_edits import EditLog, edits_within, replay_edits
from moe_serve.topology import Topology
from tests.eplb.loads import drifting, grouped, lognormal, same_slots


def plan(tokens, topology, slots, current=None, name="incremental", **more):
    options = more.pop("options", {})
    return make_policy(name, **options).plan(PlanRequest(tokens, topology, slots, current=current, **more))


def a_state(seed=0):
    draw = np.random.default_rng(seed)
    tokens = lognormal(3, 10, 0.8, seed).astype(float)
    unit = tokens / tokens.sum(axis=1, keepdims=True) * 6
    table = np.stack([np.append(draw.permutation(10), draw.integers(0, 10, 8)) for _ in range(3)])
    table = table.astype(np.int32).reshape(3, 3, 6).transpose(0, 2, 1).copy()
    return EditState(unit, table, holds(table, 10), steepness=9.0)


def peak(state):
    return np.exp(state.steepness * state.rank_load).sum(axis=1)


def test_the_predicted_gain_of_a_swap_is_the_real_one():
    for seed in range(6):
        state = a_state(seed)
        edit = best_swaps(state, np.full(3, 99), num_heavy=6)
        before, scale = peak(state), np.exp(state.steepness * state.peak_load)
        which = np.isfinite(edit.gain)
        apply_edits(state, edit, which)
        np.testing.assert_allclose((before - peak(state))[which], (edit.gain * scale)[which], rtol=1e-9)


def test_the_predicted_gain_of_an_overwrite_is_the_real_one():
    """Also where other ranks hold both experts, the one that goes and the one that comes."""
    checked = shared = 0
    for seed in range(40):
        state = a_state(seed)
        edit = best_overwrites(state, np.full(3, 99))
        before, scale, held = peak(state), np.exp(state.steepness * state.peak_load), state.held.copy()
        old = state.table.reshape(3, -1)[np.arange(3), edit.slot]
        twice = [max((state.table[i] == e).sum(axis=1).max() for e in (old[i], edit.expert[i])) > 1 for i in range(3)]
        apply_edits(state, edit, np.isfinite(edit.gain))
        for i in range(3):
            if np.isfinite(edit.gain[i]) and not twice[i]:
                np.testing.assert_allclose(before[i] - peak(state)[i], edit.gain[i] * scale[i], rtol=1e-9)
                checked += 1
                shared += bool((held[i][:, old[i]] & held[i][:, edit.expert[i]]).any())
    assert checked > 20
    assert shared > 3


def test_an_overwrite_is_found_where_one_rank_holds_both_experts():
    """Rank 0 holds expert 1, which comes to rank 1, and the other replica of expert 0, which goes from there."""
    current = Placement(np.array([[0, 1, 2, 2, 3, 0]], dtype=np.int32), 4, 2)
    found = plan(np.array([[100, 300, 100, 100]]), Topology(1, 2), 6, current)
    assert found.balancedness.tolist() == [1.0]
    assert found.num_moves == 1


def test_an_overwrite_never_takes_the_last_copy_or_repeats_an_expert():
    state = a_state(3)
    options = all_overwrites(state)
    for layer, d, expert in np.argwhere(np.isfinite(options.gain)):
        old, rank = options.old[layer, d], options.slot[layer, d] // 3
        assert old < 0 or (state.table[layer] == old).sum() > 1
        assert expert not in state.table[layer, rank]


@cache
def refined_start(experts, slots, ranks):
    return plan(drifting(1, 4, experts, 0.9)[0], Topology(1, ranks), slots, name="refined").placement


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(64, 72, 8), (64, 72, 18), (64, 72, 36)])
@pytest.mark.parametrize("budget", [0, 1, 3, 10])
def test_the_budget_is_kept_and_edits_never_hurt(experts, slots, ranks, budget):
    loads = drifting(3, 4, experts, 0.9)
    top = Topology(1, ranks)
    current = refined_start(experts, slots, ranks)
    for tokens in loads[1:]:
        before = balancedness(rank_load(tokens, current))
        made = plan(tokens, top, slots, current, max_moves=budget)
        shape = (4, ranks, slots // ranks)
        old, new = (p.physical_to_logical.reshape(shape) for p in (current, made.placement))
        arrived = ~(new[..., :, None] == old[..., None, :]).any(axis=3) & (new >= 0)
        assert (arrived.sum(axis=(1, 2)) <= budget).all()
        assert (made.balancedness >= before - 1e-12).all()
        assert made.placement.num_duplicates.sum() == 0
        current = made.placement


def test_a_balanced_placement_is_left_alone():
    tokens = lognormal(4, 64, 0.6)
    current = plan(tokens, Topology(1, 8), 72, name="refined").placement
    made = plan(tokens, Topology(1, 8), 72, current)
    assert made.num_moves == 0
    assert same_slots(made.placement, current)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "most", "behind"),
    [(256, 288, 32, 0.06, 0.01), (128, 144, 16, 0.06, 0.01), (256, 288, 72, 0.15, 0.01), (256, 288, 144, 0.23, 0.03)],
)
def test_few_moves_follow_a_slow_drift_nearly_as_well_as_planning_anew(experts, slots, ranks, most, behind):
    num_layers = 8 if ranks > 72 else 20
    loads = drifting(4, num_layers, experts, 0.98, seed=4)
    top = Topology(1, ranks)
    current = plan(loads[0], top, slots, name="refined").placement
    ours, anew, moves = [], [], []
    for now, following in pairwise(loads[1:]):
        made = plan(now, top, slots, current)
        current = made.placement
        moves.append(made.num_moves / (num_layers * slots))
        fresh = plan(now, top, slots, name="deepseek").placement
        ours.append(balancedness(rank_load(following, current)).mean())
        anew.append(balancedness(rank_load(following, fresh)).mean())
    assert np.mean(moves) <= most
    assert np.mean(ours) >= np.mean(anew) - behind


def test_lost_ranks_are_repaired():
    tokens = lognormal(3, 32, 0.8)
    top = Topology(2, 4)
    current = plan(tokens, top, 48, name="refined").placement
    made = plan(tokens, top, 48, current, excluded_ranks=(2,))
    table = made.placement.physical_to_logical.reshape(3, 8, 6)
    assert (table[:, 2] == -1).all()
    assert (made.placement.replica_count >= 1).all()
    assert made.num_moves < 3 * 48 / 2


def test_second_replicas_are_put_back_whatever_they_cost_and_then_the_budget_holds():
    tokens = lognormal(3, 16, 0.8)
    top = Topology(1, 6)
    current = plan(tokens, top, 48, name="greedy", min_replicas=2).placement
    made = plan(tokens, top, 48, current, excluded_ranks=(2,), min_replicas=2, max_moves=1)
    assert (made.placement.without_ranks([2])[0].replica_count >= 2).all()
    repaired = made.placement
    gone = (current.without_ranks([2])[0].replica_count < 2).sum()
    assert made.num_moves == gone > 3, "one move for each expert that had lost its second replica, and no other"
    later = lognormal(3, 16, 0.8, seed=1)
    made = plan(later, top, 48, repaired, excluded_ranks=(2,), min_replicas=2, max_moves=1)
    assert 0 < made.num_moves <= 3
    assert (made.placement.replica_count >= 2).all()


def test_an_illegal_start_with_duplicates_is_mended():
    table = np.array([[0, 0, 1, 1, 2, 2, 3, 3]])
    made = plan(np.array([[8, 4, 2, 1]]), Topology(1, 4), 8, Placement(table, 4, 4))
    assert made.placement.num_duplicates.sum() == 0
    assert made.balancedness[0] > 0.85


def test_under_a_hierarchy_primaries_stay_home_and_the_budget_holds():
    top = Topology(4, 4)
    tokens = grouped(4, 64, 8, seed=1)
    current = plan(tokens, top, 80, name="refined", num_groups=8, off_home=0.1).placement
    later = np.round(tokens * np.exp(0.2 * np.random.default_rng(0).standard_normal(tokens.shape))).astype(int)
    made = plan(later, top, 80, current, num_groups=8, off_home=0.1)
    assert (made.off_home <= 0.1 + 1e-9).all()
    assert made.placement.num_duplicates.sum() == 0
    assert (made.balancedness >= balancedness(rank_load(later, current)) - 1e-9).mean() >= 0.5


@pytest.mark.parametrize("seed", [1, 9, 15])
def test_under_a_hard_hierarchy_not_even_an_idle_expert_leaves_its_node(seed):
    """It would have load away from home in the next window, and the whole layer would then be planned anew."""
    rng = np.random.default_rng(seed)
    top = Topology(2, 4)
    tokens = rng.lognormal(0, 1, (8, 24)).round(2)
    current = plan(tokens, top, 40, name="refined", num_groups=4, off_home=0.0).placement
    later = np.where(rng.random(24) < 0.3, 0.0, tokens[:, ::-1])
    made = plan(later, top, 40, current, num_groups=4, off_home=0.0)
    assert made.num_moves > 0
    held = holds(made.placement.physical_to_logical.reshape(8, 2, -1), 24)
    assert (held.sum(axis=1) == 1).all()


def test_without_a_placement_in_use_the_plan_is_refined():
    tokens = lognormal(2, 32, 0.8)
    made = plan(tokens, Topology(1, 8), 40)
    assert same_slots(made.placement, plan(tokens, Topology(1, 8), 40, name="refined").placement)
    assert made.num_moves == 0


def log_of(*layers):
    """layers: for each layer its edits, (moves so far, gain)"""
    rows = [(layer, *edit) for layer, edits in enumerate(layers) for edit in edits]
    layer, moves, gain = (np.array([row[i] for row in rows]) for i in range(3))
    slot = np.arange(len(rows))
    return EditLog(layer.astype(np.int64), slot, slot, slot, moves.astype(np.int64), gain.astype(np.float64))


@pytest.mark.parametrize(
    ("most", "keep"),
    [(0, [0, 0]), (1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (4, [3, 1]), (5, [3, 2]), (6, [3, 2]), (99, [3, 2])],
)
def test_the_steepest_edits_of_all_layers_come_first(most, keep):
    log = log_of([(1, 9.0), (2, 3.0), (3, 2.0)], [(1, 4.0), (2, 1.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), most).tolist() == keep


def test_a_poor_edit_that_opens_the_way_for_a_rich_one_is_taken_with_it():
    log = log_of([(2, 1.0), (3, 8.0)], [(1, 2.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 3).tolist() == [2, 0]
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 2).tolist() == [0, 1]


def test_no_later_edit_of_a_layer_is_taken_without_the_one_before_it():
    log = log_of([(3, 9.0), (4, 1.0)], [(1, 0.5)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 1).tolist() == [0, 1]


def test_edits_that_take_moves_back_are_free_and_moves_of_a_repair_count():
    log = log_of([(2, 1.0), (1, 0.5)], [(5, 7.0)])
    assert edits_within(log, np.array([3, 4]), np.ones(2), 4).tolist() == [2, 0]
    assert edits_within(log, np.array([3, 4]), np.ones(2), 5).tolist() == [2, 0]
    assert edits_within(log, np.array([3, 4]), np.ones(2), 6).tolist() == [2, 1]


def test_a_busier_layer_counts_more():
    log = log_of([(1, 1.0)], [(1, 2.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.array([3.0, 1.0]), 1).tolist() == [1, 0]


def test_kept_edits_are_made_in_order():
    log = EditLog(*(np.array(a) for a in ([0, 0, 0], [0, 3, 1], [2, 3, 1], [-1, 5, 7], [2, 3, 4])), np.ones(3))
    table = np.array([[[0, 1], [2, 3]]], dtype=np.int32)
    replay_edits(table, log, np.array([2]))
    assert table.tolist() == [[[2, 1], [0, 5]]]


@pytest.mark.parametrize(("slots", "ranks"), [(72, 8), (72, 18), (64, 32), (64, 64)])
@pytest.mark.parametrize("total", [0, 1, 20])
def test_a_plan_keeps_to_the_moves_of_all_layers_together(slots, ranks, total):
    loads = drifting(2, 5, 60, 0.9)
    top = Topology(1, ranks)
    current = make_policy("greedy").plan(PlanRequest(loads[0], top, slots)).placement
    request = PlanRequest(loads[1], top, slots, current=current, max_total_moves=total)
    plan = make_policy("incremental").plan(request)
    assert plan.num_moves <= total
    assert plan.balancedness.mean() >= balancedness(rank_load(loads[1], current)).mean() - 1e-9
    assert plan.num_moves > 0 or total // 5 == 0 or slots == ranks


def test_moves_of_all_layers_together_serve_better_than_as_many_for_each_layer():
    loads = drifting(2, 20, 64, 0.95)
    top = Topology(1, 8)
    current = make_policy("refined").plan(PlanRequest(loads[0], top, 72)).placement
    slowest = []
    for limit in ({"max_moves": 1}, {"max_total_moves": 20}):
        plan = make_policy("incremental").plan(PlanRequest(loads[1], top, 72, current=current, **limit))
        assert 0 < plan.num_moves <= 20
        slowest.append((1 / plan.balancedness).sum())
    assert slowest[1] < slowest[0] * 0.998


def test_the_price_applies_under_a_hierarchy_too():
    loads = drifting(2, 3, 64, 0.8)
    top = Topology(2, 4)
    current = make_policy("refined").plan(PlanRequest(loads[0], top, 80, num_groups=8, off_home=0.1)).placement
    few, many = (
        make_policy("incremental").plan(
            PlanRequest(loads[1], top, 80, num_groups=8, off_home=0.1, current=current, max_total_moves=most)
        )
        for most in (6, 1000)
    )
    assert 0 < few.num_moves <= 6 < many.num_moves
    assert (few.off_home <= 0.1 + 1e-9).all()


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


def edited(tokens, ranks, current, topology=None, **more):
    options = {"slack": more.pop("slack")} if "slack" in more else {}
    request = PlanRequest(tokens, topology or Topology(1, ranks), ranks, current=current, **more)
    return make_policy("incremental", **options).plan(request)


@pytest.mark.parametrize(("experts", "ranks"), [(256, 288), (256, 320), (37, 37), (1, 5)])
def test_a_few_moves_reach_the_balance_of_a_plan_from_scratch(experts, ranks):
    current = None
    for tokens in drifting(4, 3, experts, 0.98):
        anew = make_policy("refined").plan(PlanRequest(tokens, Topology(1, ranks), ranks))
        made = edited(tokens, ranks, current)
        np.testing.assert_allclose(made.balancedness, anew.balancedness, rtol=1e-12)
        if current is not None:
            assert made.num_moves <= 0.05 * 3 * ranks
        current = made.placement


def test_moves_count_and_every_other_slot_stays():
    now, later = drifting(2, 3, 64, 0.9)
    current = edited(now, 80, None).placement
    made = edited(later, 80, current, max_moves=3)
    changed = made.placement.physical_to_logical != current.physical_to_logical
    assert (changed.sum(axis=1) <= 3).all()
    assert changed.sum() == made.num_moves > 0
    assert (made.balancedness > balancedness(rank_load(later, current)) - 1e-12).all()
    unlimited = edited(later, 80, current)
    assert (unlimited.balancedness >= made.balancedness).all()
    assert same_slots(edited(later, 80, current, max_moves=0).placement, current)


def test_slack_ends_the_edits_earlier():
    now, later = drifting(2, 8, 64, 0.9)
    current = edited(now, 80, None).placement
    best, made = edited(later, 80, current), edited(later, 80, current, slack=0.1)
    assert made.num_moves < best.num_moves
    assert (made.balancedness >= 0.9 * best.balancedness - 1e-12).all()


def test_a_lost_rank_costs_the_experts_that_only_it_had():
    tokens = lognormal(4, 16, 0.8)
    current = edited(tokens, 24, None).placement
    made = edited(tokens, 24, current, excluded_ranks=(3, 20), max_moves=0)
    lost = current.without_ranks([3, 20])[0].replica_count == 0
    assert made.num_moves == lost.sum()
    assert (made.placement.physical_to_logical[:, [3, 20]] == -1).all()
    assert (made.placement.replica_count >= 1).all()
    back = edited(tokens, 24, made.placement)
    np.testing.assert_allclose(back.balancedness, edited(tokens, 24, None).balancedness)


def test_second_replicas_and_costs_of_their_own_are_kept():
    tokens = lognormal(3, 8, 0.8)
    table = np.tile(np.append(np.arange(8), np.zeros(12, dtype=int)), (3, 1))
    made = edited(tokens, 20, Placement(table, 8, 20), min_replicas=2, objective="step_time", cost=RankCost(1e-6, 1e-2))
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
    made = edited(lognormal(2, 16, 0.8, seed=2), 24, current, top, num_groups=4, off_home=0.0)
    assert (made.off_home <= 1e-12).all()


def test_no_load_at_all_moves_nothing():
    current = edited(lognormal(2, 6, 0.8), 8, None).placement
    assert edited(np.zeros((2, 6), dtype=int), 8, current).num_moves == 0
