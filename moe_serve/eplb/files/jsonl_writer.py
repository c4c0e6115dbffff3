"""Writes our .jsonl trace line by line; `trace_jsonl` reads it. A live system appends to one with the same writer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from moe_serve.eplb.files.trace_meta import OPTIONAL_FIELDS, TraceMeta
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement


class JsonlWriter:
    """Appends records and events to a .jsonl trace; every line is complete before the next begins.

    A record names its placement in full only when it changed since the record before.
    file: open for appending
    """

    def __init__(self, path: Path, meta: TraceMeta, append: bool = False, step_zero: int = 0):
        """append: write behind what the file holds. step_zero: added to all steps, so that those of a trace go on"""
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


def write_jsonl(trace: LoadTrace, path: Path, progress: Callable[[int], None] | None = None) -> int:
    """Writes a trace, atomically; returns the number of records."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    number = 0
    try:
        writer = JsonlWriter(unfinished, TraceMeta.of(trace))
        try:
            for record in trace:
                writer.add(record)
                number += 1
                if progress is not None:
                    progress(number)
        finally:
            writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return number
