"""What SGLang's expert distribution recorder dumps (`/dump_expert_distribution_record`), as load traces.

stat, stat_approx: one .pt {"rank", "logical_count": [steps, model layers, E], …}, already summed over ranks.
per_pass:  one .pt per rank {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count":
           [model layers, P]}], "last_physical_to_logical_map": [model layers, P]}.
per_token: the same with "topk_ids_of_layer" [model layers, tokens, 8] (physical ids, -1 = none) in every record.
SGLang counts dense layers too, as zeros: rows that are zero throughout are left out, the others keep their layer id.
If the placement changed while it recorded, per_pass and per_token dumps name the last map only and mislead: record
between rebalances.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, load_torch_file
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_PHASE_OF_FORWARD_MODE = {1: "prefill", 2: "decode", 3: "mixed"}  # sglang ForwardMode; 4 = idle says nothing


def read_sglang(
    paths: list[Path], progress: ByteProgress | None = None, max_torch_bytes: int = MAX_TORCH_BYTES
) -> LoadTrace:
    """Returns the trace in one stat dump, or in the per_pass or per_token dumps of all ranks."""
    contents = [(path, load_torch_file(path, TraceError, max_torch_bytes)) for path in paths]
    kinds = {path: _kind(content, path) for path, content in contents}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{path.name}: {kind}" for path, kind in kinds.items())
        raise TraceError(f"dumps of different recorder modes are mixed ({listed}); give those of one recording")
    if kinds[paths[0]] == "stat":
        if len(contents) > 1:
            raise TraceError(
                f"{paths[0].parent} holds {len(contents)} stat dumps, and each is a recording of its own; give one file"
            )
        return stat_trace(contents[0][1]["logical_count"], paths[0], progress)
    return _passes_trace(contents, progress)


def stat_trace(logical_count: Any, path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace of `logical_count` [steps, model layers, E] (or [model layers, E]: one step)."""
    try:
        counts = np.asarray(logical_count)  # a view of the mapped file where it is a tensor
    except ValueError:
        raise TraceError(f"{path}, key logical_count: lists of different lengths; the file is mixed up") from None
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"{path}, key logical_count: shape {list(counts.shape)} of {counts.dtype}, expected counts "
            f"[steps, layers, experts]"
        )
    used = np.zeros(counts.shape[1], dtype=bool)
    for step in counts:
        used |= step.any(axis=1)
    layers = np.flatnonzero(used)
    if not len(layers):
        raise TraceError(f"{path}, key logical_count: no tokens in {len(counts)} steps; record while requests run")
    opener = _Steps(counts, layers, path, progress)
    return LoadTrace(
        opener, counts.shape[2], tuple(layers.tolist()), source=f"{path} (SGLang stat)", num_records=len(counts)
    )


@dataclass(frozen=True, eq=False)
class _Steps:
    counts: np.ndarray
    layers: np.ndarray
    path: Path
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        for index, step in enumerate(self.counts):
            try:
                yield LoadRecord(index, 1, "mixed", step[self.layers])
            except TraceError as problem:
                raise TraceError(f"{self.path}, key logical_count[{index}]: {problem}") from None
            if self.progress is not None:
                self.progress(index + 1, len(self.counts))


def _kind(content: Any, path: Path) -> str:
    if isinstance(content, dict) and "logical_count" in content:
        return "stat"
    if isinstance(content, dict) and "records" in content:
        if "last_physical_to_logical_map" not in content:
            raise TraceError(f"{path}, key last_physical_to_logical_map: not there; expected beside 'records'")
        return "per_pass or per_token"
    if isinstance(content, dict) and "physical_to_logical_map" in content:
        raise TraceError(f"{path} is a placement, not a load trace; give it as --current, or convert it")
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(f"{path}: not an SGLang dump; expected 'logical_count' or 'records', found {found}")


