"""What exceeds the capacity of an expert: it is dropped, or moves to another expert of the same token.

Capacity-aware inference (arXiv:2503.05066). An expert takes at most `factor` times the mean of the rows that one rank
computes at once, so no exchange is needed, and over all ranks an expert has at most as many times their mean, but for
rounding up on each rank. Which experts lie together does not matter. A choice depends on the rows beside it.

Shape words: T = rows, K = topk, E = num_logical.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.topk_gate import scores_and_choice


@dataclass(frozen=True)
class ExpertCapacity:
    """How much an expert takes of the rows of a rank.

    factor: of the mean over experts, at least 1
    moves:  a choice beyond it goes to the best expert for its token that has room; False, or where none has: it is
            dropped, and the other experts of the token keep their weights
    """

    factor: float
    moves: bool

    def rows(self, num_rows: int, topk: int, num_logical: int) -> int:
        """Returns the rows that an expert takes of so many, at least one."""
        return max(1, math.ceil(self.factor * (num_rows * topk) / num_logical))


class ChangedChoices(NamedTuple):
    """Where the number of changed choices of a token is kept, over the layers of a step.

    counts: [slots] int16, by slot of the KV cache;  slots: [T] int64, of the rows; below 0: padding
    is_first: this is the first layer, whose number replaces what the slot held; others are added
    """

    counts: Tensor
    slots: Tensor
    is_first: bool

    def keep(self, changed: Tensor) -> None:
        """Keeps the number of each row, [T] int64."""
        is_real = self.slots[: len(changed)] >= 0
        slots, numbers = self.slots[: len(changed)][is_real], changed[is_real].to(self.counts.dtype)
        self.counts[slots] = numbers if self.is_first else self.counts[slots] + numbers


def limit_experts(
    logits: Tensor, bias: Tensor | None, spec: RouterSpec, ids: Tensor, weights: Tensor, capacity: ExpertCapacity
) -> Tensor:
    """Changes the choices of a gate that exceed the capacity of an expert, in place.

    logits: [T, E] float32;  bias: [E] float32 or None, both as the gate had them
    ids:    [T, K] int64, as the gate chose them, -1 = none; -1 where a choice was dropped
    weights: [T, K] float32; 0 where a choice was dropped. One that moved has the old weight times the ratio of scores
    Returns how many choices of each row moved, and how many were dropped: [T, 2] int64.

    An expert keeps the rows with the highest weights, of equal ones the first. The others take turns by row, then by
    rank of the choice: each goes to the expert with the best score for its token (with `bias`, and in the groups that
    the gate chose from) that has room and is none of the token's own.
    """
    changed = torch.zeros(len(ids), 2, dtype=torch.int64, device=ids.device)
    num_logical = logits.shape[1]
    most = capacity.rows(len(ids), ids.shape[1], num_logical)
    entries = torch.arange(ids.numel(), device=ids.device)[ids.flatten() >= 0]
    chosen, weight = ids.flatten()[entries], weights.flatten()[entries].nan_to_num(nan=-torch.inf)
    order = weight.sort(descending=True, stable=True).indices
    order = order[chosen[order].sort(stable=True).indices]
    counts = torch.bincount(chosen, minlength=num_logical)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=ids.device) - first[chosen[order]]
    counts = counts.clamp(max=most)
    rows_over: dict[int, list[int]] = {}
    for entry in entries[order[place >= most]].sort().values.tolist():
        rows_over.setdefault(entry // ids.shape[1], []).append(entry % ids.shape[1])
    for row, over in rows_over.items():
        scores, choice = (each[0] for each in scores_and_choice(logits[row : row + 1], bias, spec))
        choice[ids[row][ids[row] >= 0]] = -torch.inf
        for k in over:
            open_to = choice.where(counts < most, -torch.inf)
            best = int(open_to.argmax())
            if not capacity.moves or open_to[best] == -torch.inf:
                ids[row, k], weights[row, k] = -1, 0
                changed[row, 1] += 1
                continue
            old = scores[ids[row, k]]
            ids[row, k], weights[row, k] = best, weights[row, k] * (scores[best] / old) if old > 0 else 0
            choice[best] = -torch.inf
            counts[best] += 1
            changed[row, 0] += 1
    return changed
