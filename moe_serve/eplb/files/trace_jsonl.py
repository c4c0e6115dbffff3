"""Our .jsonl trace: one JSON object per line, so that a live system can append and a reader can follow.

{"format": "moe_serve.trace", "num_logical", "moe_layer_ids", "topk", "model_id"}      first line; optional
{"first_step", "num_steps", "phase", "tokens": [[…]], …}                               a record; fields as in LoadRecord
{"window", "layer", "counts": […]}                                                     or its plain form, line per layer
{"event": "plan_ready", "step": …, …}                                                  an event of the balancer

A trace of limited size that has reached half of it goes on in a new file, and `load.jsonl` becomes `load.1.jsonl`. The
new file says in its first event at which step it continues; a reader takes the older part where that is the step it
ends at. A running server writes such a trace (`RollingTrace`).
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from moe_serve.eplb.files.untrusted import (
    ByteProgress,
    check_layer_ids,
    check_table_size,
    json_lines,
    naming,
    whole_counts,
)
from moe_serve.eplb.load import DecodeCounts, LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, TraceError

TRACE_FORMAT = "moe_serve.trace"
OPTIONAL_FIELDS = ("per_step", "by_source", "activations")

CONTINUES = "trace_continues"  # the event of a new file
_HEAD_BYTES = 1 << 20  # of a file, in which its first two lines end


@dataclass(frozen=True)
class TraceMeta:
    """The facts that a trace file states once for all its records."""

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
        if not isinstance(layers, list) or not layers:
            raise TraceError(f"{where}, key moe_layer_ids: expected a list of layer ids, found {layers!r:.60}")
        check_layer_ids(layers, f"{where}, key moe_layer_ids")
        if len(set(layers)) != len(layers):
            raise TraceError(f"{where}, key moe_layer_ids: a layer is named twice in {layers!r:.60}")
        if type(experts) is not int or experts < 1:
            raise TraceError(f"{where}, key num_logical: expected a number of experts, found {experts!r:.60}")
        if topk is not None and (type(topk) is not int or topk < 1):
            raise TraceError(f"{where}, key topk: expected experts per token, found {topk!r:.60}")
        check_table_size(len(layers), experts, where)
        return cls(experts, tuple(layers), topk, str(content.get("model_id") or ""))

    @classmethod
    def of(cls, trace: LoadTrace) -> "TraceMeta":
        return cls(trace.num_logical, trace.moe_layer_ids, trace.topk, trace.model_id)


def is_trace_line(content: Any) -> bool:
    """Returns whether a parsed line is one of ours."""
    if not isinstance(content, dict):
        return False
    keys = content.keys()
    return content.get("format") == TRACE_FORMAT or {"tokens", "first_step"} <= keys or {"window", "counts"} <= keys


def looks_like_ours(line: bytes) -> bool:
    """Returns whether a line that does not parse began as one of ours, so that the error can name it."""
    start = line[:200]
    return TRACE_FORMAT.encode() in start or b'"first_step"' in start or b'"window"' in start


def read_jsonl(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a .jsonl file, read line by line."""
    meta: TraceMeta | None = None
    for where, content in _lines(path, None):
        if content.get("format") == TRACE_FORMAT:
            meta = TraceMeta.from_json(content, where)
        elif "tokens" in content:
            tokens = _counts(content["tokens"], where, "tokens", 2)
            meta = TraceMeta(tokens.shape[1], tuple(range(len(tokens))))
        elif "counts" in content:
            meta = _plain_meta(path, where)
        else:
            continue
        break
    if meta is None:
        raise TraceError(f"{path} has no load records; expected a line with 'tokens', or with 'window' and 'counts'")
    return LoadTrace(
        _Reader(path, meta, progress), meta.num_logical, meta.moe_layer_ids, meta.topk, meta.model_id, f"{path} (jsonl)"
    )


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the event lines of a .jsonl trace, in order; those of its older part first."""
    for _, event in events_between_records(path):
        yield event


def events_between_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the event lines in order, each with the number of records before it."""
    num_records = 0
    for where, content in _lines(path, None):
        num_records += "tokens" in content
        if "event" in content:
            if type(content.get("step")) is not int or not isinstance(content["event"], str):
                raise TraceError(f"{where}: expected an event's name and its step, found {content!r:.60}")
            yield num_records, content


def recorded_latency(path: Path) -> int | None:
    """Returns the median number of steps from a plan_requested to its plan_ready event; None = no plan was recorded."""
    asked: int | None = None
    waits: list[int] = []
    for event in read_events(path):
        if event["event"] == "plan_requested":
            asked = int(event["step"])
        elif event["event"] == "plan_ready" and asked is not None:
            waits.append(int(event["step"]) - asked)
            asked = None
    return int(np.median(waits)) if waits else None


