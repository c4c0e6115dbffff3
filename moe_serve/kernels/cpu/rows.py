"""Rows packed by slot and added up at the end by compiled kernels, as kernels/rows.py says, in float32."""

import functools
import struct

import torch
from torch import Tensor

from moe_serve.kernels.cpu import checks
from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library


def weighted_sum(rows: Tensor, index: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns sum over k, in order, of weights[t, k] * rows[index[t, k]], in `out` if given; all contiguous.

    rows: [num_rows, width], index: [T, topk] int64, -1 = nothing, weights: [T, topk] -> [T, width]
    """
    num_tokens, topk = index.shape
    out = rows.new_empty(num_tokens, rows.shape[1]) if out is None else out
    assert dense(rows, torch.float32), f"{rows.dtype}, strides {rows.stride()}"
    assert dense(index, torch.int64), f"index {index.dtype}, strides {index.stride()}"
    assert dense(weights, torch.float32, num_tokens, topk), f"weights {weights.dtype} {tuple(weights.shape)}"
    assert dense(out, torch.float32, num_tokens, rows.shape[1]), f"out {out.dtype} {tuple(out.shape)}"
    cpu_library().call.weighted_sum(
        rows.data_ptr(), rows.shape[1], index.data_ptr(), num_tokens, topk, weights.data_ptr(), out.data_ptr()
    )
    return out


def pack_rows(x: Tensor, ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (rows, counts [num_slots], index [T, topk]) and raises IndexError as kernels/rows.py does."""
    num_tokens, topk = ids.shape
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert dense(ids, torch.int64), f"ids {ids.dtype}, strides {ids.stride()}"
    rows = x.new_empty(num_tokens * topk, x.shape[1])
    counts, index = ids.new_empty(num_slots), ids.new_empty(num_tokens, topk)
    num_rows = cpu_library().call.pack_rows(
        x.data_ptr(), x.stride(0), x.shape[1], ids.data_ptr(), num_tokens, topk, num_slots, rows.data_ptr(),
        counts.data_ptr(), index.data_ptr(),
    )  # fmt: skip
    if num_rows < 0:
        raise IndexError(f"an id is below -1 or not below {num_slots}")
    return rows[:num_rows], counts, index


@functools.lru_cache
def float_bits(number: float) -> int:
    """Returns the bits of a float64: the kernels take integers only."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
