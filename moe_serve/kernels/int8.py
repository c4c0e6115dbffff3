"""Grouped GEMM on int8 experts, for CPUs: weights with one scale per output channel, rows with one scale each.

Both are symmetric, q = round(x / scale) with scale = largest |x| / 127. Products are added in int32, which is exact, so
a row's bits depend only on that row and its matrix, with any kernel. These are not the checkpoint's numbers: each
weight and each activation is rounded to one of 255 steps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 127  # of both signs: -128 has no counterpart
SMALLEST_AMAX = 1e-30  # keeps a row of zeros from dividing by zero
RUN_ELEMENTS = 1 << 18  # sums that are scaled at once: 1 MiB of int32
MAX_K = (2**31 - 1) // LARGEST**2  # products of one sum that int32 holds


def has_vnni() -> bool:
    """Returns whether torch finds AVX-512 VNNI on this CPU, which adds int8 products directly in int32.

    Without it products are added in int16, which saturates and so gives wrong numbers.
    """
    supported: bool = torch.cpu._is_vnni_supported()
    return supported


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each row of x [.., k]: activations, or a weight [.., n, k], whose rows are output channels.

    Returns (q [.., k] int8, scale [..] float32).
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_(min=SMALLEST_AMAX).div_(LARGEST)
    return (wide / scale[..., None]).round_().to(torch.int8), scale


def grouped_gemm_int8_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor, dtype: torch.dtype
) -> Tensor:
    """x: [rows, k] int8, x_scale: [rows] float32, weight: [groups, n, k] int8, weight_scale: [groups, n] float32,
    rows_per_group: [groups] int64 CPU, summing to rows -> [rows, n] dtype"""
    chunks = torch.split(x.long(), rows_per_group.tolist())
    sums = torch.cat([chunk @ w.long().T for chunk, w in zip(chunks, weight, strict=True)])
    scales = torch.repeat_interleave(weight_scale, rows_per_group, 0)
    return (sums.float() * x_scale[:, None] * scales).to(dtype)


def grouped_gemm_int8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor, dtype: torch.dtype
) -> Tensor:
    """Same contract as the reference, and the same bits; one VNNI GEMM for each group that has rows."""
    assert x.shape[1] <= MAX_K, f"sums of {x.shape[1]} int8 products may leave int32"
    out = torch.empty(x.shape[0], weight.shape[1], dtype=dtype)
    for groups, rows in _runs(rows_per_group.tolist(), max(1, RUN_ELEMENTS // max(1, weight.shape[1]))):
        counts = rows_per_group[groups]
        sums = _sums(x[rows], weight[groups], counts.tolist())
        scales = torch.repeat_interleave(weight_scale[groups], counts, 0, output_size=len(sums))
        out[rows] = sums.float().mul_(x_scale[rows, None]).mul_(scales)
    return out


def _sums(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Returns [rows, n] int32, the products of each group's rows."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=torch.int32)
    matrices, sizes = weight.transpose(1, 2), [count for count in counts if count]
    busy = (group for group, count in enumerate(counts) if count)
    for group, rows, sums in zip(busy, torch.split(x, sizes), torch.split(out, sizes), strict=True):
        torch._int_mm(rows, matrices[group], out=sums)
    return out


def _runs(counts: list[int], most_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yields (groups, their rows) that are scaled together: about most_rows, and at least one group with rows.

    With few rows, scaling each group would cost as much as its product; with many, the sums of all groups would not fit
    the processor's cache.
    """
    group = row = num_rows = 0
    for end, count in enumerate(counts, 1):
        num_rows += count
        if num_rows >= most_rows or (num_rows and end == len(counts)):
            yield slice(group, end), slice(row, row + num_rows)
            group, row, num_rows = end, row + num_rows, 0
