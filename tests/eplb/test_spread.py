"""Replicas of an expert on two nodes: the wish of a plan, the price it may have, and the placements that begin so."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.objectives import MOST_RISE
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.repair import with_second_slots
from moe_serve.topology import Topology

NUM_EXPERTS = 16


def num_on_one_node(placement: Placement, num_nodes: int) -> int:
    """Returns how many experts, over all layers, have replicas on one node only though they have several."""
    by_node = placement.physical_to_logical.reshape(placement.num_layers, num_nodes, -1)
    nodes = np.stack([(by_node == expert).any(axis=2).sum(axis=1) for expert in range(placement.num_logical)], axis=1)
    return int(((nodes == 1) & (placement.replica_count > 1)).sum())


def heaviest(tokens: np.ndarray, placement: Placement) -> np.ndarray:
    return rank_load(tokens, placement).max(axis=1)


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 0.8, (3, NUM_EXPERTS)) * 1000


@pytest.mark.parametrize("policy", ["greedy", "refined", "incremental", "series"])
@given(seed=st.integers(0, 2**16), shape=st.sampled_from([(2, 2, 32), (2, 2, 24), (3, 2, 48), (4, 1, 32), (2, 4, 48)]))
@settings(max_examples=12, deadline=None)
def test_replicas_go_to_two_nodes_at_the_price_that_is_stated(policy: str, seed: int, shape: tuple) -> None:
    num_nodes, ranks_per_node, num_slots = shape
    topology = Topology(num_nodes, ranks_per_node)
    current = Placement.trivial(3, NUM_EXPERTS, topology.num_ranks, num_slots - NUM_EXPERTS)
    tokens = drawn(seed)
    more = {"series": np.stack([tokens, drawn(seed + 1)])} if policy == "series" else {}
    plans = [
        make_policy(policy).plan(PlanRequest(tokens, topology, num_slots, current, two_nodes=wanted, seed=seed, **more))
        for wanted in (False, True)
    ]
    plain, spread = (each.placement for each in plans)
    assert num_on_one_node(spread, num_nodes) <= num_on_one_node(plain, num_nodes)
    assert (spread.replica_count == plain.replica_count).all()
    assert spread.num_duplicates.sum() == 0
    assert (heaviest(tokens, spread) <= heaviest(tokens, plain) * (1 + MOST_RISE) + 1e-9).all()


def test_most_experts_of_a_plan_anew_are_on_two_nodes() -> None:
    topology, left = Topology(2, 4), 0
    for seed in range(10):
        rules = {"topology": topology, "num_slots": 48, "min_replicas": 2, "two_nodes": True}
        left += num_on_one_node(make_policy("greedy").plan(PlanRequest(drawn(seed), **rules)).placement, 2)
    assert left <= 0.02 * 10 * 3 * NUM_EXPERTS


@given(seed=st.integers(0, 2**16), most=st.integers(0, 6), rank_most=st.integers(1, 3), total=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_limits_of_moves_hold_for_swaps_between_nodes(seed: int, most: int, rank_most: int, total: int) -> None:
    draw = np.random.default_rng(seed)
    row = np.argsort(draw.random((3, 2, NUM_EXPERTS)), axis=2).reshape(3, 2, 2, 8)  # both replicas of e anywhere
    current = Placement(row.transpose(0, 2, 1, 3).reshape(3, -1), NUM_EXPERTS, 4)
    limits = {"max_moves": most, "max_rank_moves": rank_most, "max_total_moves": total}
    request = PlanRequest(drawn(seed), Topology(2, 2), 32, current, two_nodes=True, **limits)
    assert make_policy("incremental").plan(request).unkept == ()


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 2)])
def test_the_trivial_placement_has_its_replicas_on_other_nodes(num_nodes: int, ranks_per_node: int) -> None:
    num_ranks = num_nodes * ranks_per_node
    for redundant in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        placement = Placement.trivial(1, 4 * num_ranks, num_ranks, redundant)
        assert num_on_one_node(placement, num_nodes) == 0


def test_a_second_slot_is_on_another_node_where_one_is_spare_there() -> None:
    """Rank 1 of node 0 has more spare slots than node 1, which gets the expert all the same."""
    rows = [[0, 1, 4, -1], [4, -1, -1, -1], [2, 3, -1, -1], [2, 3, -1, -1]]
    placement = Placement(np.array(rows).reshape(1, -1), 5, 4)
    assert set(with_second_slots(placement).by_rank[0, 1].tolist()) == {0, 1, 4, -1}
    spread = with_second_slots(placement, num_nodes=2)
    assert set(spread.by_rank[0, 1].tolist()) == {4, -1}
    assert {0, 1} <= set(spread.by_rank[0, 2:].ravel().tolist())
