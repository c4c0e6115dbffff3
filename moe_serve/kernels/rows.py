"""Operations on rows: norms, products, clipping and gating, sorting by expert, and the sum at the end.

Norms are of root mean squares (arXiv:1910.07467) or of layers (arXiv:1607.06450), each row by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.quantised import quantize_reference


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., width], weight: [width] -> like x; computed in float32, scaled in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as the reference, in one call; Triton on CUDA."""
    if x.is_cuda:
        return _norm_on_gpu(x, None, weight, None, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same in place. x: [rows, width], may be a slice of wider rows"""
    if x.is_cuda:
        _norm_on_gpu(x, None, weight, None, eps, out=x)
    else:
        x.copy_(rms_norm(x, weight, eps))


def gated_rms_norm_(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> None:
    """x [rows, width] becomes x * silu(gate), normed over each of equal groups of columns, times weight [width].

    gate: like x, may be a slice of wider rows; it is copied beside a column of zeros, as in gate_
    """
    gated = x.float() * functional.silu(functional.pad(gate.float(), (0, 1))[:, :-1])
    width = x.shape[1] // groups
    x.copy_(functional.rms_norm(gated.view(-1, width), (width,), None, eps).view_as(x).to(x.dtype) * weight)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """Adds factor * delta to x in place, and returns the normed sum, like x. delta: like x, not x itself"""
    if x.is_cuda:
        return _norm_on_gpu(x, delta, weight, None, eps, factor)
    # The product is rounded by itself: fused with the sum in some of a loop's instructions only, a row's bits would
    # depend on its place in the batch.
    x.add_(delta if factor == 1 else delta * factor)
    return rms_norm(x, weight, eps)


def _norm_on_gpu(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Returns what norm_triton does, in new rows where `out` does not say otherwise."""
    from moe_serve.kernels.triton.norm import norm_triton

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return norm_triton(x, delta, weight, bias, eps, factor, out)


def rms_norm_heads_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalises every head of x in place. x: [tokens, heads, head_dim], may be a view; weight: [heads, head_dim]"""
    torch.mul(functional.rms_norm(x, (x.shape[-1],), None, eps), weight, out=x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """The parameters of a norm that takes the mean out of a row. weight, bias: [width]"""

    weight: Tensor
    bias: Tensor


def layer_norm_reference(x: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    """x: [..., width] -> like x; computed in float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * norm.weight + norm.bias).to(x.dtype)


def layer_norm(x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
    """Adds delta, if given, to x in place, and returns the normed sum, like x. delta: like x, not x itself"""
    if x.is_cuda:
        return _norm_on_gpu(x, delta, norm.weight, norm.bias, eps)
    if delta is not None:
        x.add_(delta)
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)


def scale_(x: Tensor, factor: float) -> None:
    """Multiplies x [rows, width], which may be a slice of wider rows."""
    x.mul_(factor)


