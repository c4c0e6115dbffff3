# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/quantised.py's FP8 rows. A program takes one row and some of its groups, each read once."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import FP8_GROUP, num_groups
from moe_serve.kernels.triton.mode import as_dtype, as_e4m3

GROUPS_PER_PROGRAM = 16  # 2048 values: 16 bf16 values (two 16-byte loads) for each of 128 threads


def quantize_triton(x: Tensor, rows_per_slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as quantize_reference. Rows may be strided; values of a row are contiguous.

    x may be contiguous slabs [slots, capacity, width] with rows_per_slot [slots] int64 on the device: rows beyond a
    slot's count are neither read nor written.
    """
    *shape, width = x.shape
    q = torch.empty(*shape, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*shape, num_groups(width), dtype=torch.float32, device=x.device)
    if q.numel():
        grid = (math.prod(shape), triton.cdiv(num_groups(width), GROUPS_PER_PROGRAM))
        capacity = 0 if rows_per_slot is None else shape[1]
        quantize_kernel[grid](
            x, rows_per_slot, q, scale, x.stride(-2), width, scale.shape[-1], capacity,
            SLABS=rows_per_slot is not None, GROUPS=GROUPS_PER_PROGRAM, GROUP=FP8_GROUP,
        )  # fmt: skip
    return q, scale


def dequantize_triton(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Same contract as dequantize_reference; q and scale contiguous."""
    rows, width = q.shape
    x = torch.empty(rows, width, dtype=dtype, device=q.device)
    if rows:
        grid = (rows, triton.cdiv(num_groups(width), GROUPS_PER_PROGRAM))
        dequantize_kernel[grid](q, scale, x, width, scale.shape[1], GROUPS_PER_PROGRAM, FP8_GROUP)
    return x


@triton.jit
def quantize_groups(x):
    """x: [groups, 128] float32 -> (e4m3 [groups, 128], scale [groups] float32), as all FP8 values are rounded."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    # The reference's steps and roundings: bf16 inputs often lie half-way between two e4m3 values, where one bit of the
    # factor decides.
    factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), amax) * 448.0
    q = tl.minimum(tl.maximum(x * factor[:, None], -448.0), 448.0)
    return as_e4m3(q), tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))


@triton.jit
def quantize_kernel(
    x, rows_per_slot, q, scale, x_stride, width, num_groups, capacity,
    SLABS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    filled = True
    if SLABS:
        filled = row % capacity < tl.load(rows_per_slot + row // capacity)
    if filled:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = column < width
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        quantized, scales = quantize_groups(values)
        tl.store(q + row * width + column, quantized, mask=inside)
        tl.store(scale + row * num_groups + group, scales, mask=group < num_groups)


@triton.jit
def dequantize_kernel(q, scale, x, width, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    values = tl.load(q + row * width + column, mask=inside).to(tl.float32)
    scales = tl.load(scale + row * num_groups + group, mask=group < num_groups, other=0.0)
    tl.store(x + row * width + column, as_dtype(values * scales[:, None], x.dtype.element_ty), mask=inside)