def _passes_trace(contents: list[tuple[Path, Any]], progress: ByteProgress | None) -> LoadTrace:
    first_path, first = contents[0]
    table = np.asarray(first["last_physical_to_logical_map"])
    by_rank: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path, content in contents:
        other = np.asarray(content["last_physical_to_logical_map"])
        if other.shape != table.shape or not np.array_equal(other, table):
            raise TraceError(
                f"{path}, key last_physical_to_logical_map: differs from {first_path.name}; dumps of different "
                f"recordings are mixed"
            )
        for number, record in enumerate(content["records"]):
            where = f"{path}, key records[{number}]"
            if not isinstance(record, dict) or "forward_pass_id" not in record:
                raise TraceError(f"{where}: expected a record with forward_pass_id, found {record!r:.60}")
            rank = int(record.get("rank", 0))
            by_rank.setdefault(rank, {}).setdefault(int(record["forward_pass_id"]), []).append(record)
    if not by_rank:
        raise TraceError(f"{first_path}, key records: empty; record while requests run")
    ranks = sorted(by_rank)
    if ranks != list(range(len(ranks))):
        raise TraceError(f"dumps of ranks {ranks} found, expected 0 to {ranks[-1]}; copy the files of all ranks")
    shared = sorted(set.intersection(*(set(passes) for passes in by_rank.values())))
    every = set.union(*(set(passes) for passes in by_rank.values()))
    if not shared:
        raise TraceError(f"no forward pass is in all {len(ranks)} files; dumps of different recordings are mixed")
    reader = _Passes(first_path, by_rank, shared, table, np.arange(len(table)), progress)
    used = np.zeros(len(table), dtype=bool)
    topk = 0
    for pass_id in shared:  # the ranks of one pass at a time: the tensors stay in the mapped files
        used |= reader.counts(pass_id).any(axis=(0, 2))
        for rank in ranks:
            for record in by_rank[rank][pass_id]:
                ids = record.get("topk_ids_of_layer")
                if ids is not None and np.asarray(ids).size:
                    topk = max(topk, int((np.asarray(ids) >= 0).sum(axis=2).max()))
    layers = np.flatnonzero(used)
    if not len(layers):
        raise TraceError(f"{first_path}: no tokens in {len(shared)} passes; record while requests run")
    origin = first_path.parent if len(contents) > 1 else first_path
    dropped = f", {len(every) - len(shared)} passes not in all files left out" if len(every) > len(shared) else ""
    return LoadTrace(
        _Passes(first_path, by_rank, shared, table, layers, progress),
        int(table.max()) + 1,
        tuple(layers.tolist()),
        topk or None,
        source=f"{origin} (SGLang passes of {len(ranks)} ranks{dropped})",
        num_records=len(shared),
    )


@dataclass(frozen=True, eq=False)
class _Passes:
    path: Path
    by_rank: dict[int, dict[int, list[dict[str, Any]]]]
    pass_ids: list[int]
    table: np.ndarray  # [model layers, P]
    layers: np.ndarray
    progress: ByteProgress | None

    def counts(self, pass_id: int) -> np.ndarray:
        """Returns [ranks, model layers, E] int64, what each rank counted in a pass."""
        num_layers, num_experts = len(self.table), int(self.table.max()) + 1
        out = np.zeros((len(self.by_rank), num_layers, num_experts), dtype=np.int64)
        for rank, passes in self.by_rank.items():
            for record in passes[pass_id]:
                physical = self._physical(record, rank, pass_id)
                np.add.at(out[rank], (np.arange(num_layers)[:, None], self.table), physical)
        return out

    def _physical(self, record: dict[str, Any], rank: int, pass_id: int) -> np.ndarray:
        where = f"rank {rank}, forward pass {pass_id}"
        if "global_physical_count" in record:
            physical = np.asarray(record["global_physical_count"])
            if physical.shape != self.table.shape:
                raise TraceError(
                    f"{self.path.parent}, {where}, key global_physical_count: shape {list(physical.shape)}, expected "
                    f"{list(self.table.shape)} (as last_physical_to_logical_map)"
                )
            return physical
        if "topk_ids_of_layer" not in record:
            raise TraceError(f"{self.path.parent}, {where}: expected global_physical_count or topk_ids_of_layer")
        ids = np.asarray(record["topk_ids_of_layer"])
        if ids.ndim != 3 or len(ids) != len(self.table) or ids.max(initial=-1) >= self.table.shape[1]:
            raise TraceError(
                f"{self.path.parent}, {where}, key topk_ids_of_layer: shape {list(ids.shape)} up to "
                f"{ids.max(initial=-1)}, expected [{len(self.table)}, tokens, topk] of ids below {self.table.shape[1]}"
            )
        return np.stack([np.bincount(row[row >= 0], minlength=self.table.shape[1]) for row in ids])

    def __call__(self) -> Iterator[LoadRecord]:
        slots_per_rank = self.table.shape[1] // len(self.by_rank)
        for index, pass_id in enumerate(self.pass_ids):
            counts = self.counts(pass_id)[:, self.layers]
            total = counts.sum(axis=0)
            source: np.ndarray | None = counts.transpose(1, 0, 2)
            if len(counts) > 1 and (counts == counts[0]).all():
                total, source = counts[0], None  # tensor-parallel attention: every rank counted the same tokens
            elif self._counted_on_arrival(pass_id, slots_per_rank):
                source = None  # low latency: ranks counted what reached them, not what they sent
            yield LoadRecord(index, 1, self._phase(pass_id), total, by_source=source)
            if self.progress is not None:
                self.progress(index + 1, len(self.pass_ids))

    def _counted_on_arrival(self, pass_id: int, slots_per_rank: int) -> bool:
        for rank, passes in self.by_rank.items():
            for record in passes[pass_id]:
                physical = self._physical(record, rank, pass_id)
                own = physical[:, rank * slots_per_rank : (rank + 1) * slots_per_rank].sum()
                if own != physical.sum():
                    return False
        return True

    def _phase(self, pass_id: int) -> str:
        modes = {
            _PHASE_OF_FORWARD_MODE.get(int(record.get("forward_mode", 3)), "")
            for passes in self.by_rank.values()
            for record in passes[pass_id]
        } - {""}
        return modes.pop() if len(modes) == 1 else "mixed"
