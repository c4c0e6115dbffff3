"""How large static buffers are, and how many tokens fit: arithmetic, before anything is allocated.

Sizes follow from physical experts: redundant ones take slots, and slots take room. Regions are sparse on a host, so
these are the most that they can ever take; what is never written takes nothing.
"""

from dataclasses import dataclass, replace

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.inbox import InboxShape
from moe_serve.dispatch.wire import Wire

MIN_COUNTS = 4096  # numbers that one exchange of counts can carry at least: 32 KiB


@dataclass(frozen=True)
class BufferSizes:
    """Bytes of one rank. parts: by what is in them, all sources and both buffers; total: with flags and padding"""

    parts: dict[str, int]
    total: int
    num_ranks: int

    def lines(self) -> list[str]:
        """Returns what to say at start."""
        shares = ", ".join(f"{name} {_mib(size)}" for name, size in self.parts.items())
        return [
            f"low-latency buffers: up to {_mib(self.total)} per rank, {_mib(self.total * self.num_ranks)} for "
            f"{self.num_ranks} ranks ({shares})"
        ]


def inbox_shape(num_ranks: int, limits: BufferLimits, wire: Wire) -> InboxShape:
    """Returns how the regions of the shared-memory transport are divided."""
    return InboxShape(
        num_ranks=num_ranks,
        slots_per_rank=limits.slots_per_rank,
        topk=limits.topk,
        max_tokens=limits.max_tokens_per_rank,
        row_bytes=wire.dispatch.row_bytes(limits.hidden),
        home_row_bytes=wire.combine.row_bytes(limits.hidden),
        max_counts=max(MIN_COUNTS, num_ranks * limits.slots_per_rank),
    )


def buffer_sizes(num_ranks: int, limits: BufferLimits, wire: Wire) -> BufferSizes:
    shape = inbox_shape(num_ranks, limits, wire)
    names = {"rows": "rows out", "home": "results home", "entries": "indices", "counts": "counts", "head": "heads"}
    parts = {names[name]: 2 * num_ranks * size for name, size in shape.part_bytes.items()}
    return BufferSizes(parts, shape.num_bytes, num_ranks)


def most_tokens(num_ranks: int, limits: BufferLimits, wire: Wire, free_bytes: int) -> int:
    """Returns the largest max_tokens_per_rank whose regions, of all ranks together, fit into free_bytes; 0 if none."""
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        shape = inbox_shape(num_ranks, replace(limits, max_tokens_per_rank=middle), wire)
        low, high = (middle, high) if num_ranks * shape.num_bytes <= free_bytes else (low, middle)
    return low


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
