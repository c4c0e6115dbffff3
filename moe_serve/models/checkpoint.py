"""Reads ranges of tensors out of safetensors files, and counts every byte.

The format is read here rather than through a library so that reading one expert of a fused tensor reads its bytes
only, on any file system. Nothing is unpickled.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from moe_serve.errors import ModelError
from moe_serve.models.safetensors_header import StoredTensor, all_tensors

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


class Checkpoint:
    """All safetensors files of a model folder. Close it, or use it in a `with`."""

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
