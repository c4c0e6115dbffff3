"""How the regions of GPU memory are divided for a model, how large they are, and how many tokens fit.

All of it is allocated at once.
"""

from dataclasses import replace

import torch

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.buffer_sizes import BufferSizes, largest_that_fits
from moe_serve.dispatch.gpu.region import Region


def gpu_region(num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool) -> Region:
    """Returns how the regions of the GPU transport are divided.

    wire_dtype: "fp8", or the compute dtype under any name: facts.wire_problem refuses what else there is
    stages:     whether rows are sent from memory, as NVSHMEM does
    """
    value_bytes, result_value_bytes = (1, 2) if wire_dtype == "fp8" else (dtype.itemsize, dtype.itemsize)
    return Region(
        num_ranks, limits.slots_per_rank, limits.max_tokens_per_rank, limits.hidden, limits.topk, value_bytes,
        result_value_bytes, stages,
    )  # fmt: skip


def gpu_buffer_sizes(
    num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool
) -> BufferSizes:
    """Returns what the GPU transport takes: regions, and the slabs that rows are unpacked to."""
    region = gpu_region(num_ranks, limits, dtype, wire_dtype, stages)
    rows = region.num_queues * region.slots_per_rank * region.capacity
    staged = region.num_queues * region.max_tokens * region.row_bytes + rows * region.result_row_bytes
    slabs = rows * (limits.hidden * dtype.itemsize + 8)  # 8: where each row came from
    parts = {
        "rows": rows * region.row_bytes,
        "results": region.num_queues * region.max_tokens * region.topk * region.result_row_bytes,
        "send staging": staged if stages else 0,
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

    return largest_that_fits(fits)
