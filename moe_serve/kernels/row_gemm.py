"""A GEMM for few rows, each with its own weight matrix: as fast as memory streams the weights, and bitwise by row.

On CPU, BLAS packs a matrix before it multiplies, so with one to eight rows it reads weights at a quarter of the
memory's speed. A weighted sum of weight rows is the same product, y = sum_k x[k] * W[k, :], which `embedding_bag`
computes: it streams the k rows once, prefetches, and accumulates in order of k. One call serves all groups.
Each bag is one row of x, so a row's bits depend only on that row and its matrix, not on other rows, their number, or
threads.
"""

import torch
from torch import Tensor

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

    Rows of one group should be adjacent, so that the group's matrix is read from memory once.
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
