"""Finds the safetensors files of a model folder and reads their headers. Torch-free.

The format is a little-endian header length, a JSON header, then raw rows. A folder may come from a stranger: an index
names files of its own folder only, and no two tensors share bytes.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.model_files import read_bytes, regular_size, shown

LARGEST_HEADER = 32 << 20  # bytes; the format allows 100 MB, the largest models need a few
INDEX = "model.safetensors.index.json"
_AGAIN = "download the file again"

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored. start: its first byte, counted from the beginning of the file"""

    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of all files of a folder. Raises ModelError for missing, truncated or corrupt files."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ModelError(
                    f"tensor {shown(name)[1:-1]} is in {tensors[name].path.name} and {path.name}; remove one of them"
                )
            tensors[name] = tensor
    return tensors


def header_bytes(path: Path) -> tuple[bytes, int]:
    """Returns the header of a safetensors file as it is stored, and the file's size."""
    try:
        size = regular_size(path, "check the model folder")
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > size - 8:
                raise ModelError(f"{path}: is {size} bytes, which is not a complete safetensors file; {_AGAIN}")
            if length > LARGEST_HEADER:
                raise ModelError(
                    f"{path}: has a corrupt safetensors header ({length} bytes, at most {LARGEST_HEADER}); {_AGAIN}"
                )
            return file.read(length), size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); check the model folder") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file. Raises ModelError, naming the file, when it is not a complete one."""
    data, size = header_bytes(path)
    try:
        header = json.loads(data)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        tensors = {name: _stored(path, entry, 8 + len(data), size) for name, entry in entries}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: has a corrupt safetensors header ({str(error)[:200]}); {_AGAIN}") from None
    _check_no_overlap(path, tensors)
    return tensors


def _stored(path: Path, entry: Any, data_start: int, size: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape, dtype_name = entry["shape"], entry["dtype"]
    numbers = (start, end, *shape)
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or end < start:
        raise ValueError(f"offsets {shown(start)}..{shown(end)} of a tensor of shape {shown(shape)}")
    if not isinstance(dtype_name, str):
        raise TypeError(f"a dtype {shown(dtype_name)}")
    if data_start + end > size:
        raise ModelError(f"{path}: is {size} bytes, its tensors need {data_start + end}; {_AGAIN}")
    item_bytes = ITEM_BYTES.get(dtype_name)
    if item_bytes is not None and math.prod(shape) * item_bytes != end - start:
        raise ValueError(f"{end - start} bytes for {dtype_name} of shape {shape}")
    return StoredTensor(path, dtype_name[:20], tuple(shape), data_start + start, end - start)


def _check_no_overlap(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    in_order = sorted((each for each in tensors.items() if each[1].num_bytes), key=lambda each: each[1].start)
    for (name, tensor), (next_name, next_tensor) in pairwise(in_order):
        if tensor.start + tensor.num_bytes > next_tensor.start:
            names = f"{shown(name)[1:-1]} and {shown(next_name)[1:-1]}"
            raise ModelError(f"{path}: has a corrupt safetensors header ({names} share bytes); {_AGAIN}")


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a sharded or single-file checkpoint; a name that points out of the folder is refused."""
    index = folder / INDEX
    if index.exists():
        names = sorted(_names_in(index))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            more = ", .." if len(missing) > 8 else ""
            raise ModelError(f"{folder}: {', '.join(missing[:8])}{more} named by {INDEX} are missing; download them")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: holds no *.safetensors; download the weights, or set model.load_format: dummy")
    return files


def _names_in(index: Path) -> Iterator[str]:
    try:
        values = json.loads(read_bytes(index, _AGAIN))["weight_map"].values()
        names = set(values)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: is not a safetensors index ({str(error)[:200]}); {_AGAIN}") from None
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: names {shown(name)}, which is not a *.safetensors file of its own folder; {_AGAIN}"
            )
        yield name
