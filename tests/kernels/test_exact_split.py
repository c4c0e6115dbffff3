"""The per-batch split on the device: optimal where it says so, legal always, equal on every rank."""

import numpy as np
import pytest
import torch

from moe_serve.ep.device_split import split_table
from moe_serve.eplb.split.exact import split_exact
from moe_serve.eplb.split.layer import LayerSlots, ReplicaGraph
from moe_serve.kernels.exact_split import PROVEN, REPAIRED, UNPROVEN, exact_split_reference
from moe_serve.topology import Topology


def random_case(seed: int, num_ranks: int, slots_per_rank: int, num_logical: int) -> tuple[LayerSlots, torch.Tensor]:
    """Returns (a layer with every expert somewhere when they fit, counts [E] with many zeros)."""
    rng = np.random.default_rng(seed)
    num_slots = num_ranks * slots_per_rank
    row = np.concatenate([rng.permutation(num_logical), rng.integers(-1, num_logical, num_slots - num_logical)])
    counts = (rng.pareto(1.0, num_logical) * 20).astype(np.int64) * rng.integers(0, 2, num_logical)
    layer = LayerSlots.of(rng.permutation(row), Topology(1, num_ranks), num_logical)
    return layer, torch.from_numpy(counts)


@pytest.mark.parametrize("shape", [(1, 4, 3), (4, 3, 7), (8, 5, 24), (3, 2, 2)], ids=str)
def test_an_exact_outcome_is_the_optimum_of_the_oracle(shape: tuple[int, int, int]) -> None:
    num_ranks, slots_per_rank, num_logical = shape
    outcomes = []
    for seed in range(60):
        layer, counts = random_case(seed, *shape)
        slot_tokens, outcome = exact_split_reference(counts, split_table(layer))
        outcomes.append(outcome)
        assert (slot_tokens >= 0).all()
        served = np.bincount(layer.physical_to_logical, slot_tokens, num_logical + 1)
        assert served.tolist() == [*counts.tolist(), 0]
        best = split_exact(ReplicaGraph.of(layer), counts.tolist()).max_load
        heaviest = int(slot_tokens.view(num_ranks, slots_per_rank).sum(1).max())
        assert heaviest == best if outcome in (PROVEN, REPAIRED) else heaviest >= best
    assert UNPROVEN not in outcomes


def test_without_pushes_an_unproven_batch_says_so() -> None:
    outcomes = set()
    for seed in range(200):
        layer, counts = random_case(seed, 8, 5, 24)
        table = split_table(layer)
        slot_tokens, outcome = exact_split_reference(counts, table, sweeps=1, max_pushes=0)
        best = split_exact(ReplicaGraph.of(layer), counts.tolist()).max_load
        outcomes.add(outcome)
        if int(slot_tokens.view(8, 5).sum(1).max()) > best:
            assert outcome == UNPROVEN
    assert outcomes == {PROVEN, UNPROVEN}
