"""The choice of replica: the same split on every rank, the split of a replay, following the placement in use."""

import shutil
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.device_split import DeviceSplit
from moe_serve.ep.replica_map import HostSplit, ReplicaMap
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.replay import StepSplitter
from moe_serve.eplb.split.layer import LayerSlots
from moe_serve.eplb.split.make import assign_tokens, layers_of
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import PlacementError
from moe_serve.kernels.exact_split import UNPROVEN
from moe_serve.topology import Topology
from tests.eplb.split_cases import split_batch

SPLITS: tuple[Literal["even", "nearest", "exact"], ...] = ("even", "nearest", "exact")
HOST_SPLITS: tuple[Literal["even", "nearest", "exact", "time"], ...] = (*SPLITS, "time")
TIME = ExpertTime(3)


def draw_step(data: st.DataObject) -> tuple[Placement, Topology, list[torch.Tensor]]:
    """Returns a placement of two layers, its nodes, and the ids of every rank."""
    num_ranks, num_logical = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    at_least = -(-num_logical // num_ranks)
    num_slots = num_ranks * data.draw(st.integers(at_least, at_least + 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    table = np.concatenate([np.arange(num_logical), draw.integers(-1, num_logical, num_slots - num_logical)])
    placement = Placement(np.stack([draw.permutation(table) for _ in range(2)]), num_logical, num_ranks)
    topk, num_nodes = data.draw(st.integers(1, 5)), 2 if num_ranks % 2 == 0 else 1
    # A skewed choice: without it every split is nearly even, and hardly anything is repaired.
    ids = [(draw.random((draw.integers(0, 20), topk)) ** 3 * (num_logical + 1)).astype(np.int64) - 1 for _ in range(4)]
    return placement, Topology(num_nodes, num_ranks // num_nodes), [torch.from_numpy(i) for i in ids[:num_ranks]]


def counts_of(ids: list[torch.Tensor], num_logical: int) -> torch.Tensor:
    return torch.stack([count_slots(i, num_logical) for i in ids])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_replay_of_a_recorded_batch_gets_the_servers_split_row_for_row(data: st.DataObject) -> None:
    placement, topology, ids = draw_step(data)
    if placement.num_slots == placement.num_logical:
        return
    counts = counts_of(ids, placement.num_logical)
    by_source = np.stack([counts.numpy()] * 2)
    record = LoadRecord(7, 1, "decode", by_source.sum(axis=1), by_source=by_source)
    for split in HOST_SPLITS:
        replayed = StepSplitter(split, placement, topology, time=TIME).slot_rows(record)[0]
        for compiled in (True, False):
            replica_map = ReplicaMap(placement, split=split, topology=topology, compiled=compiled, time=TIME)
            for row, layer in enumerate(layers_of(placement, topology)):
                for rank, asked in enumerate(ids):
                    physical, slot_rows = replica_map.layer(row).split(asked, counts, rank)
                    assert np.array_equal(slot_rows, replayed[row])
                    assert np.array_equal(physical, assign_tokens(layer, asked.numpy(), replayed[row, rank]))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_an_experts_tokens_fill_its_slots_in_order(data: st.DataObject) -> None:
    placement, topology, ids = draw_step(data)
    if placement.num_slots == placement.num_logical:
        return
    counts = counts_of(ids, placement.num_logical)
    for split in HOST_SPLITS:
        replicas = ReplicaMap(placement, split=split, topology=topology, time=TIME).layer(1)
        for rank, asked in enumerate(ids):
            assert torch.equal(replicas.count(asked), counts[rank])
            physical, rows = replicas.split(asked, counts, rank)
            for expert in range(placement.num_logical):
                slots = np.flatnonzero(placement.physical_to_logical[1] == expert)
                assert physical[asked == expert].tolist() == np.repeat(slots, rows[rank].numpy()[slots]).tolist()
            assert torch.equal(physical < 0, asked < 0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_devices_split_and_assign_with_the_same_integers(data: st.DataObject) -> None:
    placement, topology, ids = draw_step(data)
    counts = counts_of(ids, placement.num_logical)
    for split in SPLITS:
        on_device = DeviceSplit(placement, split, topology, "cpu")
        on_host = HostSplit(placement, split, topology, compiled=True)
        for row, layer in enumerate(layers_of(placement, topology)):
            for rank, asked in enumerate(ids):
                physical, slot_rows = on_device.split(row, asked, counts, rank)
                own = assign_tokens(layer, asked.numpy(), slot_rows[rank].numpy())
                assert np.array_equal(physical, own)
                assert torch.equal(on_device.count(row, asked), counts[rank])
                if split != "exact":
                    assert torch.equal(slot_rows, on_host.split(row, asked, counts, rank)[1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exact_on_devices_has_the_same_largest_load_where_it_proves_it(data: st.DataObject) -> None:
    placement, topology, ids = draw_step(data)
    if placement.num_slots == placement.num_logical:
        return
    on_device = DeviceSplit(placement, "exact", topology, "cpu")
    counts = counts_of(ids, placement.num_logical)
    for row in range(2):
        before = int(on_device.outcomes[UNPROVEN])
        _, got = on_device.split(row, ids[0], counts, 0)
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
    counts = counts_of(ids, 3)
    received = {
        split: ReplicaMap(placement, split=split).layer(0).split(ids[0], counts, 0)[1].sum(0).tolist()
        for split in SPLITS
    }
    assert received == {"even": [2, 4, 0, 2], "nearest": [2, 4, 0, 2], "exact": [0, 4, 0, 4]}


def test_every_replica_of_a_hot_expert_receives_rows() -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), 4, 3)
    ids = [torch.zeros(5, 1, dtype=torch.int64) for _ in range(3)]
    _, rows = ReplicaMap(placement).layer(0).split(ids[0], counts_of(ids, 4), 0)
    assert rows.sum(0).tolist() == [5, 0, 5, 0, 5, 0]


def test_the_form_in_c_is_used_where_there_is_a_compiler() -> None:
    placement = Placement(np.array([[0, 1, 2, 0]]), 3, 2)
    for compiled in (True, False):
        host = HostSplit(placement, "even", Topology(1, 2), compiled)
        assert (host._own[0].native is not None) == (compiled and shutil.which("cc") is not None)


def test_without_redundant_slots_no_counts_are_needed() -> None:
    for split in SPLITS:
        replicas = ReplicaMap(Placement(np.array([[2, 0, 3, 1]]), 4, 2), split=split).layer(0)
        assert not replicas.needs_counts
        assert replicas.first_slot[torch.tensor([[0, 1], [-1, 3]])].tolist() == [[1, 3], [-1, 2]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", ["compiled", "plain", "device"])
def test_activation_changes_the_choice(split: str, how: str) -> None:
    old, new = Placement(np.array([[0, 1, 2, 0]]), 3, 2), Placement(np.array([[2, 1, 0, 1]]), 3, 2, version=7)
    replica_map = ReplicaMap(old, split=split, compiled=how == "compiled")  # type: ignore[arg-type]
    if how == "device":
        replica_map._split = DeviceSplit(old, split, Topology(1, 2), "cpu")
    replicas = replica_map.layer(0)
    ids = torch.tensor([[1], [1], [1], [0]])
    counts = counts_of([ids, torch.zeros(0, 1, dtype=torch.int64)], 3)
    assert replicas.split(ids, counts, 0)[1].sum(0).tolist() == ([0, 3, 0, 1] if split == "exact" else [1, 3, 0, 0])
    replica_map.activate(new)
    physical, rows = replicas.split(ids, counts, 0)
    expected = {"even": [0, 1, 1, 2], "nearest": [0, 3, 1, 0], "exact": [0, 2, 1, 1]}[split]
    assert rows.sum(0).tolist() == expected
    assert physical.flatten().tolist() == [1] * expected[1] + [3] * expected[3] + [2]
    assert replica_map.version == 7
    proven = replica_map.split_outcomes
    assert (None if proven is None else int(proven.sum())) == (2 if split == "exact" else None), "counted since start"


def draw_successor(data: st.DataObject, placement: Placement, version: int) -> Placement:
    """Returns a placement with the slots of some layers permuted, of the others as they are."""
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = data.draw(st.sets(st.integers(0, 1)))
    table = np.array(
        [draw.permutation(slots) if row in rows else slots for row, slots in enumerate(placement.physical_to_logical)]
    )
    return Placement(table, placement.num_logical, placement.num_ranks, version=version)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_activations_and_switches_in_any_order_split_as_a_new_map_does(data: st.DataObject) -> None:
    placement, topology, ids = draw_step(data)
    if placement.num_slots == placement.num_logical:
        return
    counts = counts_of(ids, placement.num_logical)
    split: Literal["even", "nearest", "exact"] = data.draw(st.sampled_from(SPLITS))
    how = data.draw(st.sampled_from(["compiled", "plain", "device"]))

    def new_map(placement: Placement, split: Literal["even", "nearest", "exact"]) -> ReplicaMap:
        replica_map = ReplicaMap(placement, split=split, topology=topology, compiled=how == "compiled")
        if how == "device":
            replica_map._split = DeviceSplit(placement, split, topology, "cpu")
        return replica_map

    replica_map, num_exact = new_map(placement, split), 0
    for version in range(1, 6):
        if data.draw(st.booleans(), label="activate"):
            placement = draw_successor(data, placement, version)
            replica_map.activate(placement)
            assert replica_map.version == version
        evenly = data.draw(st.booleans(), label="split evenly")
        replica_map.split_evenly(evenly)
        fresh = new_map(placement, "even" if evenly and split == "exact" else split)
        for row in range(2):
            assert torch.equal(replica_map.layer(row).first_slot, fresh.layer(row).first_slot)
            got = replica_map.layer(row).split(ids[0], counts, 0)
            assert all(map(torch.equal, got, fresh.layer(row).split(ids[0], counts, 0)))
            num_exact += split == "exact" and not evenly
    outcomes = replica_map.split_outcomes
    assert (None if outcomes is None else int(outcomes.sum())) == (num_exact if split == "exact" else None)


def test_an_activation_builds_only_the_layers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.array([[0, 1, 2, 0], [1, 2, 0, 0], [2, 1, 0, 1]])
    replica_map = ReplicaMap(Placement(table, 3, 2), split="exact")
    built: list[int] = []

    def make(self: HostSplit, layer: LayerSlots) -> Any:
        built.append(layer.layer_row)
        return original(self, layer)

    original = HostSplit._make
    monkeypatch.setattr(HostSplit, "_make", make)
    table[1] = [2, 1, 0, 0]
    replica_map.activate(Placement(table, 3, 2, version=1))
    assert built == [1]
    replica_map.activate(Placement(table, 3, 2, version=2))
    assert built == [1]
    assert replica_map.version == 2


@pytest.mark.parametrize("split", SPLITS)
def test_tables_on_devices_keep_their_addresses(split: str) -> None:
    old, new = Placement(np.array([[0, 1, 2, 0]]), 3, 2), Placement(np.array([[2, 1, 0, 1]]), 3, 2)
    on_device = DeviceSplit(old, split, Topology(1, 2), "cpu")
    addresses = {name: table.data_ptr() for name, table in on_device._tables.items()}
    on_device.activate(layers_of(new, Topology(1, 2)))
    assert {name: table.data_ptr() for name, table in on_device._tables.items()} == addresses
    fresh = DeviceSplit(new, split, Topology(1, 2), "cpu")
    assert all(torch.equal(table, fresh._tables[name]) for name, table in on_device._tables.items())


def test_a_placement_that_cannot_serve_here_is_refused() -> None:
    replica_map = ReplicaMap(Placement(np.array([[0, 1, 2, 0]]), 3, 2))
    with pytest.raises(PlacementError, match="same shape"):
        replica_map.activate(Placement(np.array([[0, 1, 2, 0, 1, 2]]), 3, 2))
    lost = Placement(np.array([[0, 1, -1, 0]]), 3, 2, allow_lost=True)
    with pytest.raises(PlacementError, match="expert 2 of row 0"):
        replica_map.activate(lost)
    replicas, ids = replica_map.layer(0), torch.tensor([[2]])
    assert replicas.split(ids, counts_of([ids, ids], 3), 0)[0].tolist() == [[2]], "and changes nothing"


@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_without_tokens_works(split: str) -> None:
    replicas = ReplicaMap(Placement(np.array([[0, 1, 2, 0]]), 3, 2), split=split).layer(0)  # type: ignore[arg-type]
    physical, rows = replicas.split(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), 0)
    assert physical.shape == (0, 2)
    assert rows.tolist() == [[0] * 4] * 2
