"""One GEMM per group of rows, each with its own weight: the experts' matrix products, packed and in slabs.

Weights are [groups, n, k] whatever their memory order; k-major ones (kernels/row_gemm.py) are served fastest on CPU.
"""

import torch
from torch import Tensor

from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.row_gemm import is_k_major, row_gemm
from moe_serve.kernels.row_tiles import cut

# Rows per active group up to which reading the weights in order beats BLAS. Measured with hidden 512, width 256: the
# two meet at 7 rows on one thread and at 15 on two, where BLAS gains less.
ROW_GEMM_UP_TO = 7


def grouped_gemm_reference(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """x: [rows, k], weight: [groups, n, k], rows_per_group: [groups] int64 CPU, summing to rows -> [rows, n]"""
    chunks = torch.split(x, rows_per_group.tolist())
    return torch.cat([c.float() @ w.float().T for c, w in zip(chunks, weight, strict=True)]).to(x.dtype)


def grouped_gemm(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST) -> Tensor:
    """Same contract as the reference. In batch_invariant a row's bits depend on that row and its weight only."""
    if x.device.type != "cpu":
        return (
            _by_library(x, weight, rows_per_group)
            if not numerics.invariant
            else _by_tiles(x, weight, rows_per_group, numerics)
        )
    if is_k_major(weight):
        few = ROW_GEMM_UP_TO * min(2, torch.get_num_threads())
        if numerics.invariant or x.shape[0] <= few * int(torch.count_nonzero(rows_per_group)):
            groups = torch.arange(weight.shape[0]).repeat_interleave(rows_per_group, output_size=x.shape[0])
            return row_gemm(x, weight, groups)
        return _by_group(x, weight, rows_per_group)
    if numerics.invariant:
        return _by_tiles(x, weight, rows_per_group, numerics)
    return _by_group(x, weight, rows_per_group)


def slab_gemm_reference(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """x: [groups, capacity, k], weight: [groups, n, k], rows_per_group: [groups] int64 -> [groups, capacity, n].

    Rows beyond a group's count are undefined, before and after.
    """
    return torch.einsum("gck,gnk->gcn", x.float(), weight.float()).to(x.dtype)


def slab_gemm(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST) -> Tensor:
    """Same contract as the reference; sizes are static, nothing is read back, so it can be captured in a graph."""
    if x.device.type == "cpu":
        out = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
        filled = torch.arange(x.shape[1]) < rows_per_group[:, None]
        out[filled] = grouped_gemm(x[filled], weight, rows_per_group, numerics)
        return out
    if not numerics.invariant:
        return torch.bmm(x, weight.transpose(1, 2))
    tile = numerics.row_tile or 1
    padding = -x.shape[1] % tile
    padded = torch.nn.functional.pad(x, (0, 0, 0, padding))
    tiles = [torch.bmm(part, weight.transpose(1, 2)) for part in torch.split(padded, tile, dim=1)]
    return torch.cat(tiles, dim=1)[:, : x.shape[1]] if tiles else x.new_empty(*x.shape[:2], weight.shape[1])


def _by_group(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """One BLAS call for each group that has rows."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for group, num_rows in enumerate(rows_per_group.tolist()):
        if num_rows:
            end = start + num_rows
            torch.mm(x[start:end], weight[group].t(), out=out[start:end])
            start = end
    return out


def _by_tiles(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics) -> Tensor:
    """Calls of exactly row_tile rows, each group padded to whole tiles."""
    tile = numerics.row_tile or 1
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for group, num_rows in enumerate(rows_per_group.tolist()):
        rows = torch.nn.functional.pad(x[start : start + num_rows], (0, 0, 0, -num_rows % tile))
        for first, last in cut(rows.shape[0], (tile,)):
            kept = min(last, num_rows) - first
            out[start + first : start + first + kept] = (rows[first:last] @ weight[group].t())[:kept]
        start += num_rows
    return out


def _by_library(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """torch's grouped GEMM, where the dtype has one."""
    if x.dtype != torch.bfloat16:
        return _by_group(x, weight, rows_per_group)
    ends = rows_per_group.cumsum(0).to(device=x.device, dtype=torch.int32)
    out: Tensor = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return out
