"""The gate's choice, from logits to experts, weights and load counts in one pass.

Ties go to the lowest id, among groups and among experts. torch.topk leaves them open, and two ranks that break a tie
differently would count different loads.
"""

import torch
from torch import Tensor

from moe_serve.kernels.forms import LOWEST_CHOICE, GateShape, GroupScore

CHOSEN_BY_LOGITS = ("sigmoid_of_chosen", "sparsemixer")


def topk_gate_reference(
    logits: Tensor, bias: Tensor | None, num_tokens: Tensor, shape: GateShape, load: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (ids [T, topk] int64, weights [T, topk] float32), and adds every real choice to load.

    logits: [T, E] float32;  bias: [E] float32, added for the choice only, or None;  num_tokens: [1] int64, rows from
    there on are padding: their ids are -1, their weights 0, and they are not counted;  load: [E] int64
    A token whose logits are NaN still has topk different experts, and weights that are NaN.
    """
    by_logits = shape.scoring in CHOSEN_BY_LOGITS
    scores = torch.softmax(logits, -1) if shape.scoring == "softmax" else logits.sigmoid()
    choice = logits if by_logits else scores
    choice = choice if bias is None else choice + bias
    choice = torch.where(choice.isnan(), LOWEST_CHOICE, choice)
    num_logical = logits.shape[1]
    if shape.num_groups > 1:
        grouped = choice.view(len(choice), shape.num_groups, num_logical // shape.num_groups)
        group_scores = score_groups(grouped, shape.group_score)
        order = group_scores.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, order[:, : shape.topk_groups], True)
        choice = torch.where(kept[:, :, None], grouped, -torch.inf).view(len(choice), num_logical)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : shape.topk]
    weights = (
        sparsemixer_weights(logits, ids, shape.jitter) if shape.scoring == "sparsemixer" else scores.gather(1, ids)
    )
    if shape.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + shape.norm_eps).clamp(min=shape.norm_min)
    real = torch.arange(len(logits), device=logits.device)[:, None] < num_tokens
    ids = torch.where(real, ids, -1)
    load += torch.zeros(num_logical + 1, dtype=torch.int64, device=load.device).index_add_(
        0, ids.flatten() + 1, torch.ones_like(ids).flatten()
    )[1:]
    return ids, torch.where(real, weights * shape.scaling, 0.0)


def score_groups(grouped: Tensor, group_score: GroupScore) -> Tensor:
    """grouped: choice scores [T, groups, experts of a group] -> [T, groups]"""
    return grouped.amax(-1) if group_score == "best" else grouped.topk(2, -1).values.sum(-1)


def sparsemixer_weights(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Returns what sparsemixer (arXiv:2409.12136, without training's noise) weighs two experts with, [T, 2].

    logits: [T, E];  ids: [T, 2], the two best by logits
    """
    weights = []
    for k in range(2):
        best = logits.gather(1, ids[:, k : k + 1])
        far_below = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        if k:
            far_below = far_below.scatter(1, ids[:, :1], True)
        weights.append(logits.masked_fill(far_below, -torch.inf).softmax(-1).gather(1, ids[:, k : k + 1]))
    return torch.cat(weights, 1)


def topk_gate(
    logits: Tensor, bias: Tensor | None, num_tokens: Tensor, shape: GateShape, load: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA, where num_tokens stays on the device."""
    if logits.is_cuda:
        from moe_serve.kernels.triton.topk_gate import topk_gate_triton

        return topk_gate_triton(logits, bias, num_tokens, shape, load)
    return topk_gate_reference(logits, bias, num_tokens, shape, load)
