"""Numbers of fewer bits: rows and weights in FP8, int8 and MXFP4, and their products."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import (
    E4M3_MAX,
    FP8_GROUP,
    MXFP4_BLOCK,
    SMALLEST_AMAX,
    BlockScaled,
    num_groups,
    num_scale_rows,
)
from moe_serve.kernels.grouped_gemm import grouped_gemm
from moe_serve.kernels.numerics import FAST, Numerics

# ---- Cached keys and values
# int8 or e4m3, with a float32 scale for each head of a slot, and for each part of a latent's row. scale = amax / most
# and q = x x (most / amax), each step rounded to float32, where most is 127 or 448 and amax the largest |x|, at least
# SMALLEST_CACHED. A scale is NaN where a number is not finite, so that what reads the row shows it.

CACHED_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: E4M3_MAX}
SMALLEST_CACHED = 1e-30


def quantise_cached(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [.., width] -> (q [.., width] of int8 or float8_e4m3fn, scale [..] float32)"""
    x, most = x.float(), CACHED_DTYPES[dtype]
    amax = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_CACHED)
    q = x * (most / amax)
    q = (q.round() if dtype == torch.int8 else q).nan_to_num(0.0).clamp(-most, most).to(dtype)
    return q, (amax / most + (x * 0).sum(-1, keepdim=True)).squeeze(-1)


def widen_cached(q: Tensor, scales: Tensor, latent: int | None = None) -> Tensor:
    """Returns cached rows in float32.

    q: [.., width];  scales: [.., 1], or [.., 2] of what comes before and after `latent`
    """
    wide = q.to(torch.float32)
    if scales.shape[-1] == 1:
        return wide * scales
    return torch.cat((wide[..., :latent] * scales[..., :1], wide[..., latent:] * scales[..., 1:]), dim=-1)


def write_cached(cache: Tensor, scales: Tensor | None, slots: Tensor, rows: Tensor, latent: int | None = None) -> None:
    """Writes rows [T, heads, width] to slots [T] of one layer's cache, -1 = the spare row.

    cache:  [slots, heads, width], of the rows' dtype, or of int8 or float8_e4m3fn with scales
    scales: [slots, heads, parts];  latent: where the second of two parts begins
    """
    if scales is None:
        cache.index_put_((slots,), rows)
        return
    parts = [rows] if scales.shape[2] == 1 else [rows[..., :latent], rows[..., latent:]]
    quantised = [quantise_cached(part, cache.dtype) for part in parts]
    # As bytes, since torch indexes no FP8.
    cache.view(torch.uint8).index_put_((slots,), torch.cat([q.view(torch.uint8) for q, _ in quantised], dim=-1))
    scales.index_put_((slots,), torch.stack([scale for _, scale in quantised], dim=-1))


# ---- FP8
# FP8: e4m3 rows with a float32 scale for every 128 values, as DeepSeek-V3 and DeepEP have them, and grouped GEMMs on
# e4m3 weights with a scale for every 128 x 128 block, as in DeepSeek-V3 checkpoints, or for every output channel.
#
# scale = amax / 448 and q = x x (1 / amax x 448), each step rounded to float32, where amax = max(|x|, 1e-4) over the
# 128 values: the largest becomes 448, the largest e4m3, and the clamp keeps a row of zeros from dividing by zero. A
# last group may be shorter than 128. Sums are float32; on a GPU each block of 128 is scaled before it is added, and
# the scales of channels multiply the sums.


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, width] -> (q [rows, width] float8_e4m3fn, scale [rows, num_groups(width)] float32)"""
    rows, width = x.shape
    groups = functional.pad(x.float(), (0, -width % FP8_GROUP)).view(rows, num_groups(width), FP8_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    q = (groups * (amax.reciprocal() * E4M3_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # uint8: copying a slice of float8 is not implemented everywhere
    q = q.view(torch.uint8).flatten(1)[:, :width].contiguous().view(torch.float8_e4m3fn)
    return q, (amax / E4M3_MAX).squeeze(-1)


def dequantize_reference(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q: [rows, width] float8_e4m3fn, scale: [rows, num_groups(width)] float32 -> [rows, width] dtype"""
    return (q.float() * scale.repeat_interleave(FP8_GROUP, dim=1)[:, : q.shape[1]]).to(dtype)


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


