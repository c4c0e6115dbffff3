"""Symmetric memory: every rank owns one region of equal size, and can write into the regions of all others.

The ground of one-sided transports. Who may write where, and when what is written may be read, is the business of the
protocol above it (low_latency.py); a region is bytes, zero at first. Makers: shared memory of one host
(symmetric_shm.py), and on GPUs, in the same spirit but with addresses for kernels, symmetric_gpu.py.
"""

from typing import Protocol

from torch import Tensor

from moe_serve.dispatch.decisions import Decisions

MAX_RANKS = 62  # sets of ranks are the bits of one word


class SymmetricMemory(Protocol):
    """The regions of all ranks, as one rank sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def region(self, rank: int) -> Tensor:
        """Returns the region of a rank, mapped here: [num_bytes] uint8, aligned to a cache line. Own rank included."""
        ...

    @property
    def decisions(self) -> Decisions:
        """What the ranks decide once and for all."""
        ...

    def lives(self, rank: int) -> bool:
        """Returns False once the process behind a rank is known to be dead; True where that cannot be told."""
        ...
