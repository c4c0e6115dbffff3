"""The class of numerics of a forward: the one setting that all its kernels take.

compiled         the C kernels of kernels/cpu/: each result is computed in a fixed order that depends on its own row
                 only, so nothing is cut into tiles and nothing is padded
batch_invariant  torch or Triton with every GEMM cut into tiles of `row_tile` rows and every pass over the KV cache into
                 tiles of `kv_tile` tokens. Activations are then padded to a multiple of `row_tile` rows, because
                 elementwise CPU loops compute a ragged tail with other instructions
fast             torch or Triton, where the order of a sum is left to each library call

In the first two a row's bits do not depend on the other rows of the batch, on chunking, or on the number of ranks.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """row_tile: rows of one GEMM, None = uncut. kv_tile: cached tokens reduced at a time (batch_invariant in torch).
    compiled: the kernels of kernels/cpu/ compute; row_tile is None then.
    """

    row_tile: int | None = None
    kv_tile: int = 64
    compiled: bool = False

    def __post_init__(self) -> None:
        assert not (self.compiled and self.row_tile), "the compiled kernels cut no GEMM into row tiles"

    @property
    def invariant(self) -> bool:
        return self.compiled or self.row_tile is not None

    def padded(self, num_rows: int) -> int:
        """Returns the number of rows after padding: num_rows itself, with a row_tile the next multiple of it."""
        if self.row_tile is None:
            return num_rows
        return -(-num_rows // self.row_tile) * self.row_tile


FAST = Numerics()
COMPILED = Numerics(compiled=True)
