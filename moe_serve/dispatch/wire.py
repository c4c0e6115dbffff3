"""How a row looks on the wire: codecs between compute dtype and bytes, above every transport.

Transports carry uint8 rows of a fixed size, so each of them carries each wire dtype. Every row goes through the codec,
also the one that stays on its rank: results do not depend on where an expert lives.

fp8 is DeepSeek's recipe for the way out: blocks of 128 channels share a float32 scale, amax / 448 with amax at least
1e-4, values are e4m3. Results come home in bf16, as they do there: they are partial sums, and fp8 would lose them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.errors import ConfigError

FP8_BLOCK = 128  # channels that share a scale
FP8_MAX = 448.0  # largest e4m3 value
AMAX_FLOOR = 1e-4  # keeps the scale of an all-zero block finite


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
    """The codecs of the two ways: out to the experts, and home."""

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
        return hidden + 4 * _num_blocks(hidden)

    def encode(self, rows: Tensor) -> Tensor:
        values, scales = quantise_fp8(rows)
        return torch.cat([_bytes(values), _bytes(scales)], dim=1)

    def decode(self, data: Tensor, hidden: int) -> Tensor:
        values = data[:, :hidden].view(torch.float8_e4m3fn)
        # A copy even of a single row, which is contiguous as it is, but may begin at an odd address.
        scales = data[:, hidden:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return dequantise_fp8(values, scales, self._compute)


def quantise_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [n, hidden] float8_e4m3fn and scales [n, ceil(hidden / 128)] float32: rows ~ values x scale."""
    num_rows, hidden = rows.shape
    padded = torch.nn.functional.pad(rows.float(), (0, -hidden % FP8_BLOCK))
    blocks = padded.view(num_rows, _num_blocks(hidden), FP8_BLOCK)
    amax = blocks.abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    # Rounding of the factor may lift a block's largest value a hair above 448, where the cast has no room.
    scaled = (blocks * (FP8_MAX / amax)[:, :, None]).clamp(-FP8_MAX, FP8_MAX)
    values = scaled.to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous()
    return values, amax / FP8_MAX


def dequantise_fp8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values [n, hidden] x scales [n, ceil(hidden / 128)], as dtype."""
    hidden = values.shape[1]
    spread = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :hidden]
    return (values.float() * spread).to(dtype)


def _bytes(rows: Tensor) -> Tensor:
    """Returns the bytes of rows [n, width], a view where they are contiguous: [n, width x itemsize] uint8."""
    rows = rows.contiguous()
    if rows.stride(1) != 1:  # a width of one may come with any stride, and view() minds
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    return rows.view(torch.uint8)


def _num_blocks(hidden: int) -> int:
    return -(-hidden // FP8_BLOCK)


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
