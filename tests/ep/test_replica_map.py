"""The choice of replica: the same split on every rank, even to one row, following the placement in use."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.exact_shares import DeviceShares
from moe_serve.ep.replica_map import ReplicaMap, even_split_reference
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.batch import split_batch
from moe_serve.errors import PlacementError
from moe_serve.kernels.exact_split import UNPROVEN


def split_all_ranks(
    placement: Placement, row: int, ids: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns physical ids and slot counts as each rank computes them."""
    replicas = ReplicaMap(placement).layer(row)
    counts = torch.stack([torch.bincount(i.flatten() + 1, minlength=placement.num_logical + 1)[1:] for i in ids])
    outs = [replicas.split_evenly(i, counts, rank) for rank, i in enumerate(ids)]
    for rank, (physical, slot_counts) in enumerate(outs):  # the form in C where there is a compiler
        same, same_counts = replicas.split(ids[rank], counts, rank)
        assert torch.equal(same, physical)
        assert torch.equal(same_counts, slot_counts)
        assert torch.equal(replicas.count(ids[rank]), counts[rank])
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


def test_the_form_in_c_is_used_where_there_is_a_compiler_and_follows_a_new_placement() -> None:
    old, new = (Placement(np.array([table]), 3, 2) for table in ([0, 1, 2, 0], [1, 2, 0, 2]))
    replica_map = ReplicaMap(old)
    replicas = replica_map.layer(0)
    assert (replicas._deal is not None) == (shutil.which("cc") is not None)
    assert ReplicaMap(old, compiled=False).layer(0)._deal is None
    replica_map.activate(new)
    ids = torch.tensor([[0, 1], [2, -1], [2, 1]])
    counts = torch.stack([replicas.count(ids), replicas.count(ids)])
    for rank in range(2):
        dealt, expected = replicas.split(ids, counts, rank), replicas.split_evenly(ids, counts, rank)
        assert all(torch.equal(a, b) for a, b in zip(dealt, expected, strict=True))
        assert {int(new.physical_to_logical[0, slot]) for slot in dealt[0][dealt[0] >= 0]} == {0, 1, 2}


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


