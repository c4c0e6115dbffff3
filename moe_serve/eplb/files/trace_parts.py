"""The end of a .jsonl trace, and the older part of one that is limited in size.

A trace that has reached half its size goes on in a new file, and `load.jsonl` becomes `load.1.jsonl`. The new file says
in its first event at which step it continues; a reader takes the older part where that is the step it ends at.
"""

import mmap
from pathlib import Path

import msgspec

from moe_serve.errors import TraceError

CONTINUES = "trace_continues"  # the event
_HEAD_BYTES = 1 << 20  # of a file, in which its first two lines end


def older_part_of(path: Path) -> Path:
    """Returns where the older part of a trace lies, if it has one."""
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
