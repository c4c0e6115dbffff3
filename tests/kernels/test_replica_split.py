"""The split of a batch over replicas as one launch: the integers of the plain form, for every split."""

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.device_split import DeviceSplit
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology
from tests.kernels.conftest import RunCheck

# Nodes, ranks of each, slots of a rank, experts, most tokens of a rank, top-k.
SHAPES = [(1, 1, 5, 3, 9, 2), (1, 4, 3, 7, 20, 3), (2, 2, 4, 9, 40, 2), (3, 2, 2, 10, 150, 1), (1, 2, 20, 4, 9, 2)]


def random_batch(seed: int, shape: list[int]) -> tuple[Placement, Topology, list[Tensor]]:
    """Returns a placement of two layers, every expert somewhere, and the ids of each rank, some of them -1."""
    num_nodes, per_node, slots_per_rank, num_logical, most_tokens, topk = shape
    rng, topology = np.random.default_rng(seed), Topology(num_nodes, per_node)
    num_slots = topology.num_ranks * slots_per_rank
    row = np.concatenate([np.arange(num_logical), rng.integers(-1, num_logical, num_slots - num_logical)])
    placement = Placement(np.stack([rng.permutation(row) for _ in range(2)]), num_logical, topology.num_ranks)
    sizes = rng.integers(0, most_tokens + 1, topology.num_ranks)
    ids = [(rng.random((size, topk)) ** 3 * (num_logical + 1)).astype(np.int64) - 1 for size in sizes]
    return placement, topology, [torch.from_numpy(each) for each in ids]


def check_split(device: str, split: str, shape: list[int], seeds: int, bounds: list[int] | None = None) -> None:
    """bounds: sweeps and pushes of the exact split"""
    from moe_serve.kernels.exact_split import SplitTable, exact_split_reference
    from moe_serve.kernels.triton.replica_split import split_replicas_triton

    for seed in range(seeds):
        placement, topology, ids = random_batch(seed, shape)
        plain = DeviceSplit(placement, split, topology, "cpu")
        counts = torch.stack([count_slots(each, placement.num_logical) for each in ids])
        outcomes = torch.zeros(3, dtype=torch.int64, device=device) if split == "exact" else None
        row, tables = 1, {name: table[1].to(device) for name, table in plain._tables.items()}
        for rank in {0, len(ids) - 1}:
            asked = ids[rank]
            batch = asked.to(device), counts.to(device), rank, tables, topology.ranks_per_node, outcomes
            physical, slot_rows = split_replicas_triton(*batch, *(bounds or []))
            if bounds is None:
                expected, expected_rows = plain.split(row, asked, counts, rank)
                assert torch.equal(slot_rows.cpu(), expected_rows)
                assert torch.equal(physical.cpu(), expected)
            else:
                names = ("fixed_slot", "experts", "replica_slot")
                table = SplitTable(*(plain._tables[name][row] for name in names), placement.num_slots)
                slot_tokens, outcome = exact_split_reference(counts.sum(0), table, *bounds)
                plain.outcomes[outcome] += 1
                assert torch.equal(slot_rows.sum(0).cpu(), slot_tokens)
        if outcomes is not None:
            assert torch.equal(outcomes.cpu(), plain.outcomes)


@pytest.mark.parametrize(
    "shape, split",
    [
        # Many replicas of each expert take the interpreter long where they are shared out exactly.
        pytest.param(shape, split, marks=pytest.mark.slow if (shape, split) == (SHAPES[-1], "exact") else ())
        for shape in SHAPES
        for split in ("even", "nearest", "exact")
    ],
    ids=str,
)
def test_one_launch_gives_the_slots_and_rows_of_the_plain_form(
    on_device: RunCheck, split: str, shape: tuple[int, ...]
) -> None:
    on_device(check_split, split, shape, 1)


def test_the_exact_split_stops_at_its_bounds(on_device: RunCheck) -> None:
    on_device(check_split, "exact", (1, 4, 4, 10, 40, 2), 1, [1, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["even", "nearest", "exact"])
def test_production_sizes(split: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_split("cuda", split, [4, 8, 9, 256, 128, 8], 20)
    check_split("cuda", split, [4, 8, 16, 256, 4096, 8], 5)
    check_split("cuda", split, [18, 8, 2, 256, 128, 8], 5)
