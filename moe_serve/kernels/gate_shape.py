"""What the gate's kernels are told of a router, shared by the plain one and its Triton twin."""

from dataclasses import dataclass
from typing import Literal

LOWEST_CHOICE = -1e30  # what NaN counts as: below every score, and twice of it is still a number


@dataclass(frozen=True)
class GateShape:
    """How logits become a choice; the fields of ep.routing.RouterSpec that a kernel needs, under the same names."""

    topk: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    norm_eps: float = 0.0
