"""vLLM's expert loads: dumps with one JSON object per window, and the history that ADRS / OpenEvolve published.

ADRS:  {"load_history": [{"logical_expert_load": [[E] per layer]}, …]}; the published file has 224 MB and is streamed.
dumps: .json or .jsonl objects with "logical_expert_load" [L, E] (or [steps, L, E]), or with "physical_expert_load"
       [L, P] and "physical_to_logical_map" [L, P]; "step" where they say it. The schema of vLLM's
       expert_load_dump_dir is not documented: anything else is refused by its keys.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import check_table_size, whole_counts
from moe_serve.eplb.files.json_text import json_lines, parse_json, read_json
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_LOGICAL = "logical_expert_load"
_PHYSICAL = ("physical_expert_load", "expert_load", "expert_load_pass")
_MAP = "physical_to_logical_map"
_CHUNK = 1 << 20
_MAX_ELEMENT = 1 << 28  # 256 MiB: an element larger than this is not a record, but a file of another kind
_STRUCTURE = re.compile(rb'["\[\]{}]')
_STRING_END = re.compile(rb'["\\]')


def is_dump(content: Any) -> bool:
    """Returns whether a parsed JSON object is one window of expert load."""
    return isinstance(content, dict) and (
        _LOGICAL in content or (_MAP in content and any(k in content for k in _PHYSICAL))
    )


def read_history(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a `load_history` file."""

    def windows(report: ByteProgress | None) -> Iterator[tuple[str, Any]]:
        for index, entry in enumerate(_iter_array(path, "load_history", report)):
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


def _iter_array(path: Path, key: str, progress: ByteProgress | None = None) -> Iterator[Any]:
    """Yields the elements of the array under a key of the file's outermost object, in bounded memory.

    Only the structure is scanned (brackets, braces and quotes); each element is then parsed as ordinary JSON, so memory
    is needed for the largest element only.
    Elements must be objects or arrays. Raises TraceError naming the file, the key and the element.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        buffer = _skip_to_array(file.read, path, key)
        index = 0
        depth = 0
        start = position = 0
        while True:
            match = _STRUCTURE.search(buffer, position)
            if match is None:
                position = len(buffer)
                if depth == 0:  # only commas and white space lie between elements
                    buffer, position = b"", 0
                elif len(buffer) - start > _MAX_ELEMENT:
                    raise TraceError(
                        f"{path}, key {key}[{index}]: more than {_MAX_ELEMENT >> 20} MiB; not a load record"
                    )
                else:
                    buffer, position, start = buffer[start:], position - start, 0
                chunk = file.read(_CHUNK)
                if not chunk:
                    raise TraceError(f"{path} ends inside {key}[{index}]; expected ']' and '}}': the file is cut off")
                buffer += chunk
                continue
            character = match.group()
            position = match.end()
            if character == b'"':
                while True:  # to the closing quote; an escape takes the next byte with it
                    quote = _STRING_END.search(buffer, position)
                    if quote is None or (quote.group() == b"\\" and quote.end() == len(buffer)):
                        if len(buffer) > _MAX_ELEMENT:
                            raise TraceError(f"{path}: a text of more than {_MAX_ELEMENT >> 20} MiB in {key}[{index}]")
                        chunk = file.read(_CHUNK)
                        if not chunk:
                            raise TraceError(f"{path} ends inside a text in {key}[{index}]: the file is cut off")
                        buffer += chunk
                        continue
                    position = quote.end() + (quote.group() == b"\\")
                    if quote.group() == b'"':
                        break
            elif character in b"[{":
                if depth == 0:
                    start = match.start()
                depth += 1
            elif depth == 0:
                return  # the ']' of the array itself
            else:
                depth -= 1
                if depth == 0:
                    yield parse_json(buffer[start:position], f"{path}, key {key}[{index}]")
                    index += 1
                    if progress is not None:
                        progress(file.tell() - len(buffer) + position, total)
                    if position > _CHUNK:
                        buffer, position = buffer[position:], 0


def _skip_to_array(read: Callable[[int], bytes], path: Path, key: str) -> bytes:
    """Returns the buffer that begins right behind the '[' of the key's array."""
    opening = re.compile(rb'"' + re.escape(key.encode()) + rb'"\s*:\s*(.?)', re.DOTALL)
    buffer = b""
    while len(buffer) < 16 * _CHUNK:
        chunk = read(_CHUNK)
        buffer += chunk
        match = opening.search(buffer)
        if match and match.group(1):
            if match.group(1) != b"[":
                raise TraceError(f"{path}, key {key}: expected a list of records, found {match.group(1)!r}…")
            return buffer[match.end() :]
        if not chunk:
            break
    raise TraceError(f"{path}: key {key} not found; expected {{{key!r}: [...]}}")
