"""The parameters of the gate's kernels, shared by the plain function and its Triton twin."""

from dataclasses import dataclass
from typing import Literal

LOWEST_CHOICE = -1e30  # replaces NaN: below every score, and finite when two of them are added


Scoring = Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer"]
GroupScore = Literal["best_two", "best"]


@dataclass(frozen=True)
class GateShape:
    """How logits become a choice; the fields of ep.routing.RouterSpec that a kernel needs, under the same names."""

    topk: int
    scoring: Scoring = "softmax"
    norm_topk: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    norm_eps: float = 0.0
    norm_min: float = 0.0
    group_score: GroupScore = "best_two"
    jitter: float = 0.0
