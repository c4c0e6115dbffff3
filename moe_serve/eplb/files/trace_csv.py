"""Our .csv trace, for spreadsheets: window,layer,expert,count with one line per expert, sorted by window.

Expert counts only; a first line `# {json}` may describe the trace, otherwise one pass over the file finds its shape.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from moe_serve.eplb.files.counts import check_layer_ids, check_table_size
from moe_serve.eplb.files.trace_meta import OPTIONAL_FIELDS, ByteProgress, TraceMeta
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_HEADER = "window,layer,expert,count"
_CHUNK = 1 << 20  # characters
_LONGEST_LINE, _LONGEST_COMMENT = 1 << 12, 1 << 20


def is_trace_csv(head: bytes) -> bool:
    """Returns whether a file begins with our column names, behind an optional comment line."""
    lines = head.decode("utf-8-sig", "replace").splitlines()
    lines = lines[1:] if lines and lines[0].startswith("#") else lines
    return bool(lines) and lines[0].replace(" ", "").lower() == _HEADER


def read_csv(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a .csv file, read in chunks of lines."""
    meta, num_steps, phase = _described(path)
    num_records: int | None = None
    if meta is None:
        layers: set[int] = set()
        windows: set[int] = set()
        experts = 0
        for _, rows in _chunks(path, None):
            windows.update(np.unique(rows[:, 0]).tolist())
            layers.update(np.unique(rows[:, 1]).tolist())
            experts = max(experts, int(rows[:, 2].max()) + 1)
            check_layer_ids(layers, str(path))
            check_table_size(len(layers), experts, str(path))
        if not layers:
            raise TraceError(f"{path} has no lines below {_HEADER!r}; expected one per window, layer and expert")
        meta, num_records = TraceMeta(experts, tuple(sorted(layers))), len(windows)
    return LoadTrace(
        _Reader(path, meta, num_steps, phase, progress),
        meta.num_logical,
        meta.moe_layer_ids,
        meta.topk,
        meta.model_id,
        f"{path} (csv)",
        num_records,
    )


@dataclass(frozen=True)
class _Reader:
    path: Path
    meta: TraceMeta
    num_steps: int
    phase: str
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        window: int | None = None
        tokens = self._blank()
        for line, rows in _chunks(self.path, self.progress):
            starts = np.flatnonzero(np.diff(rows[:, 0], prepend=rows[0, 0] - 1))
            for start, end in itertools.pairwise([*starts.tolist(), len(rows)]):
                found = int(rows[start, 0])
                if window is not None and found < window:
                    raise TraceError(
                        f"{self.path} line {line + start}: window {found} after window {window}; sort by window"
                    )
                if window is not None and found != window:
                    yield self._record(window, tokens)
                    tokens = self._blank()
                window = found
                self._fill(tokens, rows[start:end], line + start)
        if window is not None:
            yield self._record(window, tokens)

    def _blank(self) -> np.ndarray:
        return np.full((len(self.meta.moe_layer_ids), self.meta.num_logical), -1, dtype=np.int64)

    def _fill(self, tokens: np.ndarray, rows: np.ndarray, line: int) -> None:
        layer_ids = np.array(self.meta.moe_layer_ids)
        order = np.argsort(layer_ids)
        where = order[np.minimum(np.searchsorted(layer_ids, rows[:, 1], sorter=order), len(order) - 1)]
        wrong = (layer_ids[where] != rows[:, 1]) | (rows[:, 2] < 0) | (rows[:, 2] >= self.meta.num_logical)
        wrong |= rows[:, 3] < 0
        flat = where * self.meta.num_logical + np.where(wrong, 0, rows[:, 2])
        first = np.zeros(len(rows), dtype=bool)
        first[np.unique(flat, return_index=True)[1]] = True
        repeated = ~wrong & (~first | (tokens.reshape(-1)[flat] >= 0))
        if wrong.any() or repeated.any():
            at = int(np.flatnonzero(wrong | repeated)[0])
            values = ",".join(map(str, rows[at].tolist()))
            what = "a second time; are two traces mixed?" if repeated[at] else (
                f"expected a layer of {list(self.meta.moe_layer_ids)[:8]}, an expert below {self.meta.num_logical} "
                "and a count of at least 0"
            )  # fmt: skip
            raise TraceError(f"{self.path} line {line + at}: {values}: {what}")
        tokens.reshape(-1)[flat] = rows[:, 3]

    def _record(self, window: int, tokens: np.ndarray) -> LoadRecord:
        # A line that is not there is an expert without tokens: spreadsheets drop zeros.
        counts = np.maximum(tokens, 0)
        return LoadRecord(max(window, 0), self.num_steps, self.phase, counts, model_id=self.meta.model_id)


