"""FP8: e4m3 rows with a float32 scale for every 128 values, as DeepSeek-V3 and DeepEP have them, and grouped GEMMs on
e4m3 weights with a scale for every 128 x 128 block, as in DeepSeek-V3 checkpoints, or for every output channel.

scale = amax / 448 and q = x x (1 / amax x 448), each step rounded to float32, where amax = max(|x|, 1e-4) over the 128
values: the largest becomes 448, the largest e4m3, and the clamp keeps a row of zeros from dividing by zero. A last
group may be shorter than 128. Sums are float32; on a GPU each block of 128 is scaled before it is added, and the scales
of channels multiply the sums.
"""

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import E4M3_MAX, FP8_GROUP, SMALLEST_AMAX, BlockScaled, num_groups, num_scale_rows
from moe_serve.kernels.grouped_gemm import grouped_gemm
from moe_serve.kernels.numerics import FAST, Numerics


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
    padded = torch.nn.functional.pad(stacks, (0, -k % FP8_GROUP, 0, -height % FP8_GROUP))
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
) -> Tensor:
    """Same contract as the reference; Triton on CUDA (sm_89 and later: earlier GPUs have no e4m3).

    In batch_invariant a row's bits depend on that row and its matrix only. CPUs have no e4m3 arithmetic: one matrix at
    a time is widened to float32, which costs about one pass over memory for each expert that has rows.
    """
    if x.is_cuda:
        from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton

        return grouped_gemm_fp8_triton(x, x_scale, weight, rows_per_group, dtype, numerics)
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


def slab_gemm_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaled,
    rows_per_slot: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST,
) -> Tensor:
    """x: [slots, capacity, k] float8_e4m3fn, x_scale: [slots, capacity, ceil(k / 128)] float32, rows_per_slot: [slots]
    int64 -> [slots, capacity, n] dtype; rows beyond a slot's count are undefined. On GPUs only: a CPU packs its rows.
    """
    from moe_serve.kernels.triton.grouped_gemm import slab_gemm_fp8_triton

    return slab_gemm_fp8_triton(x, x_scale, weight, rows_per_slot, dtype, numerics)


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