def exact_of_all_ranks(
    placement: Placement, row: int, ids: list[torch.Tensor], replica_map: ReplicaMap | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns physical ids of every rank, and the [R, P] counts that all of them computed."""
    replicas = (replica_map or ReplicaMap(placement, split="exact")).layer(row)
    counts = torch.stack([count_slots(i, placement.num_logical) for i in ids])
    outs = [replicas.split(i, counts, rank) for rank, i in enumerate(ids)]
    assert all(torch.equal(slot_counts, outs[0][1]) for _, slot_counts in outs)
    if replica_map is None and replicas.needs_counts:
        assert replicas._exact is not None
        assert replicas._exact.outcomes.tolist() == [len(ids), 0, 0], "each batch is counted, and all are proven here"
    for rank, (physical, slot_counts) in enumerate(outs):
        in_torch = replicas._follow(ids[rank], counts[rank], slot_counts[rank])
        assert torch.equal(physical, in_torch), "the form in C has the same integers"
    return [physical for physical, _ in outs], outs[0][1]


def draw_step(data: st.DataObject) -> tuple[Placement, list[torch.Tensor]]:
    num_ranks, num_logical = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    at_least = -(-num_logical // num_ranks)
    num_slots = num_ranks * data.draw(st.integers(at_least, at_least + 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    table = np.concatenate([np.arange(num_logical), draw.integers(-1, num_logical, num_slots - num_logical)])
    placement = Placement(np.stack([draw.permutation(table) for _ in range(2)]), num_logical, num_ranks)
    topk = data.draw(st.integers(1, 5))
    # A skewed choice: without it every split is nearly even, and hardly anything is repaired.
    ids = [(draw.random((draw.integers(0, 20), topk)) ** 3 * (num_logical + 1)).astype(np.int64) - 1 for _ in range(4)]
    return placement, [torch.from_numpy(i) for i in ids[:num_ranks]]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_exact_fills_slots_as_split_batch_says_by_prefix_sums(data: st.DataObject) -> None:
    placement, ids = draw_step(data)
    for row in range(2):
        if placement.num_slots == placement.num_logical:
            return
        physical, slot_counts = exact_of_all_ranks(placement, row, ids)
        counts = np.stack([count_slots(i, placement.num_logical).numpy() for i in ids])
        table = placement.physical_to_logical[row]
        assert np.array_equal(slot_counts.numpy(), split_batch(counts, table, placement.num_ranks))
        for rank, (asked, got) in enumerate(zip(ids, physical, strict=True)):
            for expert in range(placement.num_logical):
                slots = np.flatnonzero(table == expert)
                in_order = np.repeat(slots, slot_counts[rank].numpy()[slots])
                assert got[asked == expert].tolist() == in_order.tolist(), "an expert's tokens fill its slots in order"
            assert torch.equal(got < 0, asked < 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_device_way_of_exact_has_the_same_largest_load_where_it_proves_it(data: st.DataObject) -> None:
    placement, ids = draw_step(data)
    if placement.num_slots == placement.num_logical:
        return
    on_device = DeviceShares(placement, "cpu")
    for row in range(2):
        counts = torch.stack([count_slots(i, placement.num_logical) for i in ids])
        before = int(on_device.outcomes[UNPROVEN])
        got = on_device.slot_counts(row, counts)
        table = torch.from_numpy(placement.physical_to_logical[row].astype(np.int64))
        for expert in range(placement.num_logical):
            assert torch.equal(got[:, table == expert].sum(1), counts[:, expert]), "every rank's tokens are placed"
        assert got[:, table < 0].sum() == 0
        best = torch.from_numpy(split_batch(counts.numpy(), table.numpy(), placement.num_ranks))
        loads = [of.sum(0).view(placement.num_ranks, -1).sum(1).max() for of in (got, best)]
        assert loads[0] == loads[1] or on_device.outcomes[UNPROVEN] > before


def test_exact_levels_a_load_that_even_cannot() -> None:
    placement = Placement(np.array([[0, 1, 2, 0]]), 3, 2)  # rank 0: experts 0, 1; rank 1: experts 2, 0
    ids = [torch.tensor([[0], [0], [1], [1], [1], [1]]), torch.tensor([[0], [0]])]
    _, even = split_all_ranks(placement, 0, ids)
    _, exact = exact_of_all_ranks(placement, 0, ids)
    assert even[0].sum(0).tolist() == [2, 4, 0, 2]
    assert exact.sum(0).tolist() == [0, 4, 0, 4]


@pytest.mark.parametrize("device_way", [False, True])
def test_exact_follows_activation(device_way: bool) -> None:
    old, new = Placement(np.array([[0, 1, 2, 0]]), 3, 2), Placement(np.array([[2, 1, 0, 1]]), 3, 2, version=7)
    replica_map = ReplicaMap(old, split="exact")
    if device_way:
        replica_map._exact = DeviceShares(old, "cpu")
    replicas = replica_map.layer(0)
    ids = torch.tensor([[1], [1], [1], [0]])
    counts = torch.stack([count_slots(ids, 3), torch.zeros(3, dtype=torch.int64)])
    assert replicas.split(ids, counts, 0)[1].sum(0).tolist() == [0, 3, 0, 1]
    replica_map.activate(new)
    physical, slot_counts = replicas.split(ids, counts, 0)
    assert slot_counts.sum(0).tolist() == [0, 2, 1, 1]
    assert physical.tolist() == [[1], [1], [3], [2]]


def test_exact_without_tokens_or_redundant_slots_works() -> None:
    nobody = [torch.zeros(0, 2, dtype=torch.int64)] * 2
    physical, counts = exact_of_all_ranks(Placement(np.array([[0, 1, 2, 0]]), 3, 2), 0, nobody)
    assert physical[0].shape == (0, 2)
    assert counts.sum() == 0
    replicas = ReplicaMap(Placement(np.array([[2, 0, 3, 1]]), 4, 2), split="exact").layer(0)
    assert not replicas.needs_counts
