"""Reads ranges of tensors out of safetensors files, and counts every byte.

The format (a little-endian header length, a JSON header, then raw rows) is read here rather than through a library so
that reading one expert of a fused tensor reads its bytes only, on any file system. Nothing is unpickled.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from moe_serve.errors import ModelError

LARGEST_HEADER = 100 << 20  # bytes; the format's own limit

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored. start: its first byte, counted from the beginning of the file"""

    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class Checkpoint:
    """All safetensors files of a model folder. Close it, or use it in a `with`."""

    def __init__(self, folder: str | Path):
        """Reads the headers. Raises ModelError for missing, truncated or corrupt files, naming the file."""
        self.folder = Path(folder)
        self.bytes_read = 0  # of tensors; headers are not counted
        self._files: dict[Path, int] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for path in _files_of(self.folder):
            for name, tensor in read_header(path).items():
                if name in self.tensors:
                    raise ModelError(
                        f"tensor {name} is in {self.tensors[name].path.name} and {path.name}; remove one of them"
                    )
                self.tensors[name] = tensor

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

    def read(self, name: str, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Returns rows of a stored tensor, on the CPU and in its stored dtype; reads only their bytes.

        first_row, num_rows: along the first dimension; None: all
        Raises ModelError when the file is shorter than its header says.
        """
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype_name]
        shape, row_bytes = stored.shape, stored.num_bytes
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


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file. Raises ModelError, naming the file, when it is not a complete one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > min(size - 8, LARGEST_HEADER):
                raise ModelError(
                    f"{path}: is {size} bytes, which is not a complete safetensors file; download the file again"
                )
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        return {
            name: _stored(path, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); check the model folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: has a corrupt safetensors header ({error}); download the file again") from None


def _stored(path: Path, entry: Any, data_start: int, size: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = DTYPES.get(entry["dtype"])
    if not all(isinstance(n, int) and n >= 0 for n in (start, end, *shape)) or end < start:
        raise ValueError(f"offsets {start}..{end} of a tensor of shape {list(shape)}")
    if data_start + end > size:
        raise ModelError(f"{path}: is {size} bytes, its tensors need {data_start + end}; download the file again")
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"{end - start} bytes for {entry['dtype']} of shape {list(shape)}")
    return StoredTensor(path, str(entry["dtype"]), shape, data_start + start, end - start)


def _files_of(folder: Path) -> list[Path]:
    """Returns the files of a sharded or single-file checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: is not a safetensors index ({error}); download the file again") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: {', '.join(missing)} named by {index.name} are missing; download them")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: holds no *.safetensors; download the weights, or set model.load_format: dummy")
    return files
