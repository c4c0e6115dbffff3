"""Reads the elements of one array inside a large JSON file, one after another, in bounded memory.

Only the structure is scanned (brackets, braces and quotes); each element is then parsed as ordinary JSON, so memory
is needed for the largest element only.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_serve.eplb.files.json_text import parse_json
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.errors import TraceError

_CHUNK = 1 << 20
_MAX_ELEMENT = 1 << 28  # 256 MiB: an element larger than this is not a record, but a file of another kind
_STRUCTURE = re.compile(rb'["\[\]{}]')
_STRING_END = re.compile(rb'["\\]')


def iter_array(path: Path, key: str, progress: ByteProgress | None = None) -> Iterator[Any]:
    """Yields the elements of the array under a key of the file's outermost object.

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
