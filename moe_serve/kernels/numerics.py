"""How reductions are cut into tiles: the one setting that every kernel of the forward takes.

`fast` leaves it to each library call. `batch_invariant` cuts every GEMM into tiles of `row_tile` rows and every pass
over the KV cache into tiles of `kv_tile` tokens, so that a row's bits do not depend on the other rows of the batch, on
chunking, or on the number of ranks. Activations are then padded to a multiple of `row_tile` rows, because elementwise
CPU loops compute a ragged tail with other instructions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """row_tile: rows of one GEMM, None = uncut (fast). kv_tile: cached tokens reduced at a time (batch_invariant)."""

    row_tile: int | None = None
    kv_tile: int = 64

    @property
    def invariant(self) -> bool:
        return self.row_tile is not None

    def padded(self, num_rows: int) -> int:
        """Returns the number of rows after padding: num_rows itself in fast, else the next multiple of row_tile."""
        if self.row_tile is None:
            return num_rows
        return -(-num_rows // self.row_tile) * self.row_tile


FAST = Numerics()
