"""The form of a row on the wire: codecs between compute dtype and bytes, above every transport.

Transports carry uint8 rows of a fixed size, so each of them carries each wire dtype. Every row goes through the codec,
also the one that stays on its rank: results do not depend on where an expert lives.

fp8 is DeepSeek's recipe for dispatch (kernels/quantised.py): groups of 128 channels share a float32 scale. Results are
sent back in bf16, as DeepSeek does, since fp8 would be too coarse for partial sums.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.errors import ConfigError
from moe_serve.kernels.forms import num_groups
from moe_serve.kernels.quantised import dequantize, quantize


class Codec(Protocol):
    """Turns rows into bytes and back."""

    is_identity: bool
    """Whether the bytes of a row are the row itself."""

    def row_bytes(self, hidden: int) -> int:
        """Returns the size of one encoded row."""
        ...

    def encode(self, rows: Tensor) -> Tensor:
        """rows: [n, hidden] compute dtype -> [n, row_bytes] uint8; may be a view of rows"""
        ...

    def decode(self, data: Tensor, hidden: int) -> Tensor:
        """data: [n, row_bytes] uint8 -> [n, hidden] compute dtype; may be a view of data"""
        ...


@dataclass(frozen=True)
class Wire:
    """The codecs of the two directions."""

    dispatch: Codec
    combine: Codec


class CastCodec:
    """Sends rows as another float dtype, or as they are."""

    def __init__(self, wire_dtype: torch.dtype, compute_dtype: torch.dtype):
        self._wire = wire_dtype
        self._compute = compute_dtype
        self.is_identity = wire_dtype == compute_dtype

    def row_bytes(self, hidden: int) -> int:
        return hidden * self._wire.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        return _bytes(rows.to(self._wire))

    def decode(self, data: Tensor, hidden: int) -> Tensor:
        return data.view(self._wire).to(self._compute)


class Fp8Codec:
    """Sends e4m3 values, and behind them the float32 scales of their blocks; a ragged last block has its own scale."""

    is_identity = False

    def __init__(self, compute_dtype: torch.dtype):
        self._compute = compute_dtype

    def row_bytes(self, hidden: int) -> int:
        return hidden + 4 * num_groups(hidden)

    def encode(self, rows: Tensor) -> Tensor:
        values, scales = quantize(rows)
        return torch.cat([_bytes(values), _bytes(scales)], dim=1)

    def take(self, data: Tensor, hidden: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows `index` as they are: values [n, hidden] float8_e4m3fn, scales [n, blocks] float32."""
        values, scales = (part.index_select(0, index) for part in data.tensor_split((hidden,), dim=1))
        return values.view(torch.float8_e4m3fn), scales.view(torch.float32)

    def decode(self, data: Tensor, hidden: int) -> Tensor:
        values = data[:, :hidden].contiguous().view(torch.float8_e4m3fn)
        # A copy even of a single row, which is contiguous as it is, but may begin at an odd address.
        scales = data[:, hidden:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return dequantize(values, scales, self._compute)


def _bytes(rows: Tensor) -> Tensor:
    """Returns the bytes of rows [n, width], a view where they are contiguous: [n, width x itemsize] uint8."""
    rows = rows.contiguous()
    if rows.stride(1) != 1:  # a width of one may come with any stride, and view() minds
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    return rows.view(torch.uint8)


def make_wire(wire_dtype: str, compute_dtype: torch.dtype) -> Wire:
    """Returns the codecs of a wire dtype: "auto" (the compute dtype), "float32", "bf16" or "fp8"."""
    match wire_dtype:
        case "auto":
            codec = CastCodec(compute_dtype, compute_dtype)
        case "float32":
            codec = CastCodec(torch.float32, compute_dtype)
        case "bf16":
            codec = CastCodec(torch.bfloat16, compute_dtype)
        case "fp8":
            return Wire(Fp8Codec(compute_dtype), CastCodec(torch.bfloat16, compute_dtype))
        case _:
            raise ConfigError(f"dispatch.wire_dtype is {wire_dtype!r}; choose one of auto, float32, bf16, fp8")
    return Wire(codec, codec)
