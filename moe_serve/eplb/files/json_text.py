"""Parses JSON that others wrote: whatever is wrong with it is one line, and a file is read up to a size only.

A byte order mark in front of UTF-8, as some editors write, is skipped. Depth is left to the parsers, which stop by
themselves before the stack ends.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from moe_serve.errors import MoeServeError, TraceError

MAX_JSON_BYTES = 1 << 28  # 256 MiB: JSON that is not one of the streamed kinds is parsed whole up to this size
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # what UTF-16 text begins with


def parse_json(text: bytes, where: str, advice: str = "is the file cut off?") -> Any:
    """Returns what a line or an element says. Raises TraceError that begins with `where` and ends with `advice`."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise TraceError(f"{where}: nested too deeply; give a load trace") from None
    except UnicodeDecodeError:
        raise TraceError(f"{where}: not UTF-8 text; save the file as UTF-8") from None
    except msgspec.DecodeError as problem:
        raise TraceError(f"{where}: not JSON ({problem}); {advice}") from None


def read_json(path: Path, error: type[MoeServeError], wanted: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the content of a JSON file, read whole; a mistake in it is an `error` that names the line.

    wanted: what to give instead of a file that is something else, like "a placement file"
    """
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise error(f"{path} has more than {max_bytes >> 20} MiB, and JSON is read whole; give {wanted}")
    if text.startswith(UTF16_MARKS):
        raise error(f"{path} is UTF-16 text; save it as UTF-8")
    try:
        return json.loads(text.removeprefix(BYTE_ORDER_MARK).decode())
    except json.JSONDecodeError as problem:
        raise error(
            f"{path} line {problem.lineno} column {problem.colno}: not JSON ({problem.msg}); is the file complete, or "
            f"cut off?"
        ) from None
    except UnicodeDecodeError:
        raise error(f"{path} is not UTF-8 text; give {wanted}") from None
    except RecursionError:
        raise error(f"{path}: nested too deeply; give {wanted}") from None
    except ValueError as problem:  # a number of thousands of digits
        raise error(f"{path}: {problem}; give {wanted}") from None


def json_lines(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yields (line number, bytes read so far, content) of the lines of a file that are not blank."""
    done = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_JSON_BYTES + 1):
            number += 1
            done += len(line)
            where = f"{path} line {number}"
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if len(line) > MAX_JSON_BYTES:
                raise TraceError(f"{where}: more than {MAX_JSON_BYTES >> 20} MiB; not a load record")
            if line.strip():
                cut_off = "the last line is cut off: delete it"
                yield number, done, parse_json(line, where, "is it damaged?" if line.endswith(b"\n") else cut_off)
