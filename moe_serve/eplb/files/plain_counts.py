"""Counts of tokens and nothing else, from spreadsheets and notebooks. (Our own trace forms are .jsonl and .npz.)

.csv   window,layer,expert,count with one line per expert, sorted by window. Spreadsheets drop zeros, so an expert
       without a line has no tokens. A first line `# {json}` may describe the trace; otherwise one pass finds its shape
.npy   [T, L, E], or [L, E] for one window; mapped, so memory is needed for one record only
.json  {"python_code": [[E] per layer], "python_docs": …}, one window per domain of text
"""

import json
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.trace_jsonl import OPTIONAL_FIELDS, TraceMeta, replacing
from moe_serve.eplb.files.untrusted import (
    ByteProgress,
    check_layer_ids,
    check_table_size,
    counted,
    naming,
    read_json,
    whole_counts,
)
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

CSV_HEADER = "window,layer,expert,count"
NPY_MAGIC = b"\x93NUMPY"
_CHUNK = 1 << 20  # characters
_LONGEST_LINE, _LONGEST_COMMENT = 1 << 12, 1 << 20
# What numpy raises for a damaged header, which is a piece of Python, and for a shape that the file does not hold.
_NPY_ERRORS = (
    ValueError, SyntaxError, tokenize.TokenError, EOFError, OSError, TypeError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip


def is_csv(head: bytes) -> bool:
    """Returns whether a file begins with our column names, behind an optional comment line."""
    lines = head.decode("utf-8-sig", "replace").splitlines()
    lines = lines[1:] if lines and lines[0].startswith("#") else lines
    return bool(lines) and lines[0].replace(" ", "").lower() == CSV_HEADER


def read_csv(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a .csv file, read in chunks of lines."""
    meta, num_steps, phase = _described(path)
    num_records: int | None = None
    if meta is None:
        layers: set[int] = set()
        windows: set[int] = set()
        experts = 0
        for rows in _chunks(path, None):
            windows.update(np.unique(rows[:, 0]).tolist())
            layers.update(np.unique(rows[:, 1]).tolist())
            experts = max(experts, int(rows[:, 2].max()) + 1)
            check_layer_ids(layers, str(path))
            check_table_size(len(layers), experts, str(path))
        if not layers:
            raise TraceError(f"{path} has no lines below {CSV_HEADER!r}; expected one per window, layer and expert")
        meta, num_records = TraceMeta(experts, tuple(sorted(layers))), len(windows)
    shape = meta

    def records() -> Iterator[LoadRecord]:
        for rows in _windows(path, len(shape.moe_layer_ids) * shape.num_logical, progress):
            tokens = _table(rows, shape, path)
            yield LoadRecord(max(int(rows[0, 0]), 0), num_steps, phase, tokens, model_id=shape.model_id)

    return LoadTrace(
        records, meta.num_logical, meta.moe_layer_ids, meta.topk, meta.model_id, f"{path} (csv)", num_records
    )


def _described(path: Path) -> tuple[TraceMeta | None, int, str]:
    """Returns what the first line says: the trace (None: nothing), the steps of a window and their phase."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(_LONGEST_COMMENT)
    try:
        content = json.loads(first.removeprefix("#")) if first.startswith("#") else None
    except (ValueError, RecursionError):
        content = None  # another comment
    if not isinstance(content, dict) or "num_logical" not in content:
        return None, 1, "mixed"
    num_steps = content.get("num_steps", 1)
    if type(num_steps) is not int:
        raise TraceError(f"{path} line 1, key num_steps: expected a whole number, found {num_steps!r:.60}")
    return TraceMeta.from_json(content, f"{path} line 1"), num_steps, str(content.get("phase", "mixed"))


def _windows(path: Path, most: int, progress: ByteProgress | None) -> Iterator[np.ndarray]:
    """Yields the rows of each window, [lines, 5] as in `_chunks`; of one with more than `most`, the first ones."""
    pending = np.zeros((0, 5), dtype=np.int64)
    for rows in _chunks(path, progress):
        *whole, pending = np.split(both := np.concatenate([pending, rows]), np.flatnonzero(np.diff(both[:, 0])) + 1)
        for window, after in pairwise([*whole, pending]):
            yield window
            if after[0, 0] < window[0, 0]:
                raise TraceError(
                    f"{path} line {after[0, 4]}: window {after[0, 0]} after window {window[0, 0]}; sort by window"
                )
        if len(pending) > most:
            yield pending  # it repeats an expert, which is refused before more is read
    if len(pending):
        yield pending


def _chunks(path: Path, progress: ByteProgress | None) -> Iterator[np.ndarray]:
    """Yields chunks of rows, [lines, 5] int64: window, layer, expert, count and the number of the line."""
    total, done = path.stat().st_size, 0
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = 3 if file.readline(_LONGEST_COMMENT).startswith("#") and file.readline(_LONGEST_LINE) else 2
        # Whole lines; one without end is cut into pieces, and refused as no line of ours.
        while text := file.read(_CHUNK) + file.readline(_LONGEST_LINE):
            lines = text.removesuffix("\n").split("\n")
            kept = {line + index: each for index, each in enumerate(lines) if each.strip()}
            if kept:
                yield np.column_stack([_parsed(kept, path), list(kept)])
            line += len(lines)
            done += len(text)
            if progress is not None:
                progress(min(done, total), total)


def _parsed(lines: dict[int, str], path: Path) -> np.ndarray:
    """Returns the numbers [lines, 4] in lines by their number."""
    try:
        rows = np.loadtxt(list(lines.values()), delimiter=",", dtype=np.int64, ndmin=2, comments=None)
        if rows.shape[1] == 4:
            return rows
    except ValueError:
        pass
    for number, text in lines.items():  # say which line
        parts = text.strip().split(",")
        if len(parts) != 4 or not all(part.strip().lstrip("+-").isdigit() for part in parts):
            raise TraceError(f"{path} line {number}: expected {CSV_HEADER} as four whole numbers, found "
                             f"{text.strip()!r:.60}")  # fmt: skip
    raise TraceError(f"{path}, lines {min(lines)} to {max(lines)}: expected {CSV_HEADER} as whole numbers up to 2^63")


def _table(rows: np.ndarray, meta: TraceMeta, path: Path) -> np.ndarray:
    """Returns the tokens [L, E] of one window's rows [lines, 5]."""
    layer_ids = np.array(meta.moe_layer_ids)
    order = np.argsort(layer_ids)
    layer = order[np.minimum(np.searchsorted(layer_ids, rows[:, 1], sorter=order), len(order) - 1)]
    wrong = (layer_ids[layer] != rows[:, 1]) | (rows[:, 2] < 0) | (rows[:, 2] >= meta.num_logical) | (rows[:, 3] < 0)
    flat = layer * meta.num_logical + np.where(wrong, 0, rows[:, 2])
    repeated = np.ones(len(rows), dtype=bool)
    repeated[np.unique(np.where(wrong, -1 - np.arange(len(rows)), flat), return_index=True)[1]] = False
    if wrong.any() or repeated.any():
        at = int(np.flatnonzero(wrong | repeated)[0])
        what = "a second time; are two traces mixed?" if repeated[at] else (
            f"expected a layer of {list(meta.moe_layer_ids)[:8]}, an expert below {meta.num_logical} and a count of at "
            "least 0"
        )  # fmt: skip
        raise TraceError(f"{path} line {rows[at, 4]}: {','.join(map(str, rows[at, :4].tolist()))}: {what}")
    tokens = np.zeros((len(layer_ids), meta.num_logical), dtype=np.int64)
    tokens.reshape(-1)[flat] = rows[:, 3]
    return tokens


def write_csv(trace: LoadTrace, path: Path) -> int:
    """Writes a trace, atomically; returns the number of records. Refuses records that say more than counts."""
    number, common = 0, None
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for record in trace:
            more = [n for n in (*OPTIONAL_FIELDS, "step_time_s", "placement") if getattr(record, n) is not None]
            if more:
                raise TraceError(
                    f"record {number} has {', '.join(more)}, which .csv cannot hold; write a .npz or .jsonl, or leave "
                    f"it out (--counts-only)"
                )
            kind = (record.num_steps, record.phase)
            if common is None:
                common = kind
                described = TraceMeta.of(trace).to_json() | {"num_steps": kind[0], "phase": kind[1]}
                file.write(f"# {json.dumps(described)}\n{CSV_HEADER}\n")
            if kind != common:
                raise TraceError(
                    f"record {number} has {kind[0]} {kind[1]} steps, the first {common[0]} {common[1]}, and .csv says "
                    f"it once for all; write a .npz or .jsonl"
                )
            for layer, counts in zip(trace.moe_layer_ids, record.tokens.tolist(), strict=True):
                file.writelines(f"{record.first_step},{layer},{e},{count}\n" for e, count in enumerate(counts))
            number += 1
    return number


def read_npy(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a .npy file; its layers count from 0."""
    try:
        counts = np.load(path, mmap_mode="r", allow_pickle=False)
    except _NPY_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0]
        raise TraceError(f"{path} is not a complete .npy of numbers ({reason:.120}); write it again") from None
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or not counts.size or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"{path}: shape {list(counts.shape)} of {counts.dtype}, expected counts [records, layers, experts]"
        )
    num_records, num_layers, num_experts = counts.shape
    check_table_size(num_layers, num_experts, str(path))

    def records() -> Iterator[LoadRecord]:
        for index in counted(range(num_records), num_records, progress):
            with naming(f"{path}, record {index}"):
                record = LoadRecord(index, 1, "mixed", counts[index])
            yield record

    return LoadTrace(records, num_experts, tuple(range(num_layers)), source=f"{path} (npy)", num_records=num_records)


def is_named_counts(content: Any) -> bool:
    """Returns whether parsed JSON maps names to lists of lists of numbers."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(v, list) and v and isinstance(v[0], list) for v in content.values())
    )


def read_named(path: Path) -> LoadTrace:
    """Returns the trace in counts by name: one record per name, in the order of the file."""
    content = read_json(path, TraceError, "counts by name")
    records: list[LoadRecord] = []
    for index, (name, value) in enumerate(content.items()):
        table = whole_counts(value, f"{path}, key {name}")
        shape = records[0].tokens.shape if records else table.shape
        if table.shape != shape or table.ndim != 2 or table.min(initial=0) < 0:
            raise TraceError(
                f"{path}, key {name}: counts of shape {list(table.shape)}, expected {list(shape)} numbers of at least 0"
            )
        records.append(LoadRecord(index, 1, "mixed", table))
    return LoadTrace.of(records, source=f"{path} (counts by name: {', '.join(content)})")
