"""The .jsonl trace that a running server appends to: begun or continued, locked, and limited in size."""

import fcntl
import os
from pathlib import Path
from typing import IO, Any

import msgspec

from moe_serve.eplb.files.trace_jsonl import CONTINUES, JsonlWriter, TraceMeta, end_of_trace, older_part_of, read_jsonl
from moe_serve.eplb.load import LoadRecord
from moe_serve.errors import ConfigError, TraceError


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


class RollingTrace:
    """Appends the records and events of one run to a trace. Its steps go on after those of earlier runs.

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
        """Opens the file, behind what an earlier run or another rank has written. next_step: of the run, not yet in it

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
        """Closes the file and gives up its lock; `open` opens it again."""
        self._close_writer()
        if self._lock is not None:
            self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _roll(self, run_begins: int, next_step: int) -> None:
        """Goes on in a new file, which is complete up to here before it has its name."""
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
