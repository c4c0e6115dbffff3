"""SGLang's per_pass and per_token dumps, as load traces: one record per forward pass, summed over its ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import whole_counts
from moe_serve.eplb.files.sglang_recordings import Recording, recordings_of, refuse_missing_ranks
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_PHASE_OF_FORWARD_MODE = {1: "prefill", 2: "decode", 3: "mixed"}  # sglang ForwardMode; 4 = idle says nothing


def passes_trace(contents: list[tuple[Path, Any]], progress: ByteProgress | None) -> LoadTrace:
    """Returns the trace of the dumps of all ranks; of several recordings, one behind the other."""
    recordings = recordings_of(contents)
    path = recordings[0].path
    passes = [_Passes.of(recording) for recording in recordings]
    shapes = {(len(each.table), int(each.table.max()) + 1) for each in passes}
    if len(shapes) > 1:
        raise TraceError(f"{path.parent}: recordings of {sorted(shapes)} (layers, experts); of different models")
    used = np.zeros(len(passes[0].table), dtype=bool)
    topk = 0
    for each in passes:
        used |= each.used
        topk = max(topk, each.topk)
    layers = np.flatnonzero(used)
    total = sum(len(each.pass_ids) for each in passes)
    if not len(layers):
        raise TraceError(f"{path}: no tokens in {total} passes; record while requests run")
    ranks = max(len(each.by_rank) for each in passes)
    left_out = sum(each.num_left_out for each in passes)
    dropped = f", {left_out} passes not in all files left out" if left_out else ""
    apart = f" in {len(passes)} recordings, kept apart by when they were written" if len(passes) > 1 else ""
    return LoadTrace(
        _Reader(passes, layers, total, progress),
        shapes.pop()[1],
        tuple(layers.tolist()),
        topk or None,
        source=f"{path.parent if len(contents) > 1 else path} (SGLang passes of {ranks} ranks{apart}{dropped})",
        num_records=total,
    )


@dataclass(frozen=True, eq=False)
class _Reader:
    passes: list["_Passes"]
    layers: np.ndarray
    total: int
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        done = 0
        for each in self.passes:
            for pass_id in each.pass_ids:
                yield each.record(pass_id, done, self.layers)
                done += 1
                if self.progress is not None:
                    self.progress(done, self.total)


@dataclass(frozen=True, eq=False)
class _Passes:
    """The forward passes of one recording that are in the dumps of all its ranks.

    table: [model layers, P]; used: [model layers] bool, layers with tokens
    """

    path: Path
    by_rank: dict[int, dict[int, list[dict[str, Any]]]]
    table: np.ndarray
    pass_ids: list[int]
    num_left_out: int
    used: np.ndarray
    topk: int

    @classmethod
    def of(cls, recording: Recording) -> "_Passes":
        """Reads all counts once: which layers have tokens, and whether a rank is missing."""
        by_rank, table, path = recording.passes, recording.table, recording.path
        shared = sorted(set.intersection(*(set(passes) for passes in by_rank.values())))
        every = set.union(*(set(passes) for passes in by_rank.values()))
        if not shared:
            raise TraceError(f"no forward pass is in all {len(by_rank)} files; dumps of different recordings are mixed")
        used = np.zeros(len(table), dtype=bool)
        slots = np.zeros((len(by_rank), table.shape[1]), dtype=np.int64)
        topk = stated = 0
        alike = len(by_rank) > 1
        for pass_id in shared:  # the ranks of one pass at a time: the tensors stay in the mapped files
            first: np.ndarray | None = None
            for rank, passes in by_rank.items():
                counted = np.zeros(table.shape, dtype=np.int64)
                for record in passes[pass_id]:
                    counted += _physical(record, table, f"{path.parent}, rank {rank}, forward pass {pass_id}")
                    topk = max(topk, _topk(record))
                    stated = max(stated, _stated_ranks(record))
                used |= counted.any(axis=1)
                slots[rank] += counted.sum(axis=0)
                first = counted if first is None else first
                alike = alike and bool((counted == first).all())
        refuse_missing_ranks(slots, stated, alike, path)
        return cls(path, by_rank, table, shared, len(every) - len(shared), used, topk)

    def record(self, pass_id: int, index: int, layers: np.ndarray) -> LoadRecord:
        """Returns the pass with the rows of these layers."""
        num_layers, num_slots = self.table.shape
        by_slot = np.zeros((len(self.by_rank), num_layers, num_slots), dtype=np.int64)
        for rank, passes in self.by_rank.items():
            for record in passes[pass_id]:
                by_slot[rank] += _physical(record, self.table, f"{self.path.parent}, rank {rank}, pass {pass_id}")
        counts = np.zeros((len(by_slot), num_layers, int(self.table.max()) + 1), dtype=np.int64)
        for rank, physical in enumerate(by_slot):
            np.add.at(counts[rank], (np.arange(num_layers)[:, None], self.table), physical)
        counts = counts[:, layers]
        total = counts.sum(axis=0)
        source: np.ndarray | None = counts.transpose(1, 0, 2)
        if len(counts) > 1 and (counts == counts[0]).all():
            total, source = counts[0], None  # tensor-parallel attention: every rank counted the same tokens
        elif _counted_on_arrival(by_slot):
            source = None  # low latency: ranks counted what reached them, not what they sent
        return LoadRecord(index, 1, self._phase(pass_id), total, by_source=source)

    def _phase(self, pass_id: int) -> str:
        modes = {
            _PHASE_OF_FORWARD_MODE.get(record.get("forward_mode", 3), "")
            for passes in self.by_rank.values()
            for record in passes[pass_id]
        } - {""}
        return modes.pop() if len(modes) == 1 else "mixed"


def _counted_on_arrival(by_slot: np.ndarray) -> bool:
    """Returns whether each rank counted at its own slots only. by_slot: [ranks, layers, P]"""
    per_rank = by_slot.shape[2] // len(by_slot)
    return all(
        counted[:, rank * per_rank : (rank + 1) * per_rank].sum() == counted.sum()
        for rank, counted in enumerate(by_slot)
    )


def _physical(record: dict[str, Any], table: np.ndarray, where: str) -> np.ndarray:
    """Returns [model layers, P] int64, what a record counts at each slot."""
    if "global_physical_count" in record:
        physical = whole_counts(record["global_physical_count"], f"{where}, key global_physical_count")
        if physical.shape != table.shape or physical.min(initial=0) < 0:
            raise TraceError(
                f"{where}, key global_physical_count: shape {list(physical.shape)} from {physical.min(initial=0)}, "
                f"expected counts {list(table.shape)} (as last_physical_to_logical_map)"
            )
        return physical
    if "topk_ids_of_layer" not in record:
        raise TraceError(f"{where}: expected global_physical_count or topk_ids_of_layer")
    ids = whole_counts(record["topk_ids_of_layer"], f"{where}, key topk_ids_of_layer")
    if ids.ndim != 3 or len(ids) != len(table) or ids.max(initial=-1) >= table.shape[1]:
        raise TraceError(
            f"{where}, key topk_ids_of_layer: shape {list(ids.shape)} up to {ids.max(initial=-1)}, expected "
            f"[{len(table)}, tokens, topk] of ids below {table.shape[1]}"
        )
    return np.stack([np.bincount(row[row >= 0], minlength=table.shape[1]) for row in ids])


def _topk(record: dict[str, Any]) -> int:
    ids = np.asarray(record.get("topk_ids_of_layer", ()))
    return int((ids >= 0).sum(axis=2).max()) if ids.ndim == 3 and ids.size else 0


def _stated_ranks(record: dict[str, Any]) -> int:
    """Returns the size of the expert parallel group; per_token dumps of DeepEP's normal mode have a count per rank."""
    misc = record.get("misc_objects")
    first = misc[0] if isinstance(misc, list) and misc else None
    per_rank = first.get("num_tokens_per_rank") if isinstance(first, dict) else None
    return len(per_rank) if isinstance(per_rank, list) else 0
