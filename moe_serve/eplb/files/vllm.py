"""vLLM's expert loads: dumps with one JSON object per window, and the history that ADRS / OpenEvolve published.

ADRS:  {"load_history": [{"logical_expert_load": [[E] per layer]}, …]}; the published file has 224 MB and is streamed.
dumps: .json or .jsonl objects with "logical_expert_load" [L, E] (or [steps, L, E]), or with "physical_expert_load"
       [L, P] and "physical_to_logical_map" [L, P]; "step" where they say it. The schema of vLLM's
       expert_load_dump_dir is not documented: anything else is refused by its keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import check_table_size, whole_counts
from moe_serve.eplb.files.json_stream import iter_array
from moe_serve.eplb.files.json_text import json_lines, read_json
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_LOGICAL = "logical_expert_load"
_PHYSICAL = ("physical_expert_load", "expert_load", "expert_load_pass")
_MAP = "physical_to_logical_map"


def is_dump(content: Any) -> bool:
    """Returns whether a parsed JSON object is one window of expert load."""
    return isinstance(content, dict) and (
        _LOGICAL in content or (_MAP in content and any(k in content for k in _PHYSICAL))
    )


def read_history(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a `load_history` file."""

    def windows(report: ByteProgress | None) -> Iterator[tuple[str, Any]]:
        for index, entry in enumerate(iter_array(path, "load_history", report)):
            yield f"{path}, key load_history[{index}]", entry

    return _trace(windows, progress, f"{path} (ADRS load_history)", path)


def read_dumps(paths: list[Path], progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in dump files, in the order of their names."""

    def windows(report: ByteProgress | None) -> Iterator[tuple[str, Any]]:
        for number, path in enumerate(paths):
            yield from _objects(path)
            if report is not None:
                report(number + 1, len(paths))

    return _trace(windows, progress, f"{paths[0] if len(paths) == 1 else paths[0].parent} (vLLM dump)", paths[0])


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        content = read_json(path, TraceError, "a load trace, or .jsonl with one window per line")
        entries = content if isinstance(content, list) else [content]
        yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(entries))
        return
    yield from ((f"{path} line {number}", content) for number, _, content in json_lines(path))


@dataclass(frozen=True)
class _Reader:
    windows: Callable[[ByteProgress | None], Iterator[tuple[str, Any]]]
    shape: tuple[int, int]
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        step = 0
        for where, entry in self.windows(self.progress):
            counts = window_counts(entry, where)  # [steps, L, E]
            if counts.shape[1:] != self.shape:
                raise TraceError(
                    f"{where}: {counts.shape[1]} layers x {counts.shape[2]} experts, expected "
                    f"{self.shape[0]} x {self.shape[1]} (as in the first window)"
                )
            first = entry.get("step", step)
            first = first if isinstance(first, int) and first >= 0 else step
            try:
                yield LoadRecord(
                    first, len(counts), "mixed", counts.sum(axis=0), per_step=counts if len(counts) > 1 else None
                )
            except TraceError as problem:
                raise TraceError(f"{where}: {problem}") from None
            step = first + len(counts)


def _trace(
    windows: Callable[[ByteProgress | None], Iterator[tuple[str, Any]]],
    progress: ByteProgress | None,
    source: str,
    path: Path,
) -> LoadTrace:
    for where, entry in windows(None):
        _, num_layers, num_experts = window_counts(entry, where).shape
        reader = _Reader(windows, (num_layers, num_experts), progress)
        return LoadTrace(reader, num_experts, tuple(range(num_layers)), source=source)
    raise TraceError(f"{path}: no windows in it; expected objects with {_LOGICAL!r}")


def window_counts(entry: Any, where: str) -> np.ndarray:
    """Returns [steps, L, E] int64, the logical counts of one window."""
    if not is_dump(entry):
        found = f"keys {sorted(map(str, entry))[:6]}" if isinstance(entry, dict) else repr(entry)[:60]
        raise TraceError(f"{where}: expected {_LOGICAL!r}, or {_PHYSICAL[0]!r} with {_MAP!r}, found {found}")
    key = _LOGICAL if _LOGICAL in entry else next(k for k in _PHYSICAL if k in entry)
    counts = whole_counts(entry[key], f"{where}, key {key}")
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise TraceError(f"{where}, key {key}: {counts.ndim} dimensions, expected [layers, experts] or steps of them")
    if key == _LOGICAL:
        return counts
    table = whole_counts(entry[_MAP], f"{where}, key {_MAP}")
    if table.shape != counts.shape[1:] or table.min(initial=0) < -1:
        raise TraceError(f"{where}, key {_MAP}: shape {list(table.shape)}, expected {list(counts.shape[1:])} as {key}")
    check_table_size(len(table), int(table.max(initial=0)) + 1, f"{where}, key {_MAP}")
    # The last column takes the empty slots.
    logical = np.zeros((len(counts), len(table), int(table.max(initial=-1)) + 2), dtype=np.int64)
    rows = np.arange(len(table))[:, None]
    for step, physical in zip(logical, counts, strict=True):
        np.add.at(step, (rows, table), physical)
    return logical[:, :, :-1]
