"""The ordered combine: adds expert outputs on the token's own rank, in top-k order, in float32.

The order is part of the result: adding the same numbers by rank or by arrival changes bits, and with them tokens.
"""

import torch
from torch import Tensor


def weighted_sum_reference(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns sum over k, in order, of weights[t, k] * rows[index[t, k]].

    rows:    [num_rows, hidden]
    index:   [num_tokens, topk] int64, -1 = nothing to add
    weights: [num_tokens, topk] float32, not read where index is -1
    returns: [num_tokens, hidden] dtype of rows; each step is one fused multiply-add in float32
    """
    total = torch.zeros(index.shape[0], rows.shape[1], dtype=torch.float64, device=rows.device)
    for k in range(index.shape[1]):
        valid = index[:, k] >= 0
        # In float64 the product is exact, so that rounding the sum to float32 is the rounding of a fused multiply-add.
        product = weights[valid, k].double()[:, None] * rows[index[valid, k]].double()
        total[valid] = (total[valid] + product).float().double()
    return total.to(rows.dtype)


def weighted_sum(rows: Tensor, index: Tensor, weights: Tensor, complete: bool = False) -> Tensor:
    """Same contract as the reference, with the same bits; Triton on CUDA.

    On CPU one call of `embedding_bag`, which adds the rows of a bag in order.
    complete: the caller knows that no index is -1
    """
    if rows.is_cuda:
        from moe_serve.kernels.triton.weighted_sum import weighted_sum_triton

        return weighted_sum_triton(rows.contiguous(), index.contiguous(), weights.contiguous())
    num_tokens, topk = index.shape
    if num_tokens == 0 or topk == 0 or rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros(num_tokens, rows.shape[1])
    if complete:
        flat, scale, offsets = index.reshape(-1), weights.reshape(-1), torch.arange(0, num_tokens * topk, topk)
    else:
        valid = index >= 0
        counts = valid.sum(dim=1)
        flat, scale, offsets = index[valid], weights[valid], counts.cumsum(0) - counts
    # Arguments: scale_grad_by_freq, mode 0 = sum, sparse, per_sample_weights. Rows are widened as the sum is.
    out: Tensor = torch.embedding_bag(rows.float(), flat, offsets, False, 0, False, scale)[0]
    return out.to(rows.dtype)
