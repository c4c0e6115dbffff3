"""Reads the small files of a model folder, whoever wrote them: regular files only, of a bounded size.

The folder may be hostile. A pipe in place of a file would hang a reader, a sparse file would fill its memory,
and deeply nested JSON would end it; each is one ModelError instead.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError

LARGEST_JSON = 64 << 20  # bytes of config.json, an index, tokenizer_config.json; real ones have at most a few MB
_SHOWN = 80  # characters of a value in a message


def read_bytes(path: Path, fix: str, largest: int = LARGEST_JSON) -> bytes:
    """Returns the contents of a file. Raises ModelError, with the fix, where it is no regular file or is too large."""
    try:
        size = regular_size(path, fix)
        if size > largest:
            raise ModelError(f"{path}: is {size} bytes, more than the {largest} that are read; {fix}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {fix}") from None


def regular_size(path: Path, fix: str) -> int:
    """Returns the bytes of a file. Raises ModelError for a pipe, a device or a folder, and OSError where nothing is."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file; {fix}")
    if not os.access(path, os.R_OK):
        raise ModelError(f"{path}: cannot be read (Permission denied); {fix}")
    return status.st_size


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelError, with the fix, when there is none."""
    return parse_object(read_bytes(path, fix), str(path), fix)


def parse_object(data: bytes, where: str, fix: str) -> dict[str, Any]:
    """Returns the object that JSON text holds. Raises ModelError, naming `where`, when it holds none."""
    try:
        values = json.loads(data)
    except RecursionError:
        raise ModelError(f"{where}: is nested too deeply to be read; {fix}") from None
    except ValueError as error:
        raise ModelError(f"{where}: is not valid JSON ({str(error)[:_SHOWN]}); {fix}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{where}: holds a {type(values).__name__}, expected an object; {fix}")
    return values


def shown(value: object) -> str:
    """Returns a value of a file for a message: on one line, and cut where it is long."""
    if isinstance(value, list | dict) and len(value) > _SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"
