"""FP8 rows: e4m3 with one float32 scale for every 128 values of a row, as DeepSeek-V3 and DeepEP have them.

scale = amax / 448 and q = x x (1 / amax x 448), each step rounded to float32, where amax = max(|x|, 1e-4) over the 128
values: the largest becomes 448, the largest e4m3, and the clamp keeps a row of zeros from dividing by zero. A last
group may be shorter than 128.
"""

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.block_scales import E4M3_MAX, SMALLEST_AMAX, num_groups
from moe_serve.kernels.fp8_block import GROUP


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, width] -> (q [rows, width] float8_e4m3fn, scale [rows, num_groups(width)] float32)"""
    rows, width = x.shape
    groups = functional.pad(x.float(), (0, -width % GROUP)).view(rows, num_groups(width), GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    q = (groups * (amax.reciprocal() * E4M3_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # uint8: copying a slice of float8 is not implemented everywhere
    q = q.view(torch.uint8).flatten(1)[:, :width].contiguous().view(torch.float8_e4m3fn)
    return q, (amax / E4M3_MAX).squeeze(-1)


def dequantize_reference(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q: [rows, width] float8_e4m3fn, scale: [rows, num_groups(width)] float32 -> [rows, width] dtype"""
    return (q.float() * scale.repeat_interleave(GROUP, dim=1)[:, : q.shape[1]]).to(dtype)


def quantize(x: Tensor, rows_per_slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA.

    On CUDA x may also be slabs [slots, capacity, width], of which only the first rows_per_slot [slots] rows are filled.
    """
    if x.is_cuda:
        from moe_serve.kernels.triton.quantize import quantize_triton

        return quantize_triton(x, rows_per_slot)
    return quantize_reference(x)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Same contract as the reference; Triton on CUDA."""
    if q.is_cuda:
        from moe_serve.kernels.triton.quantize import dequantize_triton

        return dequantize_triton(q, scale, dtype)
    return dequantize_reference(q, scale, dtype)


def e4m3_over_256(q: Tensor) -> Tensor:
    """Returns q / 256 in float16 for q float8_e4m3fn of any shape and memory order: exact, but NaN becomes 480 / 256.

    e4m3 is a float16 whose exponent is smaller by 8 and whose mantissa is shorter, so this only moves bits; q.half()
    converts one value at a time on CPU and takes about ten times as long.
    """
    bits = q.view(torch.int8).to(torch.int16)  # extends the sign
    bits <<= 7
    bits &= ~0x4000  # the sign's copy above the exponent
    return bits.view(torch.float16)