def multiply_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Returns x with row i multiplied by factors[i]. x: [rows, width];  factors: [rows, 1] float32"""
    if x.is_cuda:
        return _multiply_on_gpu(x, factors, torch.empty_like(x))
    return x * factors.to(x.dtype)


def multiply_rows_(x: Tensor, factors: Tensor) -> None:
    """The same in place, of float32 products. x may be a slice of wider rows"""
    if x.is_cuda:
        _multiply_on_gpu(x, factors, x)
    else:
        x.copy_(x * factors)


def _multiply_on_gpu(x: Tensor, factors: Tensor, out: Tensor, sigmoid: bool = False) -> Tensor:
    from moe_serve.kernels.triton.row_factors import multiply_rows_triton

    return multiply_rows_triton(x, factors, out, sigmoid)


def clip_(x: Tensor, limit: float) -> None:
    """Brings the elements of x [rows, width] to between -limit and limit; NaN stays."""
    x.clamp_(-limit, limit)


def add_gated_(total: Tensor, x: Tensor, gate: Tensor | None) -> None:
    """Adds x to total in place, both [rows, width] without gaps. gate: [rows, 1], x times its sigmoid is added"""
    total.add_(x if gate is None else multiply_by_sigmoid_(x.clone(), gate))


def gate_(x: Tensor, logits: Tensor) -> None:
    """Multiplies x [rows, width] by sigmoid(logits), elementwise. logits: like x, may be a slice of wider rows

    The logits are copied beside a column of zeros, so that the CPU loop ends with every row; see multiply_by_sigmoid_.
    """
    x.mul_(functional.pad(logits, (0, 1))[:, :-1].sigmoid())


def gate_heads_(x: Tensor, logits: Tensor, softplus: bool = False) -> None:
    """Multiplies each head of x [rows, heads, width] by the sigmoid of its logit, [rows, heads], as gate_ does.

    softplus: or by the softplus of it
    """
    wide = functional.pad(logits, (0, 1))[:, :-1]
    x.mul_((functional.softplus(wide) if softplus else wide.sigmoid())[..., None])


def multiply_by_sigmoid_(x: Tensor, logits: Tensor) -> Tensor:
    """Multiplies row i of x [rows, width] by sigmoid(logits[i]); returns x. logits: [rows, 1], of x's dtype

    The logits are read with a stride: over adjacent ones the CPU loop would take several at once and the last ones one
    by one, with other instructions, so that a row's bits would depend on its place in the batch.
    """
    if x.is_cuda:
        return _multiply_on_gpu(x, logits, x, sigmoid=True)
    return x.mul_(logits.expand(-1, 2).contiguous()[:, :1].sigmoid())


def pack_rows(x: Tensor, ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (rows, counts, index): one row of x for each id, ordered by slot, then by token and k.

    x:      [T, width]
    ids:    [T, topk] int64, 0 <= id < num_slots; -1 = no row. Raises IndexError for other ids.
    rows:   [num_rows, width]
    counts: [num_slots] int64, rows of each slot
    index:  [T, topk] int64, the row that each id became; -1 for id -1
    """
    flat = ids.reshape(-1)
    if flat.numel() and not -1 <= int(flat.min()) <= int(flat.max()) < num_slots:
        raise IndexError(f"an id is below -1 or not below {num_slots}")
    order = torch.sort(torch.where(flat < 0, num_slots, flat), stable=True).indices
    order = order[: int((flat >= 0).sum())]
    index = torch.full_like(flat, -1)
    index[order] = torch.arange(len(order), device=x.device)
    counts = torch.bincount(flat[order], minlength=num_slots)
    return x[order.div(ids.shape[1], rounding_mode="floor")], counts, index.view(ids.shape)


def pack_all_rows_reference(
    x: Tensor, ids: Tensor, num_slots: int, quantised: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Returns (rows, scale, counts, index), as pack_rows but of a size that no id changes, so the host reads nothing.

    rows:  [T * topk, width], ordered by slot, then by token and k; what lies behind the last one is undefined
    scale: of rows that are quantised to e4m3 (kernels/quantised.py); else None
    """
    flat, topk = ids.reshape(-1), ids.shape[1]
    order = torch.sort(torch.where(flat < 0, num_slots, flat), stable=True).indices
    index = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=x.device))
    index = torch.where(flat < 0, -1, index)
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=x.device).index_add_(
        0, flat + 1, flat.new_ones(len(flat))
    )
    rows, scale = x[order.div(topk, rounding_mode="floor")], None
    if quantised:
        rows, scale = quantize_reference(rows)
    return rows, scale, counts[1:], index.view(ids.shape)


def pack_all_rows(
    x: Tensor, ids: Tensor, num_slots: int, quantised: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA."""
    if x.is_cuda:
        from moe_serve.kernels.triton.pack_rows import pack_all_rows_triton

        return pack_all_rows_triton(x, ids, num_slots, quantised)
    return pack_all_rows_reference(x, ids, num_slots, quantised)


def weighted_sum_reference(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns the ordered combine: sum over k, in order, of weights[t, k] * rows[index[t, k]].

    The order is part of the result: adding the same numbers by rank or by arrival changes bits, and with them tokens.

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
