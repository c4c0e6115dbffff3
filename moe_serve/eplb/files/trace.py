"""Load traces of our own: .npz (small and fast), .jsonl (a live system appends to it) and .csv (spreadsheets).

All three stream in both directions: a trace may be far larger than memory. This file holds what they share, the choice
of a writer, and the folding of records into longer windows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

TRACE_FORMAT = "moe_serve.trace"
OPTIONAL_FIELDS = ("per_step", "by_source", "activations")

ByteProgress = Callable[[int, int], None]  # (bytes read, bytes in all)


@dataclass(frozen=True)
class TraceMeta:
    """What a trace file says about all its records."""

    num_logical: int
    moe_layer_ids: tuple[int, ...]
    topk: int | None = None
    model_id: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": TRACE_FORMAT,
            "num_logical": self.num_logical,
            "moe_layer_ids": list(self.moe_layer_ids),
            "topk": self.topk,
            "model_id": self.model_id,
        }

    @classmethod
    def from_json(cls, content: Any, where: str) -> "TraceMeta":
        """Raises TraceError naming `where` (file and line or key) when something is missing or of the wrong kind."""
        if not isinstance(content, dict):
            raise TraceError(f"{where}: expected an object that describes the trace, found {content!r:.60}")
        layers, experts, topk = content.get("moe_layer_ids"), content.get("num_logical"), content.get("topk")
        if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i >= 0 for i in layers):
            raise TraceError(f"{where}, key moe_layer_ids: expected a list of layer ids, found {layers!r:.60}")
        if not isinstance(experts, int) or experts < 1:
            raise TraceError(f"{where}, key num_logical: expected a number of experts, found {experts!r:.60}")
        if topk is not None and (not isinstance(topk, int) or topk < 1):
            raise TraceError(f"{where}, key topk: expected experts per token, found {topk!r:.60}")
        return cls(experts, tuple(layers), topk, str(content.get("model_id") or ""))

    @classmethod
    def of(cls, trace: LoadTrace) -> "TraceMeta":
        return cls(trace.num_logical, trace.moe_layer_ids, trace.topk, trace.model_id)


def write_trace(
    trace: LoadTrace, path: str | Path, progress: Callable[[int], None] | None = None, counts_only: bool = False
) -> int:
    """Writes a trace as .npz, .jsonl or .csv, by suffix, and returns the number of records.

    progress: called with the number of records written so far.
    counts_only: leave out the optional fields of the records (needed for .csv, which holds nothing else).
    """
    path = Path(path)
    source = _counts_only(trace) if counts_only else trace
    match path.suffix:
        case ".npz":
            from moe_serve.eplb.files.trace_npz import write_npz as write
        case ".jsonl":
            from moe_serve.eplb.files.trace_jsonl import write_jsonl as write
        case ".csv":
            from moe_serve.eplb.files.trace_csv import write_csv as write
        case _:
            raise TraceError(f"trace file {path} has the suffix {path.suffix!r}; use .npz, .jsonl or .csv")
    return write(source, path, progress)


def folded(trace: LoadTrace, window_steps: int) -> LoadTrace:
    """Returns the trace with consecutive records summed until a window holds at least window_steps steps.

    Activated experts stay known where every record is a single step or brings them; per_step is dropped. A shorter rest
    at the end is kept. Records never mix phases.
    """
    if window_steps < 1:
        raise TraceError(f"window is {window_steps} steps; give a whole number of at least 1")
    return replace(trace, open_records=_Folding(trace, window_steps), num_records=None)


@dataclass(frozen=True)
class _Folding:
    trace: LoadTrace
    window_steps: int

    def __call__(self) -> Iterator[LoadRecord]:
        pending: list[LoadRecord] = []
        for record in self.trace:
            if pending and pending[0].phase != record.phase:
                yield _merged(pending)
                pending = []
            # A long record would keep its big optional parts alive until the window closes: reduce it at once.
            pending = [_merged([*pending, record])]
            if pending[0].num_steps >= self.window_steps:
                yield pending.pop()
        if pending:
            yield _merged(pending)


def _merged(records: list[LoadRecord]) -> LoadRecord:
    first = records[0]
    active = [part for part in map(record_activations, records) if part is not None]
    sources = [record.by_source for record in records]
    known = [part for part in sources if part is not None]
    times = [(record.step_time_s, record.num_steps) for record in records]
    steps = sum(record.num_steps for record in records)
    return replace(
        first,
        num_steps=steps,
        tokens=np.sum([record.tokens for record in records], axis=0),
        per_step=None,
        activations=np.sum(active, axis=0) if len(active) == len(records) else None,
        by_source=np.sum(known, axis=0) if len(known) == len(sources) else None,
        step_time_s=None
        if any(t is None for t, _ in times) or not steps
        else sum((t or 0) * n for t, n in times) / steps,
    )


def record_activations(record: LoadRecord) -> np.ndarray | None:
    """Returns [L, E] int64, in how many steps each expert had a token, or None where the record cannot tell."""
    if record.activations is not None:
        return record.activations
    if record.per_step is not None:
        return np.asarray((record.per_step > 0).sum(axis=0))
    return (record.tokens > 0).astype(np.int64) if record.num_steps == 1 else None


def _counts_only(trace: LoadTrace) -> LoadTrace:
    def open_records() -> Iterator[LoadRecord]:
        for record in trace:
            yield LoadRecord(record.first_step, record.num_steps, record.phase, record.tokens, model_id=record.model_id)

    return replace(trace, open_records=open_records)
