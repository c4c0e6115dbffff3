# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of weighted_sum of kernels/rows.py, bound by memory: every row is read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.triton.mode import as_dtype, multiply_add

BLOCK = 1024  # channels of one program: 8 for each of 128 threads, one 16-byte access


def weighted_sum_triton(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Same contract as weighted_sum_reference: rows [num_rows, hidden], index and weights [tokens, topk]."""
    num_tokens, topk = index.shape
    out = torch.empty(num_tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(rows.shape[1], BLOCK))
        weighted_sum_kernel[grid](rows, index, weights, out, rows.shape[1], TOPK=topk, BLOCK=BLOCK)
    return out


@triton.jit
def weighted_sum_kernel(rows, index, weights, out, width, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(index + token * TOPK + k)
        inside = column < tl.where(row >= 0, width, 0)
        values = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        added = multiply_add(tl.load(weights + token * TOPK + k), values, total)
        total = tl.where(row >= 0, added, total)  # the weight of a -1 entry may be anything
    tl.store(out + token * width + column, as_dtype(total, out.dtype.element_ty), mask=column < width)
