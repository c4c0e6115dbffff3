"""One GEMM per group of rows, each with its own weight: the experts' matrix products, packed and in slabs.

Weights are [groups, n, k] in any memory order; k-major ones (kernels/row_gemm.py) are fastest on CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.row_gemm import is_k_major, row_gemm

# Rows per active group up to which reading the weights in order beats BLAS. Measured with hidden 512, width 256: the
# two meet at 7 rows on one thread and at 15 on two, where BLAS gains less.
ROW_GEMM_UP_TO = 7


def grouped_gemm_reference(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """x: [rows, k], weight: [groups, n, k], rows_per_group: [groups] int64 CPU, summing to rows -> [rows, n]"""
    chunks = torch.split(x, rows_per_group.tolist())
    return torch.cat([c.float() @ w.float().T for c, w in zip(chunks, weight, strict=True)]).to(x.dtype)


def grouped_gemm(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST) -> Tensor:
    """Same contract as the reference. In batch_invariant a row's bits depend on that row and its weight only."""
    return group_rows(rows_per_group, x, numerics).gemm(x, weight)


@dataclass(frozen=True)
class GroupedRows:
    """The groups of some rows and the choice of GEMM for them, computed once for several weights."""

    rows_per_group: Tensor  # [groups] int64 CPU
    numerics: Numerics
    group_of_row: Tensor | None  # [rows] int64; None: too many rows for a GEMM by row

    def gemm(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns [rows, n] of x [rows, k] and weight [groups, n, k]. BLAS by group writes to `out`."""
        if self.group_of_row is not None:
            if is_k_major(weight):
                return row_gemm(x, weight, self.group_of_row)
            if self.numerics.invariant:
                # Not by BLAS tiles: on some CPUs the bits of a row depend on its position in a tile of two.
                return row_gemm(x, weight.transpose(1, 2).contiguous().transpose(1, 2), self.group_of_row)
        if x.is_cuda and x.dtype == torch.bfloat16 and weight.is_contiguous():
            from moe_serve.kernels.gemm_choice import packed_gemm_on_gpu

            return packed_gemm_on_gpu(x, weight, self.rows_per_group, self.numerics)
        if self.numerics.invariant:
            return _by_tiles(x, weight, self.rows_per_group, self.numerics)
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = self.rows_per_group.cumsum(0).to(device=x.device, dtype=torch.int32)
            product: Tensor = functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
            return product
        return _by_group(x, weight, self.rows_per_group, out)


def group_rows(rows_per_group: Tensor, x: Tensor, numerics: Numerics = FAST) -> GroupedRows:
    """Returns the groups of the rows x [rows, ..]. rows_per_group: [groups] int64 CPU, summing to rows"""
    num_rows = x.shape[0]
    if x.device.type != "cpu" or not (numerics.invariant or _few(rows_per_group, num_rows)):
        return GroupedRows(rows_per_group, numerics, None)
    groups = torch.repeat_interleave(rows_per_group, output_size=num_rows)  # group i, rows_per_group[i] times
    return GroupedRows(rows_per_group, numerics, groups)


def _few(rows_per_group: Tensor, num_rows: int) -> bool:
    limit = ROW_GEMM_UP_TO * min(2, torch.get_num_threads())
    return num_rows <= limit or num_rows <= limit * int(torch.count_nonzero(rows_per_group))


def slab_gemm_reference(x: Tensor, weight: Tensor, rows_per_group: Tensor) -> Tensor:
    """x: [groups, capacity, k], weight: [groups, n, k], rows_per_group: [groups] int64 -> [groups, capacity, n].

    Rows beyond a group's count are undefined, before and after.
    """
    return torch.einsum("gck,gnk->gcn", x.float(), weight.float()).to(x.dtype)


def slab_gemm(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST) -> Tensor:
    """Same contract as the reference. On an accelerator sizes are static and the host reads nothing back."""
    if x.device.type == "cpu":
        out = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
        filled = torch.arange(x.shape[1]) < rows_per_group[:, None]
        out[filled] = grouped_gemm(x[filled], weight, rows_per_group, numerics)
        return out
    if x.is_cuda and x.dtype == torch.bfloat16 and weight.is_contiguous():
        from moe_serve.kernels.gemm_choice import slab_gemm_on_gpu

        return slab_gemm_on_gpu(x, weight, rows_per_group, numerics)
    capacity = x.shape[1]
    tile = numerics.row_tile or max(capacity, 1)
    tiles = torch.split(functional.pad(x, (0, 0, 0, -capacity % tile)), tile, dim=1)
    return torch.cat([torch.bmm(part, weight.transpose(1, 2)) for part in tiles], dim=1)[:, :capacity]


def _by_group(x: Tensor, weight: Tensor, rows_per_group: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns [rows, n] from one BLAS call for each group that has rows."""
    out = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    start = 0
    for group, num_rows in enumerate(rows_per_group.tolist()):
        if num_rows:
            end = start + num_rows
            torch.mm(x[start:end], weight[group].t(), out=out[start:end])
            start = end
    return out


def _by_tiles(x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics) -> Tensor:
    """Returns [rows, n] from BLAS calls of exactly row_tile rows, each group padded to whole tiles."""
    tile = numerics.row_tile or 1
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for group, num_rows in enumerate(rows_per_group.tolist()):
        rows = functional.pad(x[start : start + num_rows], (0, 0, 0, -num_rows % tile))
        for first in range(0, num_rows, tile):
            kept = min(tile, num_rows - first)
            out[start + first : start + first + kept] = (rows[first : first + tile] @ weight[group].t())[:kept]
        start += num_rows
    return out
