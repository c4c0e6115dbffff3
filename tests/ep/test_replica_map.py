"""The choice of replica: the same split on every rank, even to one row, following the placement in use."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.ep.replica_map import ReplicaMap, even_split_reference
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError


def split_all_ranks(
    placement: Placement, row: int, ids: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns physical ids and slot counts as each rank computes them."""
    replicas = ReplicaMap(placement).layer(row)
    counts = torch.stack([torch.bincount(i.flatten() + 1, minlength=placement.num_logical + 1)[1:] for i in ids])
    outs = [replicas.split_evenly(i, counts, rank) for rank, i in enumerate(ids)]
    return [physical for physical, _ in outs], [slot_counts for _, slot_counts in outs]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_split_deals_rows_out_as_the_reference_does(data: st.DataObject) -> None:
    num_ranks, num_logical = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    num_slots = num_ranks * data.draw(st.integers(-(-num_logical // num_ranks), -(-num_logical // num_ranks) + 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    table = np.concatenate([np.arange(num_logical), draw.integers(-1, num_logical, num_slots - num_logical)])
    placement = Placement(np.stack([draw.permutation(table) for _ in range(2)]), num_logical, num_ranks)
    topk = data.draw(st.integers(1, 5))
    ids = [torch.from_numpy(draw.integers(-1, num_logical, (draw.integers(0, 9), topk))) for _ in range(num_ranks)]
    for row in range(2):
        slots_of = [[int(s) for s in slots if s >= 0] for slots in placement.logical_to_physical[row]]
        expected, expected_counts = even_split_reference([i.numpy() for i in ids], slots_of, row, num_slots)
        physical, counts = split_all_ranks(placement, row, ids)
        for rank in range(num_ranks):
            assert physical[rank].tolist() == expected[rank].tolist()
            assert counts[rank].tolist() == expected_counts.tolist(), "every rank computes the counts of all"
        for slots in slots_of:
            received = expected_counts.sum(axis=0)[slots]
            assert received.max() - received.min() <= 1, "even to one row"


def test_every_replica_of_a_hot_expert_receives_rows() -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), 4, 3)
    ids = [torch.zeros(5, 1, dtype=torch.int64) for _ in range(3)]
    _, counts = split_all_ranks(placement, 0, ids)
    assert counts[0].sum(0).tolist() == [5, 0, 5, 0, 5, 0]


def test_odd_rows_do_not_pile_up_on_the_lowest_slots() -> None:
    num_logical = 12
    table = np.concatenate([np.arange(num_logical), np.arange(num_logical)])[None]
    ids = [torch.arange(num_logical)[:, None]]  # one row of each expert, two replicas of each
    _, counts = split_all_ranks(Placement(table, num_logical, 1), 0, ids)
    lower = int(counts[0][0, :num_logical].sum())
    assert lower == num_logical // 2


def test_without_redundant_slots_no_counts_are_needed() -> None:
    replicas = ReplicaMap(Placement(np.array([[2, 0, 3, 1]]), 4, 2)).layer(0)
    assert not replicas.needs_counts
    assert replicas.only_slots(torch.tensor([[0, 1], [-1, 3]])).tolist() == [[1, 3], [-1, 2]]


def test_activation_changes_the_choice_in_place() -> None:
    old, new = Placement(np.array([[0, 1, 2, 0]]), 3, 2), Placement(np.array([[2, 1, 0, 1]]), 3, 2, version=7)
    replica_map = ReplicaMap(old)
    replicas = replica_map.layer(0)
    addresses = [tensor.data_ptr() for tensor in replica_map._tables.values()]
    replica_map.activate(new)
    ids = torch.tensor([[2, 0]])
    physical, counts = replicas.split_evenly(ids, torch.tensor([[1, 0, 1]]), 0)
    assert physical.tolist() == [[0, 2]]
    assert counts.tolist() == [[1, 0, 1, 0]]
    assert replica_map.version == 7
    assert [tensor.data_ptr() for tensor in replica_map._tables.values()] == addresses


def test_a_placement_that_cannot_serve_here_is_refused() -> None:
    replica_map = ReplicaMap(Placement(np.array([[0, 1, 2, 0]]), 3, 2))
    with pytest.raises(PlacementError, match="same shape"):
        replica_map.activate(Placement(np.array([[0, 1, 2, 0, 1, 2]]), 3, 2))
    lost = Placement(np.array([[0, 1, -1, 0]]), 3, 2, allow_lost=True)
    with pytest.raises(PlacementError, match="expert 2 of row 0"):
        replica_map.activate(lost)
