"""How the regions of shared memory are divided for a model, how large they are, and how many tokens fit.

Regions are sparse, so these are the most that they can ever take; what is never written takes nothing.
"""

from dataclasses import replace

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.buffer_sizes import BufferSizes, largest_that_fits
from moe_serve.dispatch.shm.region import RegionShape
from moe_serve.dispatch.wire import Wire

MIN_COUNTS = 4096  # numbers that one exchange of counts can carry at least: 32 KiB


def region_shape(num_ranks: int, limits: BufferLimits, wire: Wire) -> RegionShape:
    """Returns how the regions of the shared-memory transport are divided."""
    return RegionShape(
        num_ranks=num_ranks,
        slots_per_rank=limits.slots_per_rank,
        topk=limits.topk,
        max_tokens=limits.max_tokens_per_rank,
        row_bytes=wire.dispatch.row_bytes(limits.hidden),
        result_row_bytes=wire.combine.row_bytes(limits.hidden),
        max_counts=max(MIN_COUNTS, num_ranks * limits.slots_per_rank),
    )


def buffer_sizes(num_ranks: int, limits: BufferLimits, wire: Wire) -> BufferSizes:
    shape = region_shape(num_ranks, limits, wire)
    slices = {name: 2 * num_ranks * size for name, size in shape.part_bytes.items()}
    parts = {
        "rows": slices.pop("rows"),
        "results": 2 * shape.results_bytes,
        "counts": slices.pop("counts"),
        "indices": sum(slices.values()),
    }
    return BufferSizes(parts, shape.num_bytes, num_ranks, limits.max_tokens_per_rank)


def most_tokens(num_ranks: int, limits: BufferLimits, wire: Wire, free_bytes: int) -> int:
    """Returns the largest max_tokens_per_rank whose regions, of all ranks together, fit into free_bytes; 0 if none."""

    def fits(tokens: int) -> bool:
        shape = region_shape(num_ranks, replace(limits, max_tokens_per_rank=tokens), wire)
        return num_ranks * shape.num_bytes <= free_bytes

    return largest_that_fits(fits)
