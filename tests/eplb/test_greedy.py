import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.packing import (
    duplicate_slots,
    list_replicas,
    minimax_counts,
    pack_in_rounds,
    pack_longest_first,
    repair_duplicates,
    replica_load,
)
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal, zipf

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
