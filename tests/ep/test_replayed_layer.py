"""A forward of the layer on several ranks, recorded, and replayed: the replay splits as the server did."""

from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep.replica_map import LayerReplicas
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.replay.score import StepSplitter
from moe_serve.eplb.split.assign import assign_tokens
from moe_serve.eplb.split.make import layers_of
from moe_serve.topology import Topology
from tests.ep.test_moe_layer import BASE, LAYERS, Case, run_layers, shuffled, trivial
from tests.ranks import run_ranks

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # ids, counts of all ranks, physical ids, rows of every slot


def run_and_record(rank: int, group: EpGroup, case: Case) -> list[Batch]:
    """Returns what this rank's layers split, in their order."""
    batches: list[Batch] = []
    serving = LayerReplicas.split

    def split(self: LayerReplicas, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        physical_ids, slot_rows = serving(self, topk_ids, counts, rank)
        batches.append((topk_ids.clone(), counts.clone(), physical_ids.clone(), slot_rows.clone()))
        return physical_ids, slot_rows

    LayerReplicas.split = split  # type: ignore[method-assign]
    try:
        run_layers(rank, group, case)
    finally:
        LayerReplicas.split = serving  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("split", ["even", "nearest", "exact"])
@pytest.mark.parametrize("placement", [trivial(2, 5), shuffled(4, 12, seed=1)], ids=["two ranks", "four ranks"])
def test_a_recorded_forward_is_replayed_row_for_row(placement, split) -> None:  # type: ignore[no-untyped-def]
    num_ranks = placement.num_ranks
    nodes = Topology(2, num_ranks // 2)
    case = replace(BASE, placement=placement, split=split, nodes=nodes)
    by_rank = run_ranks(num_ranks, run_and_record, case)
    assert all(len(batches) == LAYERS for batches in by_rank)
    by_source = np.stack([counts.numpy() for _, counts, _, _ in by_rank[0]])
    record = LoadRecord(0, 1, "mixed", by_source.sum(axis=1), by_source=by_source)
    replayed = StepSplitter(split, placement, nodes).slot_rows(record)[0]
    for rank, batches in enumerate(by_rank):
        for row, ((ids, _, physical_ids, slot_rows), layer) in enumerate(
            zip(batches, layers_of(placement, nodes), strict=True)
        ):
            assert np.array_equal(slot_rows, replayed[row])
            assert np.array_equal(physical_ids, assign_tokens(layer, ids.numpy(), replayed[row, rank]))
