"""Moving rows between token order and expert order: one gather out, one weighted gather home (weighted_sum.py)."""

from torch import Tensor


def permute_reference(x: Tensor, order: Tensor, topk: int) -> Tensor:
    """Returns the row of each entry: x [tokens, width], order [rows] int64, entries t * topk + k, or -1 for a row of
    zeros (padding of a group) -> [rows, width]"""
    rows = x.new_zeros(order.shape[0], x.shape[1])
    rows[order >= 0] = x[order[order >= 0] // topk]
    return rows


def permute(x: Tensor, order: Tensor, topk: int) -> Tensor:
    """Same contract as the reference; Triton on CUDA."""
    if x.is_cuda:
        from moe_serve.kernels.permute_triton import permute_triton

        return permute_triton(x, order, topk)
    return permute_reference(x, order, topk)
