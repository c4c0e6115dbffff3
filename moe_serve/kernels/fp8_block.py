"""The part of an FP8 matrix that shares a scale, for code that imports no torch."""

from dataclasses import dataclass

GROUP = 128  # edge of the square blocks that the kernels take, and values of a row of activations that share a scale


@dataclass(frozen=True)
class Fp8Block:
    """How many rows and columns share a scale, the last ones of a matrix perhaps fewer; None: all of them."""

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
        return self.by_channel or self == Fp8Block(GROUP, GROUP)

    def __str__(self) -> str:
        if self.by_channel:
            return "a scale per tensor" if self.rows is None else "a scale per channel"
        return f"blocks of {self.rows} x {self.columns}"


PER_TENSOR = Fp8Block(None, None)
PER_CHANNEL = Fp8Block(1, None)
