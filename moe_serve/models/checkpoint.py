"""Reads the safetensors files of a model folder: their headers, and ranges of their tensors.

The format is a little-endian header length, a JSON header, then raw rows. It is read here rather than through a library
so that reading one expert of a fused tensor reads its bytes only, on any file system, and nothing is unpickled. The
folder may be hostile: an index names files of its own folder only, and no two tensors share bytes.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from moe_serve.errors import ModelError
from moe_serve.models.gguf_file import GGML_TYPES, gguf_files, header_and_size, read_gguf
from moe_serve.models.gguf_model import gguf_tensors
from moe_serve.models.model_files import read_bytes, regular_size, shown
from moe_serve.models.stored_tensor import StoredTensor

if TYPE_CHECKING:
    import torch

LARGEST_HEADER = 32 << 20  # bytes; the format allows 100 MB, the largest models need a few
INDEX = "model.safetensors.index.json"
_AGAIN = "download the file again"

DTYPES: Mapping[str, tuple[str, int]] = {  # by the names of the format: the name in torch, bytes of a number
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


# Dtypes of GGUF whose rows are blocks: numbers in a block, bytes of a block. gguf_blocks.py knows their contents.
BLOCK_DTYPES: Mapping[str, tuple[int, int]] = {
    name: (numbers, num_bytes) for name, numbers, num_bytes in GGML_TYPES.values() if numbers > 1
}


class Checkpoint:
    """All safetensors files of a model folder, or a GGUF file. Close it, or use it in a `with`."""

    def __init__(self, folder: str | Path):
        """Reads the headers. Raises ModelError for missing, truncated or corrupt files, naming the file."""
        self.folder = Path(folder)
        self.bytes_read = 0  # of tensors; headers are not counted
        self._files: dict[Path, int] = {}
        self.tensors = all_tensors(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, name: str, first_row: int = 0, num_rows: int | None = None) -> "torch.Tensor":
        """Reads rows of a stored tensor, and no other bytes: on the CPU, in the stored dtype.

        Rows of blocks are their bytes, [.., bytes of a row] uint8.

        first_row, num_rows: along the first dimension; None: all
        Raises ModelError when the file is shorter than its header says.
        """
        import torch

        stored = self.tensors[name]
        shape, row_bytes = stored.shape, stored.num_bytes
        if stored.dtype_name in BLOCK_DTYPES:
            numbers, num_bytes = BLOCK_DTYPES[stored.dtype_name]
            dtype, shape = torch.uint8, (*shape[:-1], shape[-1] // numbers * num_bytes)
        else:
            dtype = getattr(torch, DTYPES[stored.dtype_name][0])
        if num_rows is not None:
            row_bytes //= shape[0]
            shape = (num_rows, *shape[1:])
        buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        self._fill(stored, stored.start + first_row * row_bytes, memoryview(buffer.numpy().data))
        return buffer.view(dtype).view(shape)

    def _fill(self, stored: StoredTensor, offset: int, buffer: memoryview) -> None:
        descriptor = self._files.get(stored.path)
        if descriptor is None:
            descriptor = self._files[stored.path] = os.open(stored.path, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise ModelError(f"{stored.path}: ends in the middle of a tensor; download the file again")
            done += count
        self.bytes_read += done


def has_weights(folder: Path) -> bool:
    """Returns whether a model folder has files of weights; a GGUF file is one."""
    return folder.is_file() or any(folder.glob("*.safetensors"))


def all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of all files of a folder, or of a GGUF file, by the names of Hugging Face checkpoints.

    Raises ModelError for missing, truncated or corrupt files.
    """
    if folder.is_file():
        return gguf_tensors(read_gguf(folder))
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
    """Returns the header of a safetensors or GGUF file, without the first 8 bytes, and the file's size."""
    if path.suffix != ".safetensors":
        return header_and_size(path)
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
    known = DTYPES.get(dtype_name)
    if known is not None and math.prod(shape) * known[1] != end - start:
        raise ValueError(f"{end - start} bytes for {dtype_name} of shape {shape}")
    return StoredTensor(path, dtype_name[:20], tuple(shape), data_start + start, end - start)


def _check_no_overlap(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    in_order = sorted((each for each in tensors.items() if each[1].num_bytes), key=lambda each: each[1].start)
    for (name, tensor), (next_name, next_tensor) in pairwise(in_order):
        if tensor.start + tensor.num_bytes > next_tensor.start:
            names = f"{shown(name)[1:-1]} and {shown(next_name)[1:-1]}"
            raise ModelError(f"{path}: has a corrupt safetensors header ({names} share bytes); {_AGAIN}")


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a sharded or single-file checkpoint, and refuses a name that points out of the folder."""
    if folder.is_file():
        return gguf_files(folder)
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