def quantize_weight(weight: Tensor, parts: int = 1, by_channel: bool = False) -> BlockScaled:
    """Returns weight [groups, n, k] in e4m3, the largest value of each block, or of each row, at 448."""
    groups, n, k = weight.shape
    if by_channel:
        amax = weight.float().abs().amax(2, keepdim=True).clamp(min=SMALLEST_AMAX)
        q = (weight * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX)
        return BlockScaled(q.to(torch.float8_e4m3fn), (amax / E4M3_MAX).squeeze(2), parts)
    height = n // parts
    stacks = weight.float().reshape(groups * parts, height, k)
    padded = functional.pad(stacks, (0, -k % FP8_GROUP, 0, -height % FP8_GROUP))
    blocks = padded.view(groups * parts, num_groups(height), FP8_GROUP, num_groups(k), FP8_GROUP)
    amax = blocks.abs().amax((2, 4), keepdim=True).clamp(min=SMALLEST_AMAX)
    q = (blocks * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).view(padded.shape)[:, :height, :k]
    scale = (amax / E4M3_MAX).view(groups, num_scale_rows(n, parts), num_groups(k))
    return BlockScaled(q.reshape(groups, n, k).to(torch.float8_e4m3fn), scale, parts)


def dequantize_weight(weight: BlockScaled) -> Tensor:
    """Returns the matrices [groups, n, k] in float32."""
    k = weight.q.shape[2]
    return weight.q.float() * _scale_of_rows(weight).repeat_interleave(FP8_GROUP, 2)[:, :, :k]


