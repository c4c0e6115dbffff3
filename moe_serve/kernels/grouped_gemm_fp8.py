"""Grouped GEMM on FP8 experts as DeepSeek-V3 checkpoints carry them: e4m3 rows with a scale for every 1 x 128 values,
e4m3 weights with a scale for every 128 x 128 block. Sums are float32; each block of 128 is scaled before it is added.
"""

import torch
from torch import Tensor

from moe_serve.kernels.quantize import E4M3_MAX, GROUP, SMALLEST_AMAX, dequantize_reference, num_groups


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [groups, n, k] -> (q like it float8_e4m3fn, scale [groups, ceil(n / 128), ceil(k / 128)] float32)"""
    num_experts, n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.view(num_experts, num_groups(n), GROUP, num_groups(k), GROUP)
    amax = blocks.abs().amax((2, 4), keepdim=True).clamp(min=SMALLEST_AMAX)
    q = (blocks * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).view(padded.shape)[:, :n, :k]
    return q.contiguous().to(torch.float8_e4m3fn), (amax / E4M3_MAX)[:, :, 0, :, 0]


def dequantize_weight(q: Tensor, scale: Tensor) -> Tensor:
    """Returns [groups, n, k] float32 of what quantize_weight gave."""
    _, n, k = q.shape
    spread = scale.repeat_interleave(GROUP, 1)[:, :n].repeat_interleave(GROUP, 2)[:, :, :k]
    return q.float() * spread


def grouped_gemm_fp8_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor
) -> Tensor:
    """x: [rows, k] float8_e4m3fn, x_scale: [rows, ceil(k / 128)] float32, weight: [groups, n, k] float8_e4m3fn,
    weight_scale: [groups, ceil(n / 128), ceil(k / 128)] float32,
    rows_per_group: [groups] int64 -> [rows, n] bfloat16"""
    chunks = torch.split(dequantize_reference(x, x_scale, torch.float32), rows_per_group.tolist())
    wide = dequantize_weight(weight, weight_scale)
    return torch.cat([chunk @ w.T for chunk, w in zip(chunks, wide, strict=True)]).bfloat16()


def grouped_gemm_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor
) -> Tensor:
    """Same contract as the reference; Triton on CUDA (sm_89 and later: earlier GPUs have no e4m3)."""
    if x.is_cuda:
        from moe_serve.kernels.grouped_gemm_fp8_triton import grouped_gemm_fp8_triton

        return grouped_gemm_fp8_triton(x, x_scale, weight, weight_scale, rows_per_group)
    return grouped_gemm_fp8_reference(x, x_scale, weight, weight_scale, rows_per_group)
