"""A plan made anew moves what it must: ranks are relabelled, and a layer that gains nothing stays."""

import itertools
from itertools import permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_serve.eplb import relabel
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.objectives import off_node_share
from moe_serve.eplb.policies.packing import (
    duplicate_slots,
    list_replicas,
    minimax_counts,
    pack_in_rounds,
    pack_longest_first,
    repair_duplicates,
    replica_load,
)
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.eplb.policies.problem import problem_of
from moe_serve.eplb.relabel import cheapest_parts, cheapest_parts_reference, relabel_ranks
from moe_serve.topology import Topology
from tests.eplb.loads import drifting, grouped, lognormal, same_slots, small_cases, zipf

RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ANEW = ["greedy", "refined"]


def planned(name, tokens, topology, slots, current=None, options=None, **more):
    return make_policy(name, **(options or {})).plan(PlanRequest(tokens, topology, slots, current=current, **more))


@given(seed=st.integers(0, 2**31), size=st.integers(1, 6), most=st.sampled_from([1, 3, 50, 2**50]))
@RELAXED
def test_an_assignment_is_the_cheapest_and_both_forms_agree(seed, size, most):
    price = np.random.default_rng(seed).integers(-most, most + 1, (size, size))
    rows = np.arange(size)
    column = relabel.cheapest_columns_reference(price)
    assert sorted(column.tolist()) == rows.tolist()
    assert price[rows, column].sum() == min(price[rows, list(other)].sum() for other in permutations(range(size)))
    if relabel.find_library() is not None:
        np.testing.assert_array_equal(relabel.cheapest_columns(price), column)


def test_a_large_assignment_is_that_of_scipy():
    from scipy.optimize import linear_sum_assignment

    for seed, most in ((0, 2), (1, 1000)):
        price = np.random.default_rng(seed).integers(0, most, (90, 90))
        rows, columns = linear_sum_assignment(price)
        for found in (relabel.cheapest_columns(price), relabel.cheapest_columns_reference(price)):
            assert price[np.arange(90), found].sum() == price[rows, columns].sum()


