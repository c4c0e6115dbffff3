"""A forward of the layer on several ranks, recorded, and replayed: the replay splits as the server did."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep.moe_layer import take_turns
from moe_serve.ep.replica_map import LayerReplicas
from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, read_events, read_jsonl
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.replay.replay import StepSplitter
from moe_serve.eplb.replay.settings import SPLIT_CHANGED, EvenSteps
from moe_serve.eplb.split.make import assign_tokens, layers_of
from moe_serve.topology import Topology
from tests.ep.test_moe_layer import BASE, LAYERS, SPEC, Case, build, run_layers, shuffled, tokens, trivial
from tests.ranks import run_ranks

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # ids, counts of all ranks, physical ids, rows of every slot


@contextmanager
def recording() -> Iterator[list[Batch]]:
    """Lists what the layers of this process split, in their order."""
    batches: list[Batch] = []
    serving = LayerReplicas.split

    def split(self: LayerReplicas, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        physical_ids, slot_rows = serving(self, topk_ids, counts, rank)
        batches.append((topk_ids.clone(), counts.clone(), physical_ids.clone(), slot_rows.clone()))
        return physical_ids, slot_rows

    LayerReplicas.split = split  # type: ignore[method-assign]
    try:
        yield batches
    finally:
        LayerReplicas.split = serving  # type: ignore[method-assign]


def run_and_record(rank: int, group: EpGroup, case: Case) -> list[Batch]:
    """Returns what this rank's layers split, in their order."""
    with recording() as batches:
        run_layers(rank, group, case)
    return batches


def run_steps_and_record(rank: int, group: EpGroup, case: Case, evenly: Sequence[bool]) -> list[list[Batch]]:
    """Returns what this rank's layers split in each step; evenly: what the plan of each step says."""
    layers, _ = build(group, case)
    steps = []
    for step, flag in enumerate(evenly):
        layers[0]._parallel.replica_map.split_evenly(flag)
        x = tokens(case.num_tokens - 5 * step)[case.share(rank)]
        with recording() as batches:
            for layer in layers:
                [x] = take_turns([layer(x, len(x), 1)])
        steps.append(batches)
    return steps


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


def test_steps_that_the_server_split_evenly_by_choice_are_replayed_row_for_row(tmp_path: Path) -> None:
    placement, nodes = shuffled(4, 12, seed=1), Topology(2, 2)
    case = replace(BASE, placement=placement, split="exact", nodes=nodes)
    phases = ["decode", "prefill", "decode", "decode", "prefill", "mixed"]
    even_phases = {0: [], 1: ["decode"], 4: ["prefill", "mixed"]}  # from the step on
    evenly = [False, False, True, True, True, True]
    by_rank = run_ranks(4, run_steps_and_record, case, evenly)

    writer = JsonlWriter(tmp_path / "trace.jsonl", TraceMeta(SPEC.num_logical, tuple(range(LAYERS)), SPEC.topk, ""))
    for step, phase in enumerate(phases):
        if step in even_phases:
            writer.event(SPLIT_CHANGED, step, phases=even_phases[step])
        by_source = np.stack([counts.numpy() for _, counts, _, _ in by_rank[0][step]])
        writer.add(LoadRecord(step, 1, phase, by_source.sum(axis=1), by_source=by_source, placement=placement))
    writer.close()

    even_steps = EvenSteps.of(read_events(tmp_path / "trace.jsonl"))
    splitter = StepSplitter("exact", placement, nodes, even_steps)
    of_exact = StepSplitter("exact", placement, nodes)
    differs = []
    for step, record in enumerate(read_jsonl(tmp_path / "trace.jsonl")):
        replayed = splitter.slot_rows(record)[0]
        for steps in by_rank:
            for row, (_, _, _, slot_rows) in enumerate(steps[step]):
                assert np.array_equal(slot_rows, replayed[row])
        differs.append(not np.array_equal(replayed, of_exact.slot_rows(record)[0]))
    assert differs == evenly, "both splits were seen"