def grouped_gemm_fp8_reference(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x: [rows, k] float8_e4m3fn, x_scale: [rows, ceil(k / 128)] float32, weight: [groups, n, k],
    rows_per_group: [groups] int64 -> [rows, n] dtype"""
    chunks = torch.split(dequantize_reference(x, x_scale, torch.float32), rows_per_group.tolist())
    wide = dequantize_weight(weight)
    return torch.cat([chunk @ w.T for chunk, w in zip(chunks, wide, strict=True)]).to(dtype)


def grouped_gemm_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaled,
    rows_per_group: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as the reference; Triton on CUDA (sm_89 and later: earlier GPUs have no e4m3), where x may also be
    slabs [groups, capacity, k], of which only the first rows_per_group rows are filled, and `out` be given.

    In batch_invariant a row's bits depend on that row and its matrix only. CPUs have no e4m3 arithmetic: one matrix at
    a time is widened to float32, which costs about one pass over memory for each expert that has rows.
    """
    if x.is_cuda:
        from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton

        return grouped_gemm_fp8_triton(x, x_scale, weight, rows_per_group, dtype, numerics, out=out)
    rows = dequantize_reference(x, x_scale, torch.float32)
    out = torch.empty(x.shape[0], weight.q.shape[1], dtype=dtype, device=x.device)
    scale = _scale_of_rows(weight).transpose(1, 2).contiguous() * 256
    start = 0
    for group, num_rows in enumerate(rows_per_group.tolist()):
        if num_rows:
            end = start + num_rows
            matrix = _widened(weight.q[group], scale[group])
            out[start:end] = grouped_gemm(rows[start:end], matrix[None], torch.tensor([num_rows]), numerics)
            start = end
    return out


def gated_gemm_fp8(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor | None, numerics: Numerics = FAST
) -> tuple[Tensor, Tensor]:
    """Returns silu(gate) * up of the product of rows with gate above up, quantised from float32. On GPUs only.

    rows_per_group: None: all rows meet the one matrix

    x: [rows, k], or slabs [groups, capacity, k] of which only the first rows_per_group rows are filled, float8_e4m3fn;
    x_scale: [.., ceil(k / 128)] float32 -> (q [.., n / 2] float8_e4m3fn, scale [.., ceil(n / 2 / 128)] float32)
    """
    from moe_serve.kernels.triton.grouped_gemm import gated_gemm_fp8_triton

    return gated_gemm_fp8_triton(x, x_scale, weight, rows_per_group, numerics)


def _scale_of_rows(weight: BlockScaled) -> Tensor:
    """Returns [groups, n, ceil(k / 128)]: the scales of each row of the matrices."""
    groups, n, k = weight.q.shape
    if weight.by_channel:
        return weight.scale[..., None].expand(-1, -1, num_groups(k))
    height = n // weight.parts
    stacks = weight.scale.view(groups, weight.parts, num_groups(height), -1)
    return stacks.repeat_interleave(FP8_GROUP, 2)[:, :, :height].flatten(1, 2)


def _widened(q: Tensor, scale: Tensor) -> Tensor:
    """Returns q [n, k] times scale [ceil(k / 128), n] / 256 in float32, in the memory order of q."""
    wide = e4m3_over_256(q).float()
    for block, column_scale in zip(torch.split(wide.t(), FP8_GROUP), scale, strict=True):
        block *= column_scale
    return wide


# ---- int8
# Grouped GEMM on int8 experts, for CPUs: weights with one scale per output channel, rows with one scale each.
#
# Both are symmetric, q = round(x / scale) with scale = largest |x| / 127. Products are added in int32, which is
# exact, so a row's bits depend only on that row and its matrix, with any kernel. These are not the checkpoint's
# numbers: each weight and each activation is rounded to one of 255 steps.

LARGEST_INT8 = 127  # of both signs: -128 has no counterpart
SMALLEST_INT8_AMAX = 1e-30  # keeps a row of zeros from dividing by zero
RUN_ELEMENTS = 1 << 18  # sums that are scaled at once: 1 MiB of int32
MAX_K = (2**31 - 1) // LARGEST_INT8**2  # products of one sum that int32 holds


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
    scale = wide.abs().amax(-1).clamp_(min=SMALLEST_INT8_AMAX).div_(LARGEST_INT8)
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


# ---- MXFP4, in which gpt-oss stores its experts, read and written
# The microscaling format of OCP (arXiv:2310.10537).
#
# A row is cut into blocks of 32 values of four bits, e2m1: sign, two bits of exponent, one of mantissa. A block
# shares one scale, a power of two (e8m0). Two values lie in a byte, the first in its lower half. Every product of
# value and scale is a bfloat16, so nothing is rounded.

_MXFP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_VALUES = torch.tensor([*_MXFP4_POSITIVE, *(-value for value in _MXFP4_POSITIVE)], dtype=torch.bfloat16)
_CODES = torch.arange(256)
_MXFP4_OF_BYTE = torch.stack((_MXFP4_VALUES[_CODES & 15], _MXFP4_VALUES[_CODES >> 4]), dim=1)
_MXFP4_PAIRS = _MXFP4_OF_BYTE.view(torch.int32).flatten()
_MXFP4_ROWS = 64  # that are dequantised together
_MXFP4_BIAS = 127  # of the scales' exponents
_LARGEST_MXFP4 = 2  # exponent of the largest number, 6
_ROUND_UP_AT = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between positive numbers
_MXFP4_SCALES = torch.ldexp(torch.ones(256), (_CODES - _MXFP4_BIAS).int()).bfloat16()
_MXFP4_SCALES[255] = torch.nan


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the weight that blocks stand for, [n, k] bfloat16.

    blocks: [n, k / 32, 16] uint8;  scales: [n, k / 32] uint8, 255 = not a number
    """
    n, blocks_per_row, bytes_per_block = blocks.shape
    weight = torch.empty(n, blocks_per_row, 2 * bytes_per_block, dtype=torch.bfloat16)
    # Few rows at a time: torch looks up by whole numbers of four bytes, twice the memory of the weight for all rows.
    for first in range(0, n, _MXFP4_ROWS):
        rows = slice(first, first + _MXFP4_ROWS)
        pairs = _MXFP4_PAIRS[blocks[rows].int()].view(torch.bfloat16)
        torch.mul(pairs, _MXFP4_SCALES[scales[rows].int()][..., None], out=weight[rows])
    return weight.flatten(-2)


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight [n, k] float32 rounded to MXFP4: blocks [n, k / 32, 16] uint8, scales [n, k / 32] uint8.

    A block's scale is the power of two that brings its largest value to the exponent of the largest number, as in the
    specification; what is still larger becomes that number, and halfway goes towards zero. k is a multiple of 32.
    """
    rows = weight.reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    exponents = rows.abs().amax(-1).frexp().exponent.long() - 1 - _LARGEST_MXFP4 + _MXFP4_BIAS
    scales = exponents.clamp(0, 254)
    scaled = torch.ldexp(rows, (_MXFP4_BIAS - scales)[..., None])
    codes = torch.bucketize(scaled.abs(), _ROUND_UP_AT.to(weight.device)).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.to(torch.uint8)