@pytest.mark.parametrize("name", ANEW)
@pytest.mark.parametrize(
    ("slots", "ranks", "most"), [(256, 256, 0.0), (320, 320, 0.03), (288, 144, 0.55), (288, 32, 0.85)]
)
def test_ranks_are_relabelled_so_that_few_experts_move(name, slots, ranks, most):
    """94, 97, 97 and 96 % of the slots moved, with 256 of them for no balance at all."""
    loads, top = drifting(2, 2, 256, 0.98), Topology(ranks // 8, 8)
    current = planned(name, loads[0], top, slots).placement
    made, alone = planned(name, loads[1], top, slots, current), planned(name, loads[1], top, slots)
    assert made.num_moves / (2 * slots) <= most
    np.testing.assert_allclose(made.balancedness, alone.balancedness)
    assert made.num_moves == count_moves(current.by_rank, made.placement.by_rank).sum()


@pytest.mark.parametrize("name", ANEW)
@given(case=small_cases(), seed=st.integers(0, 99), off_home=st.sampled_from([1.0, 0.2, 0.0]))
@RELAXED
def test_a_plan_anew_is_as_good_as_without_a_placement_in_use_and_moves_no_more(name, case, seed, off_home):
    tokens, nodes, ranks, slots = case
    top = Topology(nodes, ranks)
    old = np.random.default_rng(seed).permutation(tokens, axis=1)
    current = planned(name, old, top, slots, off_home=off_home).placement
    assume(not current.num_duplicates.any())
    made = planned(name, tokens, top, slots, current, off_home=off_home)
    alone = planned(name, tokens, top, slots, off_home=off_home)
    assert (made.balancedness >= alone.balancedness - 1e-8).all()
    assert (made.off_home <= off_home + 1e-6).all()
    before = balancedness(rank_load(tokens, current))
    stays = (made.placement.by_rank == current.by_rank).all(axis=(1, 2))
    if off_home == 1.0:
        assert (stays | (made.balancedness > before)).all(), "no move where nothing is gained"
    if nodes == 1:
        moves = count_moves(current.by_rank, alone.placement.by_rank)
        assert (count_moves(current.by_rank, made.placement.by_rank) <= moves).all()


@pytest.mark.parametrize("name", ANEW)
def test_under_a_hierarchy_nodes_are_exchanged_as_wholes_and_homes_follow(name):
    top, slots, rules = Topology(4, 4), 80, {"num_groups": 8, "off_home": 0.1}
    tokens = grouped(3, 64, 8, seed=1)
    current = planned(name, tokens, top, slots, **rules).placement
    table = current.by_rank.reshape(3, 4, 4, 5)[:, [2, 0, 3, 1]][:, :, [3, 1, 0, 2], ::-1]
    renamed = Placement(table.reshape(3, slots).copy(), 64, 16)
    assert same_slots(planned(name, tokens, top, slots, renamed, **rules).placement, renamed)
    later = np.round(tokens * np.exp(0.5 * np.random.default_rng(0).standard_normal(tokens.shape))).astype(int)
    made, alone = (planned(name, later, top, slots, in_use, **rules) for in_use in (renamed, None))
    np.testing.assert_allclose(made.balancedness, alone.balancedness)
    np.testing.assert_allclose(made.off_home, alone.off_home)
    assert made.num_moves < count_moves(renamed.by_rank, alone.placement.by_rank).sum()
    nodes = {frozenset(node.ravel().tolist()) for node in alone.placement.by_rank[0].reshape(4, 4, 5)}
    assert nodes == {frozenset(node.ravel().tolist()) for node in made.placement.by_rank[0].reshape(4, 4, 5)}


@pytest.mark.parametrize("objective", ["off_node", {"tokens": 1.0, "off_node": 0.5}, "step_time"])
def test_where_sources_matter_nodes_keep_their_contents(objective):
    draw = np.random.default_rng(0)
    tokens = [lognormal(2, 24, 0.8, seed) for seed in (0, 1)]
    near = np.repeat(np.eye(3), 8, axis=1)[draw.integers(0, 3, 12)] * 5 + 1
    by_source = np.stack([draw.multinomial(1000, p / p.sum(), size=24).T for p in near.T[:2]])
    rules = {"objective": objective, "by_source": by_source, "cost": RankCost(1e-8, 0.0, 1e-8)}
    top, quick = Topology(3, 4), {"rounds": 2}
    current = planned("refined", tokens[0], top, 36, options=quick, **rules).placement
    made, alone = (planned("refined", tokens[1], top, 36, in_use, quick, **rules) for in_use in (current, None))
    problem = problem_of(PlanRequest(tokens[1], top, 36, **rules))
    away = [off_node_share(problem, plan.placement.by_rank) for plan in (made, alone)]
    np.testing.assert_allclose(made.balancedness, alone.balancedness)
    np.testing.assert_allclose(*away)


def test_plans_for_the_exact_split_are_compared_by_it():
    """A layer may become less even for the even split, which is not what serves it."""
    rules = {"planned_split": "exact"}
    loads, top = [lognormal(4, 32, 1.2, seed) for seed in (0, 1)], Topology(1, 8)
    current = planned("refined", loads[0], top, 40, **rules).placement
    made, alone = (planned("refined", loads[1], top, 40, in_use, **rules) for in_use in (current, None))
    assert made.num_moves > 0
    np.testing.assert_allclose(made.balancedness, alone.balancedness)
    again = planned("refined", loads[1], top, 40, made.placement, **rules)
    assert same_slots(again.placement, made.placement)


def test_a_placement_in_use_that_must_not_stay_goes_though_no_other_is_better():
    """An expert on one rank only, where two are asked for; and one off home."""
    tokens, top = np.array([[10, 10, 10, 10]]), Topology(2, 1)
    current = Placement(np.array([[0, 1, 2, 3]], dtype=np.int32), 4, 2)
    assert planned("greedy", tokens, top, 4, current).num_moves == 0
    wide = Placement(np.array([[0, 1, -1, -1, 2, 3, -1, -1]], dtype=np.int32), 4, 2)
    made = planned("greedy", tokens, top, 8, wide, min_replicas=2)
    assert made.num_moves == 4
    mixed = Placement(np.array([[0, 2, 1, 3]], dtype=np.int32), 4, 2)
    made = planned("greedy", tokens, top, 4, mixed, num_groups=2, off_home=0.0)
    assert made.num_moves == 2
    assert made.off_home.tolist() == [0.0]


@pytest.mark.parametrize("kind", ["ranks", "nodes"])
@pytest.mark.parametrize("seed", range(12))
def test_a_lost_rank_gets_no_part_of_a_new_placement(kind, seed):
    """Giving it one, and its empty part to a rank that lacks all experts of that one, seemed to cost the same."""
    draw = np.random.default_rng(seed)
    old, new = (
        Placement(np.concatenate([[-1, -1], draw.permutation(6)])[None].astype(np.int32), 6, 4) for _ in range(2)
    )
    target = plan_migration(old, new, Topology(2, 2), relabel=kind).target
    assert (target.physical_to_logical[0, :2] == -1).all()
    part = relabel_ranks(old, new, Topology(2, 2), kind)[0, ::2] // 2
    assert part[0] == 0
    assert sorted(part.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["deepseek", *ANEW])
def test_a_policy_that_plans_anew_says_which_limits_it_does_not_keep(name):
    loads, top = [lognormal(2, 32, 0.8, seed) for seed in (0, 1)], Topology(1, 4)
    current = planned(name, loads[0], top, 40).placement
    made = planned(name, loads[1], top, 40, current, max_moves=1, max_rank_moves=9, max_total_moves=3)
    assert [unkept.rule for unkept in made.unkept] == ["max_moves 1", "max_total_moves 3"]
    assert str(made.unkept[0]).endswith("the policy plans anew and keeps to no limit; use incremental")
    assert "max_moves 1 is not kept in 2 layers (up to " in str(made.unkept[0])
    assert not planned(name, loads[1], top, 40, made.placement, max_moves=0).unkept


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_both_forms_of_relabelling_agree_and_every_part_goes_to_one_rank(data):
    """Nodes of unequal size, empty slots, experts twice on a rank and ranks without any among them."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    node_of = np.repeat(np.arange(len(sizes)), sizes)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    old, new = draw.integers(-1, 6, (2, 2, len(node_of), data.draw(st.integers(1, 3)))).astype(np.int32)
    if data.draw(st.booleans()):
        old[:, 0] = new[:, 0] = -1
    for what in ("ranks", "nodes", "inside", "none"):
        part = cheapest_parts(old, new, node_of, what)
        np.testing.assert_array_equal(part, cheapest_parts_reference(old, new, node_of, what))
        assert (np.sort(part, axis=1) == np.arange(len(node_of))).all()
        if what == "inside":
            assert (node_of[part] == node_of).all()
        if what == "nodes":
            together = node_of[part][:, None, :] == node_of[part][:, :, None]
            assert (together == (node_of[:, None] == node_of)).all()
        assert (part[(new == -1).all(axis=2)] == np.where((new == -1).all(axis=2))[1]).all()


loads = st.lists(st.integers(0, 30), min_size=1, max_size=5)


@given(loads, st.integers(0, 5), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_replication_is_the_exact_minimax(load, spare, cap):
    weight = np.array([load], dtype=float)
    total = min(len(load) + spare, len(load) * cap)
    counts = minimax_counts(weight, len(load) + spare, cap)
    assert counts.sum() == total
    assert counts.min() >= 1
    assert counts.max() <= cap
    best = min(
        max(w / c for w, c in zip(load, choice, strict=True))
        for choice in itertools.product(range(1, cap + 1), repeat=len(load))
        if sum(choice) <= total
    )
    assert (weight / counts).max() == best


@given(st.integers(0, 2**31), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_jump_start_of_replication_changes_nothing(seed, ratio):
    weight = np.random.default_rng(seed).integers(0, 10**9, (3, 20)).astype(float)
    fast = minimax_counts(weight, 20 * ratio + 7, 64)
    slow = np.ones((3, 20), dtype=int)
    for row, load in zip(slow, weight, strict=True):
        for _ in range(20 * ratio + 7 - 20):
            row[(load / row).argmax()] += 1
    assert ((weight / fast).max(axis=1) == (weight / slow).max(axis=1)).all()


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_two_slots_per_rank_are_packed_optimally(load):
    ids = np.arange(6, dtype=np.int32)[None]
    _, packed = pack_in_rounds(ids, np.array([load], dtype=float), 3)
    best = min(
        max(load[p[0]] + load[p[1]], load[p[2]] + load[p[3]], load[p[4]] + load[p[5]])
        for p in itertools.permutations(range(6))
    )
    assert packed.sum(axis=2).max() == best


@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(2, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_duplicates_are_repaired_whenever_copies_fit_the_ranks(seed, num_ranks, slots, in_rounds):
    draw = np.random.default_rng(seed)
    num_experts = draw.integers(slots, num_ranks * slots + 1)
    weight = np.exp(2 * draw.standard_normal((4, num_experts)))
    counts = minimax_counts(weight, num_ranks * slots, num_ranks)
    replicas = list_replicas(counts, num_ranks * slots)
    pack = pack_in_rounds if in_rounds else pack_longest_first
    table, load = pack(replicas, replica_load(weight, counts, replicas), num_ranks)
    repair_duplicates(table, load)
    assert not duplicate_slots(table).any()
    assert (np.sort(table.reshape(4, -1), axis=1) == np.sort(replicas, axis=1)).all()
    np.testing.assert_allclose(load, replica_load(weight, counts, table))


def test_duplicates_are_repaired_from_the_worst_start():
    table = np.repeat(np.arange(4, dtype=np.int32), 4).reshape(1, 4, 4)  # rank r holds expert r four times
    load = np.ones((1, 4, 4))
    repair_duplicates(table, load)
    assert not duplicate_slots(table).any()


def test_no_more_than_the_static_placement_and_close_to_even_with_many_slots():
    for tokens in (lognormal(8, 64, 0.6), zipf(8, 64, 0.8)):
        plan = make_policy("greedy").plan(PlanRequest(tokens, Topology(1, 8), 72))
        trivial = Placement.trivial(8, 64, 8, 8)
        assert (plan.balancedness >= balancedness(rank_load(tokens, trivial))).all()
        assert plan.balancedness.mean() > 0.97


def test_layers_are_planned_as_if_alone():
    tokens = lognormal(5, 40, 1.0)
    together = make_policy("greedy").plan(PlanRequest(tokens, Topology(1, 10), 60))
    for layer in range(5):
        alone = make_policy("greedy").plan(PlanRequest(tokens[layer : layer + 1], Topology(1, 10), 60))
        assert (alone.placement.physical_to_logical[0] == together.placement.physical_to_logical[layer]).all()
