"""How large static buffers are, and how many tokens fit: arithmetic, before anything is allocated.

Sizes follow from physical experts: redundant ones take slots, and slots take room. Regions are sparse on a host, so
these are the most that they can ever take; what is never written takes nothing. On a GPU all of it is taken at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.inbox import InboxShape
from moe_serve.dispatch.wire import Wire
from moe_serve.kernels.low_latency_region import Region

MIN_COUNTS = 4096  # numbers that one exchange of counts can carry at least: 32 KiB


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

    def lines(self) -> list[str]:
        """Returns what to say at start."""
        return [
            f"low-latency buffers for {self.max_tokens} tokens per rank: {self.per_rank}, "
            f"{_mib(self.total * self.num_ranks)} for {self.num_ranks} ranks ({self.shares})"
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
    lanes = {name: 2 * num_ranks * size for name, size in shape.part_bytes.items()}
    parts = {
        "rows out": lanes.pop("rows"),
        "results home": 2 * shape.results_bytes,
        "counts": lanes.pop("counts"),
        "indices": sum(lanes.values()),
    }
    return BufferSizes(parts, shape.num_bytes, num_ranks, limits.max_tokens_per_rank)


def most_tokens(num_ranks: int, limits: BufferLimits, wire: Wire, free_bytes: int) -> int:
    """Returns the largest max_tokens_per_rank whose regions, of all ranks together, fit into free_bytes; 0 if none."""

    def fits(tokens: int) -> bool:
        shape = inbox_shape(num_ranks, replace(limits, max_tokens_per_rank=tokens), wire)
        return num_ranks * shape.num_bytes <= free_bytes

    return _largest(fits)


def gpu_region(num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool) -> Region:
    """Returns how the regions of the GPU transport are divided.

    wire_dtype: "fp8", or the compute dtype under any name: gpu_facts.wire_problem refuses what else there is
    stages:     whether rows are sent from memory, as NVSHMEM does
    """
    value_bytes, home_value_bytes = (1, 2) if wire_dtype == "fp8" else (dtype.itemsize, dtype.itemsize)
    return Region(
        num_ranks, limits.slots_per_rank, limits.max_tokens_per_rank, limits.hidden, limits.topk, value_bytes,
        home_value_bytes, stages,
    )  # fmt: skip


def gpu_buffer_sizes(
    num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool
) -> BufferSizes:
    """Returns what the GPU transport takes: regions, and the slabs that rows are unpacked to."""
    region = gpu_region(num_ranks, limits, dtype, wire_dtype, stages)
    rows = region.num_lanes * region.slots_per_rank * region.capacity
    staged = region.num_lanes * region.max_tokens * region.row_bytes + rows * region.home_row_bytes
    slabs = rows * (limits.hidden * dtype.itemsize + 8)  # 8: where each row came from
    parts = {
        "rows in": rows * region.row_bytes,
        "results home": region.num_lanes * region.max_tokens * region.topk * region.home_row_bytes,
        "sending": staged if stages else 0,
        "slabs": slabs,
    }
    return BufferSizes(parts, region.region_bytes + slabs, num_ranks, limits.max_tokens_per_rank)


def most_gpu_tokens(
    num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool, free_bytes: int
) -> int:
    """Returns the largest max_tokens_per_rank whose buffers fit into the free memory of one GPU; 0 if none."""

    def fits(tokens: int) -> bool:
        some = replace(limits, max_tokens_per_rank=tokens)
        return gpu_buffer_sizes(num_ranks, some, dtype, wire_dtype, stages).total <= free_bytes

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, where all smaller ones do; 0 if none."""
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
