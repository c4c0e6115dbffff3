"""Launches of every kernel at production sizes, with tensors that have shapes but no memory: for compiling only.

Each function is one launch (or a few that belong together) of DeepSeek-V3's shape; capability is 80, 90 or 100.
"""

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, TOKENS, TOPK, EXPERTS = 7168, 2048, 128, 8, 36
FP8 = torch.float8_e4m3fn


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def quantize(capability: int) -> None:
    from moe_serve.kernels.quantize_triton import dequantize_triton, quantize_triton

    quantize_triton(some(TOKENS, HIDDEN))
    dequantize_triton(some(TOKENS, HIDDEN, dtype=FP8), some(TOKENS, HIDDEN // 128, dtype=torch.float32), torch.bfloat16)


def packed_gemm_few_rows(capability: int) -> None:
    _packed_gemm(capability, 20)


def packed_gemm_some_rows(capability: int) -> None:
    _packed_gemm(capability, 64)


def packed_gemm_many_rows(capability: int) -> None:
    _packed_gemm(capability, 4096)


def _packed_gemm(capability: int, rows: int) -> None:
    from moe_serve.kernels.grouped_gemm_triton import grouped_gemm_triton

    counts = some(8, dtype=torch.int64)
    grouped_gemm_triton(some(8 * rows, HIDDEN), some(8, 4096, HIDDEN), counts, described=capability >= 90)


def slab_gemm(capability: int) -> None:
    from moe_serve.kernels.grouped_gemm_triton import slab_gemm_triton

    counts = some(EXPERTS, dtype=torch.int64)
    slab_gemm_triton(some(EXPERTS, 1024, HIDDEN), some(EXPERTS, 4096, HIDDEN), counts, described=capability >= 90)
