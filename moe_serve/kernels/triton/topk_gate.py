# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/topk_gate.py: a program holds one token's scores in registers, picks the best topk times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import LOWEST_CHOICE, RouterSpec

LOWEST = tl.constexpr(LOWEST_CHOICE)
PROPAGATE = tl.constexpr(tl.PropagateNan.ALL)


def topk_gate_triton(
    logits: Tensor, bias: Tensor | None, spec: RouterSpec, load: Tensor, slots: Tensor | None = None,
    cached_at: Tensor | None = None, step_load: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same contract as topk_gate_reference."""
    rows, num_logical = logits.shape
    ids = torch.empty(rows, spec.topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, spec.topk, dtype=torch.float32, device=logits.device)
    if rows:
        group_size = num_logical // spec.num_groups
        topk_gate_kernel[(rows,)](
            logits, bias, load, step_load, slots, cached_at, ids, weights, num_logical, group_size, spec.scaling,
            spec.norm_eps, spec.norm_min, 2 * spec.jitter,
            TOPK=spec.topk, W=triton.next_power_of_2(spec.topk), GROUPS=spec.num_groups,
            GROUP_ROWS=triton.next_power_of_2(spec.num_groups), GROUP_COLUMNS=triton.next_power_of_2(group_size),
            TOPK_GROUPS=spec.topk_groups, SIGMOID=spec.scoring.startswith("sigmoid"), BIAS=bias is not None,
            NORM=spec.norm_topk, BY_LOGITS=spec.scoring in ("sigmoid_of_chosen", "sparsemixer"),
            SPARSEMIXER=spec.scoring == "sparsemixer", BY_BEST=spec.group_score == "best", SLOTS=slots is not None,
            PADDED=cached_at is not None, MASKED=0.0 if spec.masks_with_zero else -float("inf"), num_warps=2,
        )  # fmt: skip
    return ids, weights


@triton.jit
def topk_gate_kernel(
    logits, bias, load, step_load, slots, cached_at, ids, weights, num_logical, group_size, scaling, norm_eps, norm_min,
    far_below,
    TOPK: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    BY_LOGITS: tl.constexpr, SPARSEMIXER: tl.constexpr, BY_BEST: tl.constexpr, SLOTS: tl.constexpr,
    PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, W)
    # Experts as [groups, experts of a group], both padded to powers of two.
    group = tl.arange(0, GROUP_ROWS)
    column = tl.arange(0, GROUP_COLUMNS)
    inside = (group < GROUPS)[:, None] & (column < group_size)[None, :]
    expert = group[:, None] * group_size + column[None, :]
    logit = tl.load(logits + token * num_logical + expert, mask=inside, other=-float("inf"))
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logit))
    else:
        exponent = tl.exp(logit - tl.max(logit))
        scores = exponent / tl.sum(exponent)
    choice = logit if BY_LOGITS else scores
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(choice == choice, choice, LOWEST)  # NaN equals no maximum, so it would have no id
    choice = tl.where(inside, choice, -float("inf"))
    if GROUPS > 1:
        best = tl.max(choice, axis=1)
        at_best = tl.min(tl.where(choice == best[:, None], column[None, :], GROUP_COLUMNS), axis=1)
        second = tl.max(tl.where(column[None, :] == at_best[:, None], -float("inf"), choice), axis=1)
        group_score = tl.where(group < GROUPS, best if BY_BEST else best + second, -float("inf"))
        ahead = (group_score[None, :] > group_score[:, None]) | (
            (group_score[None, :] == group_score[:, None]) & (group[None, :] < group[:, None])
        )
        kept = tl.sum(ahead.to(tl.int32), axis=1) < TOPK_GROUPS
        choice = tl.where(kept[:, None] | (inside == 0), choice, MASKED)
    chosen = tl.full((W,), -1, tl.int64)
    chosen_scores = tl.zeros((W,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        best_expert = tl.min(tl.where(choice == tl.max(choice), expert, GROUPS * group_size))
        if SPARSEMIXER:
            # A softmax over the experts not far below the chosen one, without those chosen before; NaN is not far.
            best_logit = tl.sum(tl.where(expert == best_expert, tl.where(inside, logit, 0.0), 0.0))
            gap = (best_logit - logit) / tl.maximum(tl.abs(logit), best_logit, PROPAGATE)
            counts = inside & (choice > -float("inf")) & ((gap > far_below) == 0)
            highest = tl.max(tl.where(counts, logit, -float("inf")), return_indices=False)
            score = tl.exp(best_logit - highest) / tl.sum(tl.where(counts, tl.exp(logit - highest), 0.0))
        else:
            score = tl.sum(tl.where(expert == best_expert, tl.where(inside, scores, 0.0), 0.0))
        choice = tl.where(expert == best_expert, -float("inf"), choice)
        chosen = tl.where(slot == k, best_expert.to(tl.int64), chosen)
        chosen_scores = tl.where(slot == k, score, chosen_scores)
    if NORM:
        chosen_scores = chosen_scores / tl.maximum(tl.sum(chosen_scores) + norm_eps, norm_min, PROPAGATE)
    named = chosen
    if SLOTS:
        named = tl.load(slots + chosen, mask=slot < TOPK, other=-1)
    counted = slot < TOPK
    if PADDED:
        is_real = tl.load(cached_at + token) >= 0
        named = tl.where(is_real, named, -1)
        counted = slot < tl.where(is_real, TOPK, 0)
    tl.store(ids + token * TOPK + slot, named, mask=slot < TOPK)
    tl.store(weights + token * TOPK + slot, chosen_scores * scaling, mask=slot < TOPK)
    # Counted here, where the ids are at hand; relaxed, because only the sum matters.
    tl.atomic_add(load + chosen, tl.full((W,), 1, tl.int64), mask=counted, sem="relaxed")
    if step_load is not None:
        tl.atomic_add(step_load + chosen, tl.full((W,), 1, tl.int64), mask=counted, sem="relaxed")
