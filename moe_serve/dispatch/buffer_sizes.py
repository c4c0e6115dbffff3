"""The sizes of static buffers, and the search for how many tokens fit: arithmetic, before anything is allocated.

`shm/region.py` and `gpu/region.py` compute the sizes. They follow from physical experts: redundant ones take slots, and
slots take memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import CapacityError


@dataclass(frozen=True)
class BufferSizes:
    """Bytes of one rank. parts: by what is in them, all sources and both buffers; total: with flags and padding

    max_tokens: per rank, what they are sized for
    """

    parts: dict[str, int]
    total: int
    num_ranks: int
    max_tokens: int

    @property
    def per_rank(self) -> str:
        return f"up to {_mib(self.total)} per rank"

    @property
    def shares(self) -> str:
        return ", ".join(f"{name} {_mib(size)}" for name, size in self.parts.items() if size)

    @property
    def line(self) -> str:
        """The line of the log at start."""
        return (
            f"low-latency buffers for {self.max_tokens} tokens per rank: {self.per_rank}, "
            f"{_mib(self.total * self.num_ranks)} for {self.num_ranks} ranks ({self.shares})"
        )


def check_capacity(num_tokens: int, max_tokens: int) -> None:
    """Raises CapacityError when a rank brings more tokens than its buffers hold; the step plan chunks before this."""
    if num_tokens > max_tokens:
        raise CapacityError(
            f"{num_tokens} tokens in one dispatch, buffers hold {max_tokens}; raise dispatch.max_tokens_per_rank, or "
            "run the step in chunks of it"
        )


def largest_that_fits(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, where all smaller ones do; 0 if none."""
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
