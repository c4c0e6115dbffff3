"""One GEMM per group of rows, each with its own weight: the experts' matrix products.

Weights are [groups, n, k] in any memory order; k-major ones are fastest on CPU, where BLAS packs a matrix before it
multiplies: with one to eight rows it reads weights at a quarter of the memory's speed. A weighted sum of weight rows is
the same product, y = sum_k x[k] * W[k, :], which `embedding_bag` computes: it streams the k rows once, prefetches, and
accumulates in order of k. One call serves all groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import Activation, Mxfp4
from moe_serve.kernels.numerics import FAST, Numerics

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
        if x.is_cuda and weight.is_contiguous():
            return gpu_gemm(x, weight, self.rows_per_group, self.numerics)
        if self.group_of_row is not None:
            if is_k_major(weight):
                return row_gemm(x, weight, self.group_of_row)
            if self.numerics.invariant:
                # Not by BLAS tiles: on some CPUs the bits of a row depend on its position in a tile of two.
                return row_gemm(x, weight.transpose(1, 2).contiguous().transpose(1, 2), self.group_of_row)
        if self.numerics.invariant:
            return _by_tiles(x, weight, self.rows_per_group, self.numerics)
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


def gpu_gemm(
    x: Tensor,
    weight: Tensor | Mxfp4,
    rows_per_group: Tensor,
    numerics: Numerics = FAST,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the products of packed rows [rows, k] or of slabs [groups, capacity, k], by Triton.

    rows_per_group: on the host or on the device, where the host never reads it
    bias: [groups, n] float32, added to each row of its group; None: nothing is
    activation: the matrices are gate above up, and the result what lies between, n / 2 columns; None: the product
    out: where it is written; None: new memory
    """
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    return grouped_gemm_triton(x, weight, rows_per_group, numerics, bias=bias, activation=activation, out=out)


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


MAX_ROWS = 512  # rows of one call: bounds the index table at 512 x k


def row_gemm_reference(x: Tensor, weight: Tensor, group_of_row: Tensor) -> Tensor:
    """x: [rows, k], weight: [groups, n, k], group_of_row: [rows] int64 -> [rows, n] dtype of x"""
    return torch.einsum("rk,rnk->rn", x.float(), weight[group_of_row].float()).to(x.dtype)


def is_k_major(weight: Tensor) -> bool:
    """Returns whether weight [groups, n, k] lies in memory as [groups, k, n], which `row_gemm` needs."""
    groups, n, k = weight.shape
    return weight.transpose(1, 2).is_contiguous() and weight.device.type == "cpu" and groups * n * k > 0


def row_gemm(x: Tensor, weight: Tensor, group_of_row: Tensor) -> Tensor:
    """Same contract as the reference, for CPU weights that are k-major; float32 accumulation in order of k.

    Each bag is one row of x, so a row's bits depend on that row and its matrix, not on other rows, their number, or
    threads. Rows of one group should be adjacent, so that the group's matrix is read from memory once.
    """
    groups, n, k = weight.shape
    table = weight.transpose(1, 2).view(groups * k, n)
    if x.shape[0] <= MAX_ROWS:
        return _bags(x, table, group_of_row)
    pieces = zip(torch.split(x, MAX_ROWS), torch.split(group_of_row, MAX_ROWS), strict=True)
    return torch.cat([_bags(rows, table, group) for rows, group in pieces])


def _bags(x: Tensor, table: Tensor, group_of_row: Tensor) -> Tensor:
    """x: [rows, k], table: [groups * k, n] -> [rows, n]"""
    num_rows, k = x.shape
    if num_rows == 0:
        return x.new_empty(0, table.shape[1])
    indices = torch.add(torch.arange(k), group_of_row[:, None], alpha=k).view(-1)
    offsets = torch.arange(0, num_rows * k, k)
    # Arguments: scale_grad_by_freq, mode 0 = sum, sparse, per_sample_weights.
    out: Tensor = torch.embedding_bag(table, indices, offsets, False, 0, False, x.reshape(-1))[0]
    return out
