"""The gate's choice, from logits to experts, weights and load counts in one pass.

Ties go to the lowest id, among groups and among experts. torch.topk leaves them open, and two ranks that break a tie
differently would count different loads.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import LOWEST_CHOICE, RouterSpec

_WHOLE_VECTORS = 64  # rows; 64 rows of any width fill whole vector registers on every CPU


def topk_gate_reference(
    logits: Tensor,
    bias: Tensor | None,
    spec: RouterSpec,
    load: Tensor,
    slots: Tensor | None = None,
    cached_at: Tensor | None = None,
    step_load: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns ids [T, topk] int64, best first, and weights [T, topk] float32, and adds every choice to load.

    logits: [T, E] float32;  bias: [E] float32, added for the choice only, or None;  load: [E] int64
            The router's num_identity is added to E of logits and bias. Choices of those are not counted.
    slots:  [E or more] int64, returned in place of each chosen expert; None: the ids of experts are
    cached_at: [T] int64, below 0 in padding rows, which have no experts: their ids are -1, and nothing is counted;
            None: there are none
    step_load: [E] int64, to which every choice is added, too; None: to no other
    chosen: [T, topk] int64, the experts of each token, whose order the ids have then; None: the best are chosen
    A token whose logits are NaN still has topk different experts, and weights that are NaN.
    """
    if chosen is None:
        scores, choice = scores_and_choice(logits, bias, spec)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk]
    else:
        scores, ids = _scores(logits, spec), chosen
    weights = _sparsemixer_weights(logits, ids, spec.jitter) if spec.scoring == "sparsemixer" else scores.gather(1, ids)
    if spec.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.norm_eps).clamp(min=spec.norm_min)
    named = ids if slots is None else slots[ids]
    is_real = torch.ones_like(ids)
    if cached_at is not None:
        is_real *= (cached_at >= 0)[:, None]
        named = torch.where(is_real > 0, named, -1)
    if spec.num_identity:
        is_real *= ids < spec.num_logical
        ids = ids.clamp(max=spec.num_logical - 1)
    for counts in (load,) if step_load is None else (load, step_load):
        counts.index_add_(0, ids.flatten(), is_real.flatten())
    return named, weights * spec.scaling


def take_identity_(ids: Tensor, weights: Tensor, num_logical: int) -> Tensor:
    """Takes out choices of experts that give back their input, and returns the sum of their weights, [T, 1] float32.

    ids: [T, topk] int64, from num_logical on where a choice is such; it becomes -1
    weights: [T, topk] float32
    """
    taken = ids >= num_logical
    total = torch.zeros_like(weights[:, :1])
    for k in range(ids.shape[1]):  # in order, as the kernel adds
        total += torch.where(taken[:, k : k + 1], weights[:, k : k + 1], 0)
    ids.masked_fill_(taken, -1)
    return total


def scores_and_choice(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Returns the scores that weights are made of, and those by which experts are chosen, [T, E] float32 each.

    Arguments as for the gate. Choices are new memory, and -inf (or 0: spec.masks_with_zero) in groups that a token
    does not choose from.
    """
    scores = _scores(logits, spec)
    choice = logits if spec.scoring in ("sigmoid_of_chosen", "sparsemixer") else scores
    choice = choice if bias is None else choice + bias
    choice = torch.where(choice.isnan(), LOWEST_CHOICE, choice)
    num_logical = logits.shape[1]
    if spec.num_groups > 1:
        grouped = choice.view(len(choice), spec.num_groups, num_logical // spec.num_groups)
        group_scores = grouped.amax(-1) if spec.group_score == "best" else grouped.topk(2, -1).values.sum(-1)
        order = group_scores.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, order[:, : spec.topk_groups], True)
        masked = 0.0 if spec.masks_with_zero else -torch.inf
        choice = torch.where(kept[:, :, None], grouped, masked).view(len(choice), num_logical)
    return scores, choice


def _scores(logits: Tensor, spec: RouterSpec) -> Tensor:
    if spec.scoring == "softmax":
        return torch.softmax(logits, -1)
    if spec.scoring == "sqrt_softplus":
        return by_row(lambda rows: functional.softplus(rows).sqrt_(), logits)
    return by_row(torch.sigmoid, logits)


def _sparsemixer_weights(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
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


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns an elementwise function of x [T, n]. A row's bits do not depend on its position: no row falls in the
    loop's ragged end, which uses other instructions."""
    if x.numel() % _WHOLE_VECTORS == 0:
        return function(x.contiguous())
    return function(functional.pad(x, (0, 0, 0, -x.shape[0] % _WHOLE_VECTORS)))[: x.shape[0]]


def topk_gate(
    logits: Tensor,
    bias: Tensor | None,
    spec: RouterSpec,
    load: Tensor,
    slots: Tensor | None = None,
    cached_at: Tensor | None = None,
    step_load: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA."""
    if logits.is_cuda:
        from moe_serve.kernels.triton.topk_gate import topk_gate_triton

        assert chosen is None, "models whose tokens' ids choose are refused on GPUs"
        return topk_gate_triton(logits, bias, spec, load, slots, cached_at, step_load)
    return topk_gate_reference(logits, bias, spec, load, slots, cached_at, step_load, chosen)