@dataclass(frozen=True)
class _Reader:
    path: Path
    meta: TraceMeta
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        window = _Window(self.meta)
        placement: Placement | None = None
        for where, content in _lines(self.path, self.progress):
            if "tokens" in content:
                yield from window.close(where)
                placement = self._placement(content, placement, where)
                yield self._record(content, placement, where)
            elif "counts" in content:
                yield from window.add(content, where)
            elif "event" not in content and content.get("format") != TRACE_FORMAT:
                raise TraceError(f"{where}: expected 'tokens', 'counts' or 'event', found keys {sorted(content)[:6]}")
        yield from window.close(f"{self.path}, end of file")

    def _record(self, content: dict[str, Any], placement: Placement | None, where: str) -> LoadRecord:
        tokens = _counts(content["tokens"], where, "tokens", 2)
        shape = (len(self.meta.moe_layer_ids), self.meta.num_logical)
        if tokens.shape != shape:
            raise TraceError(
                f"{where}: {tokens.shape[0]} layers x {tokens.shape[1]} experts, expected {shape[0]} x {shape[1]} "
                f"(as at the top of the file)"
            )
        optional = {
            name: _counts(content[name], where, name, 2 if name == "activations" else 3)
            for name in OPTIONAL_FIELDS
            if content.get(name) is not None
        }
        with naming(where):
            return LoadRecord(
                first_step=int(content.get("first_step", 0)),
                num_steps=int(content.get("num_steps", 1)),
                phase=str(content.get("phase", "mixed")),
                tokens=tokens,
                step_time_s=content.get("step_time_s"),
                num_forwards=content.get("num_forwards"),
                model_id=self.meta.model_id,
                placement_version=content.get("placement_version"),
                placement=placement,
                decodes=None if (found := content.get("decodes")) is None else DecodeCounts.from_json(found),
                **optional,
            )

    def _placement(self, content: dict[str, Any], last: Placement | None, where: str) -> Placement | None:
        """Returns the record's placement; a record repeats it only when it changed."""
        rows = content.get("physical_to_logical_map")
        if rows is None:
            return last
        with naming(f"{where}, key physical_to_logical_map"):
            return Placement(
                np.array(rows, dtype=np.int32),
                self.meta.num_logical,
                int(content.get("num_ranks", 1)),
                self.meta.moe_layer_ids,
                int(content.get("placement_version") or 0),
            )


class _Window:
    """Gathers the layers of one window of the plain form."""

    def __init__(self, meta: TraceMeta):
        self._row_of = {layer: row for row, layer in enumerate(meta.moe_layer_ids)}
        self._meta = meta
        self._id: int | None = None
        self._seen: set[int] = set()
        self._tokens = np.zeros((0, 0), dtype=np.int64)

    def add(self, content: dict[str, Any], where: str) -> Iterator[LoadRecord]:
        window, layer = content.get("window"), content.get("layer")
        if not isinstance(window, int) or not isinstance(layer, int):
            raise TraceError(f"{where}: expected whole numbers under 'window' and 'layer', found {window!r}, {layer!r}")
        if self._id is not None and window < self._id:
            raise TraceError(f"{where}: window {window} after window {self._id}; sort the file by window")
        if window != self._id:
            yield from self.close(where)
            self._id = window
            self._tokens = np.zeros((len(self._row_of), self._meta.num_logical), dtype=np.int64)
        if layer not in self._row_of:
            raise TraceError(f"{where}: layer {layer}, expected one of {sorted(self._row_of)[:8]} (as in window one)")
        if layer in self._seen:
            raise TraceError(f"{where}: layer {layer} of window {window} a second time; are two traces mixed?")
        counts = whole_counts(_counts(content["counts"], where, "counts", 1), f"{where}, key counts")
        if len(counts) != self._meta.num_logical:
            raise TraceError(f"{where}: {len(counts)} experts, expected {self._meta.num_logical} (as at the top)")
        self._seen.add(layer)
        self._tokens[self._row_of[layer]] = counts

    def close(self, where: str) -> Iterator[LoadRecord]:
        if self._id is None:
            return
        missing = self._row_of.keys() - self._seen
        if missing:
            raise TraceError(f"{where}: window {self._id} ends without layers {sorted(missing)[:8]}; is it cut off?")
        yield LoadRecord(max(self._id, 0), 1, "mixed", self._tokens, model_id=self._meta.model_id)
        self._id, self._seen = None, set()


