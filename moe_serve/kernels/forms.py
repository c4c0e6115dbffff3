"""The forms of arithmetic that models ask for, as values. Specs and plans read them, so this imports no torch.

What an MLP makes of gate and up, how a gate chooses experts, and which numbers of a quantised matrix share a scale.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer"]
GroupScore = Literal["best_two", "best"]

LOWEST_CHOICE = -1e30  # replaces NaN in a gate's choice: below every score, and finite when two of them are added
FP8_GROUP = 128  # edge of the square FP8 blocks that the kernels take, and values of a row that share a scale
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4  # of FP8 values that share a scale
MXFP4_BLOCK = 32  # neighbours in a row of MXFP4 that share a scale


@dataclass(frozen=True)
class Activation:
    """The elementwise middle of an MLP.

    silu:           silu(gate) * up
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up from -limit to limit
                    (gpt-oss)
    """

    kind: Literal["silu", "clamped_swiglu"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf


SILU = Activation()


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


@dataclass(frozen=True)
class Fp8Block:
    """How many rows and columns of an FP8 matrix share a scale, the last ones perhaps fewer; None: all of them."""

    rows: int | None
    columns: int | None

    def num_scales(self, n: int, k: int) -> tuple[int, int]:
        """Returns the rows and columns of blocks of a matrix of n x k."""
        return 1 if self.rows is None else -(-n // self.rows), 1 if self.columns is None else -(-k // self.columns)

    @property
    def by_channel(self) -> bool:
        """Whether a scale for each row of a matrix, its output channel, says the same."""
        return self.columns is None and self.rows in (1, None)

    @property
    def is_kept(self) -> bool:
        """Whether the kernels multiply values with these scales as they are stored."""
        return self.by_channel or self == Fp8Block(FP8_GROUP, FP8_GROUP)

    def __str__(self) -> str:
        if self.by_channel:
            return "a scale per tensor" if self.rows is None else "a scale per channel"
        return f"blocks of {self.rows} x {self.columns}"


PER_TENSOR = Fp8Block(None, None)
PER_CHANNEL = Fp8Block(1, None)


def num_groups(width: int) -> int:
    """Returns the number of scales of a row of `width` values."""
    return -(-width // FP8_GROUP)


@dataclass(frozen=True)
class BlockScaled:
    """FP8 matrices with a scale for every block, or for every row.

    q:     [groups, n, k] float8_e4m3fn
    scale: [groups, parts x ceil(n / parts / 128), ceil(k / 128)] float32, or [groups, n]
    parts: equal stacks of rows, each with blocks of its own: 2 for gate above up, because the checkpoint quantised
           them apart and a width that is not a multiple of 128 would else put rows of both into one block
    """

    q: "Tensor"
    scale: "Tensor"
    parts: int = 1

    def __post_init__(self) -> None:
        groups, n, k = self.q.shape
        wanted = (groups, n) if self.by_channel else (groups, num_scale_rows(n, self.parts), num_groups(k))
        assert self.scale.shape == wanted, f"scales {tuple(self.scale.shape)} of FP8 matrices, expected {wanted}"

    @property
    def by_channel(self) -> bool:
        """Whether every row, an output channel, has one scale."""
        return self.scale.dim() == 2


def num_scale_rows(n: int, parts: int) -> int:
    """Returns the number of block rows of a matrix of n rows in `parts` stacks."""
    assert n % parts == 0, f"{n} rows are not {parts} equal stacks"
    return parts * num_groups(n // parts)
