"""The form of FP8 numbers: e4m3 with a float32 scale per 128 values of a row, per 128 x 128 block of a matrix, or per
row of a matrix.

Shared by the plain functions and their Triton twins; computes nothing on rows.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_serve.kernels.fp8_block import GROUP

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4


def num_groups(width: int) -> int:
    """Returns the number of scales of a row of `width` values."""
    return -(-width // GROUP)


@dataclass(frozen=True)
class BlockScaled:
    """FP8 matrices with a scale for every block, or for every row.

    q:     [groups, n, k] float8_e4m3fn
    scale: [groups, parts x ceil(n / parts / 128), ceil(k / 128)] float32, or [groups, n]
    parts: equal stacks of rows, each with blocks of its own: 2 for gate above up, because the checkpoint quantised
           them apart and a width that is not a multiple of 128 would else put rows of both into one block
    """

    q: Tensor
    scale: Tensor
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