def _plain_meta(path: Path, where: str) -> TraceMeta:
    """Returns the shape of a trace in the plain form, from its first window."""
    first: int | None = None
    layers: list[int] = []
    width = 0
    for where, content in _lines(path, None):
        if "counts" not in content:
            continue
        if first is None:
            first = content.get("window")
            width = len(_counts(content["counts"], where, "counts", 1))
        if content.get("window") != first:
            break
        if not isinstance(content.get("layer"), int):
            raise TraceError(f"{where}: expected a layer id under 'layer', found {content.get('layer')!r}")
        layers.append(content["layer"])
    return TraceMeta(width, tuple(sorted(set(layers))))


def _lines(path: Path, progress: ByteProgress | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a trace and where each is, those of the older part first."""
    parts = parts_of(path)
    total = sum(part.stat().st_size for part in parts)
    done = 0
    for part in parts:
        for number, read, content in json_lines(part):
            where = f"{part} line {number}"
            if not isinstance(content, dict):
                raise TraceError(f"{where}: expected a JSON object, found {content!r:.40}")
            yield where, content
            if progress is not None:
                progress(done + read, total)
        done += part.stat().st_size


def _counts(value: Any, where: str, name: str, ndim: int) -> np.ndarray:
    try:
        array = np.array(value)
    except ValueError:
        raise TraceError(f"{where}, key {name}: lists of different lengths") from None
    if array.ndim != ndim or array.dtype.kind not in "iuf":
        raise TraceError(f"{where}, key {name}: expected numbers in {ndim} dimensions, found {value!r:.60}")
    return array


def older_part_of(path: Path) -> Path:
    """Returns the path of a trace's older part, if it has one."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a trace, oldest first: with its older part where there is one and the steps fit."""
    older = older_part_of(path)
    with path.open("rb") as file:
        header, continues = file.readline(_HEAD_BYTES), file.readline(_HEAD_BYTES)
        if CONTINUES.encode() not in continues or not older.is_file():
            return [path]
    with older.open("rb") as file:
        if file.readline(_HEAD_BYTES) != header:
            return [path]
    try:
        fits = _end_of_file(older)[1] == _step_of(continues, path, 0)
    except TraceError:
        fits = False
    return [older, path] if fits else [path]


def end_of_trace(path: Path) -> int:
    """Returns the step after the last record of a trace, 0 without records, and removes an unfinished last line.

    A process that ends while it writes leaves one. Raises OSError, and TraceError for lines that are not of a trace.
    """
    end, step = _end_of_file(path)
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
    return step


def _end_of_file(path: Path) -> tuple[int, int]:
    """Returns where the last whole line ends, and the step after the last record up to there."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return 0, 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = last = text.rfind(b"\n") + 1
            while end > 0:
                start = text.rfind(b"\n", 0, end - 1) + 1
                step = _step_of(text[start:end], path, start)
                if step is not None:
                    return last, step
                end = start
            return last, 0


def _step_of(line: bytes, path: Path, start: int) -> int | None:
    """Returns the step after a record, or that at which the trace continues; None for any other line."""
    try:
        content = msgspec.json.decode(line) if line.strip() else {}
        if "first_step" in content:
            return int(content["first_step"]) + int(content["num_steps"])
        return int(content["step"]) if content.get("event") == CONTINUES else None
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}, byte {start}: not a line of a load trace ({error!r})") from None


class JsonlWriter:
    """Appends records and events to a .jsonl trace; every line is complete before the next begins.

    A record names its placement in full only when it changed since the record before.
    file: open for appending
    """

    def __init__(self, path: Path, meta: TraceMeta, append: bool = False, step_zero: int = 0):
        """append: write behind what the file holds. step_zero: added to all steps, to continue those of the trace"""
        self.step_zero = step_zero
        self.file = path.open("ab" if append else "wb")
        self._placement: Placement | None = None
        if not append or self.file.tell() == 0:
            self._write(meta.to_json())

    def add(self, record: LoadRecord) -> None:
        """Appends a record."""
        line: dict[str, Any] = {
            "first_step": self.step_zero + record.first_step,
            "num_steps": record.num_steps,
            "phase": record.phase,
            "tokens": record.tokens.tolist(),
        }
        for name in OPTIONAL_FIELDS:
            value = getattr(record, name)
            if value is not None:
                line[name] = value.tolist()
        for name in ("step_time_s", "num_forwards", "placement_version"):
            if getattr(record, name) is not None:
                line[name] = getattr(record, name)
        if record.decodes is not None:
            line["decodes"] = record.decodes.to_json()
        if record.placement is not None and record.placement is not self._placement:
            line["num_ranks"] = record.placement.num_ranks
            line["physical_to_logical_map"] = record.placement.physical_to_logical.tolist()
            self._placement = record.placement
        self._write(line)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Appends an event of the balancer, e.g. event("round_activated", step, version=7)."""
        self._write({"event": name, "step": self.step_zero + step, **fields})

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(msgspec.json.encode(line) + b"\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def write_jsonl(trace: LoadTrace, path: Path) -> int:
    """Writes a trace, atomically; returns the number of records."""
    number = 0
    with replacing(path) as unfinished, closing(JsonlWriter(unfinished, TraceMeta.of(trace))) as writer:
        for record in trace:
            writer.add(record)
            number += 1
    return number


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write, which takes the place of `path` once it is complete; else it is removed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def begin_trace(path: Path, meta: TraceMeta) -> IO[bytes]:
    """Creates the trace file, or checks that an existing one holds the load of the same model and can be continued.

    Returns the open file, which is locked until it is closed.
    Raises ConfigError when another server writes the file, when it cannot be written, and when it holds anything else;
    it never overwrites a file.
    """
    try:
        lock = path.open("ab")
        if not _try_to_lock(lock):
            raise ConfigError(f"eplb.record_path: another server writes {path}; name another file")
        if path.stat().st_size == 0 or _is_unfinished_header(path, meta):
            JsonlWriter(path, meta).close()
            return lock
        found = TraceMeta.of(read_jsonl(path))
        end_of_trace(path)
    except OSError as error:
        raise ConfigError(
            f"eplb.record_path: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
    except TraceError as error:
        raise ConfigError(
            f"eplb.record_path: {path} exists and is not a .jsonl load trace that can be continued ({error}); "
            "name another file, or move this one away"
        ) from None
    if found != meta:
        raise ConfigError(
            f"eplb.record_path: {path} holds the load of {_shape(found)}, and this server runs {_shape(meta)}; "
            "name another file, or move this one away"
        )
    return lock


def is_written(path: Path) -> bool:
    """Returns whether a process writes the trace now: holds its lock. Raises OSError where it cannot be opened."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not _try_to_lock(file)


class RollingTrace:
    """Appends the records and events of one run to a trace. Its steps continue those of earlier runs.

    max_bytes: of the trace; at half of it the file becomes the older part, in place of the one before
    lock:      of the rank that began the trace
    """

    def __init__(self, path: Path, meta: TraceMeta, max_bytes: int, lock: IO[bytes] | None = None):
        self.path = path
        self._lock = lock
        self._meta = meta
        self._max_bytes = max_bytes
        self._run_begins: int | None = None  # step of the trace at which the run begins
        self._writer: JsonlWriter | None = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def open(self, next_step: int) -> None:
        """Opens the file to append to what an earlier run or another rank wrote. next_step: the next one of this run

        Raises OSError, and TraceError where the file does not hold a trace.
        """
        self._close_writer()
        end = end_of_trace(self.path)
        if self._run_begins is None:
            self._run_begins = max(0, end - next_step)
        self._writer = JsonlWriter(self.path, self._meta, append=True, step_zero=self._run_begins)
        # A masked rank of this server may hold the lock; another server would not have started.
        _try_to_lock(self._writer.file)

    def add(self, record: LoadRecord) -> None:
        """Appends a record; call `open` first. Raises OSError."""
        assert self._writer is not None
        self._writer.add(record)
        if self._writer.file.tell() >= self._max_bytes // 2:
            self._roll(self._writer.step_zero, record.first_step + record.num_steps)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Appends an event; call `open` first. Raises OSError."""
        assert self._writer is not None
        self._writer.event(name, step, **fields)

    def close(self) -> None:
        """Closes the file and releases its lock; `open` opens it again."""
        self._close_writer()
        if self._lock is not None:
            self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _roll(self, run_begins: int, next_step: int) -> None:
        """Continues in a new file, which gets its name once it is complete up to here."""
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        writer = JsonlWriter(unfinished, self._meta, step_zero=run_begins)
        try:
            writer.event(CONTINUES, next_step)
            _try_to_lock(writer.file)
            os.replace(self.path, older_part_of(self.path))
            os.replace(unfinished, self.path)
        except OSError:
            writer.close()
            unfinished.unlink(missing_ok=True)
            raise
        self._close_writer()
        self._writer = writer


def _try_to_lock(file: IO[bytes]) -> bool:
    """Locks a file until it is closed; returns False where another holds the lock."""
    import fcntl  # where traces are only read, the system may lack it

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_unfinished_header(path: Path, meta: TraceMeta) -> bool:
    header = msgspec.json.encode(meta.to_json())
    return path.stat().st_size <= len(header) and header.startswith(path.read_bytes())


def _shape(meta: TraceMeta) -> str:
    layers = meta.moe_layer_ids
    return (
        f"{meta.model_id or 'an unnamed model'} ({len(layers)} MoE layers from {layers[0]} to {layers[-1]}, "
        f"{meta.num_logical} experts, topk {meta.topk})"
    )