def _described(path: Path) -> tuple[TraceMeta | None, int, str]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(_LONGEST_COMMENT)
    if not first.startswith("#"):
        return None, 1, "mixed"
    try:
        content = json.loads(first[1:])
    except (ValueError, RecursionError):
        return None, 1, "mixed"  # another comment
    if not isinstance(content, dict) or "num_logical" not in content:
        return None, 1, "mixed"
    meta = TraceMeta.from_json(content, f"{path} line 1")
    num_steps = content.get("num_steps", 1)
    if type(num_steps) is not int:
        raise TraceError(f"{path} line 1, key num_steps: expected a whole number, found {num_steps!r:.60}")
    return meta, num_steps, str(content.get("phase", "mixed"))


def _chunks(path: Path, progress: ByteProgress | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (number of the first line, [lines, 4] int64) of whole chunks."""
    total, done = path.stat().st_size, 0
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = _skip_head(file) + 1
        # Whole lines; one without end is cut into pieces, and refused as no line of ours.
        while text := file.read(_CHUNK) + file.readline(_LONGEST_LINE):
            done += len(text)
            lines = text.removesuffix("\n").split("\n")
            kept = [text for text in lines if text.strip()]
            if kept:
                yield line, _parsed(kept, lines, path, line)
            line += len(lines)
            if progress is not None:
                progress(min(done, total), total)


def _skip_head(file: IO[str]) -> int:
    return 2 if file.readline(_LONGEST_COMMENT).startswith("#") and file.readline(_LONGEST_LINE) else 1


def _parsed(kept: list[str], lines: list[str], path: Path, line: int) -> np.ndarray:
    try:
        rows = np.loadtxt(kept, delimiter=",", dtype=np.int64, ndmin=2, comments=None)
        if rows.shape[1] == 4:
            return rows
    except ValueError:
        pass
    for number, text in enumerate(lines, start=line):  # say which line
        parts = text.strip().split(",")
        if text.strip() and (len(parts) != 4 or not all(part.strip().lstrip("+-").isdigit() for part in parts)):
            raise TraceError(
                f"{path} line {number}: expected {_HEADER} as four whole numbers, found {text.strip()!r:.60}"
            )
    raise TraceError(f"{path}, lines {line} to {line + len(lines) - 1}: expected {_HEADER} as whole numbers up to 2^63")


def write_csv(trace: LoadTrace, path: Path, progress: Callable[[int], None] | None = None) -> int:
    """Writes a trace, atomically; returns the number of records. Refuses records that say more than counts."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    number, common = 0, None
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for record in trace:
                more = [n for n in (*OPTIONAL_FIELDS, "step_time_s", "placement") if getattr(record, n) is not None]
                if more:
                    raise TraceError(
                        f"record {number} has {', '.join(more)}, which .csv cannot hold; write a .npz or .jsonl, or "
                        f"leave it out (--counts-only)"
                    )
                kind = (record.num_steps, record.phase)
                if common is None:
                    common = kind
                    described = TraceMeta.of(trace).to_json() | {"num_steps": kind[0], "phase": kind[1]}
                    file.write(f"# {json.dumps(described)}\n{_HEADER}\n")
                if kind != common:
                    raise TraceError(
                        f"record {number} has {kind[0]} {kind[1]} steps, the first {common[0]} {common[1]}, and .csv "
                        f"says it once for all; write a .npz or .jsonl"
                    )
                file.writelines(_lines(record, trace.moe_layer_ids))
                number += 1
                if progress is not None:
                    progress(number)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return number


def _lines(record: LoadRecord, layer_ids: tuple[int, ...]) -> Iterator[str]:
    for layer, counts in zip(layer_ids, record.tokens.tolist(), strict=True):
        yield "".join(f"{record.first_step},{layer},{expert},{count}\n" for expert, count in enumerate(counts))
