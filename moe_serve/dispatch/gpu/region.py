"""The layout and size of a rank's region of symmetric memory for low-latency dispatch and combine.

Every rank has a region of the same shape; peers write into it, its owner reads. One queue serves one handle in flight.
A queue, in order (offsets in bytes):

    counts        [S, R] int64        round << 32 | rows that source r sends to slot s
    done          [R] int64           last round of which rank r has read all its rows
    arrived       [S, R * T_max] int64   round in which this row was last written
    result_arrived [T_max, K] int64      the same, for results
    rows          [S, R * T_max] x row_bytes        header | values | scales
    result_rows   [T_max, K] x result_row_bytes
    staged, result_staged             only for transports that send from memory: [T_max] and [S, R * T_max] rows

Flags hold the number of a round, never a yes or no: nobody has to clear them, and a flag that is late from a voided
round cannot be taken for one of this round. Numbers of rounds only grow; a new epoch uses new regions.

A row's header is int32: the token's number on the source rank, then its K physical ids; so one staged row serves all K
destinations, and a slot finds in it which of the K results it computes.
"""

from dataclasses import dataclass, replace

import torch

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.buffer_sizes import BufferSizes, largest_that_fits
from moe_serve.kernels.forms import num_groups

ALIGNMENT = 128  # bytes: what a cache line and every vector access like


@dataclass(frozen=True)
class Region:
    """Sizes and offsets. value_bytes: of one value of a row (1 = e4m3 with scales), result_value_bytes: of a result.

    stages: whether rows are sent from memory (NVSHMEM) and not from registers
    """

    num_ranks: int
    slots_per_rank: int
    max_tokens: int
    hidden: int
    topk: int
    value_bytes: int
    result_value_bytes: int
    stages: bool = False
    num_queues: int = 2

    @property
    def capacity(self) -> int:
        """Rows of one slab: R * T_max; only T can overflow."""
        return self.num_ranks * self.max_tokens

    @property
    def header_ints(self) -> int:
        return _up(1 + self.topk, 4)

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a row."""
        return self.header_ints * 4 + _up(self.hidden * self.value_bytes, 16)

    @property
    def row_bytes(self) -> int:
        scale_bytes = 4 * num_groups(self.hidden) if self.value_bytes == 1 else 0
        return _up(self.scales_at + scale_bytes, 16)

    @property
    def result_row_bytes(self) -> int:
        return _up(self.hidden * self.result_value_bytes, 16)

    @property
    def counts_at(self) -> int:
        return 0

    @property
    def done_at(self) -> int:
        return _up(8 * self.slots_per_rank * self.num_ranks, ALIGNMENT)

    @property
    def arrived_at(self) -> int:
        return self.done_at + _up(8 * self.num_ranks, ALIGNMENT)

    @property
    def result_arrived_at(self) -> int:
        return self.arrived_at + _up(8 * self.slots_per_rank * self.capacity, ALIGNMENT)

    @property
    def rows_at(self) -> int:
        return self.result_arrived_at + _up(8 * self.max_tokens * self.topk, ALIGNMENT)

    @property
    def result_rows_at(self) -> int:
        return self.rows_at + _up(self.slots_per_rank * self.capacity * self.row_bytes, ALIGNMENT)

    @property
    def staged_at(self) -> int:
        return self.result_rows_at + _up(self.max_tokens * self.topk * self.result_row_bytes, ALIGNMENT)

    @property
    def result_staged_at(self) -> int:
        return self.staged_at + (_up(self.max_tokens * self.row_bytes, ALIGNMENT) if self.stages else 0)

    @property
    def queue_bytes(self) -> int:
        result_staged = self.slots_per_rank * self.capacity * self.result_row_bytes if self.stages else 0
        return self.result_staged_at + _up(result_staged, ALIGNMENT)

    @property
    def region_bytes(self) -> int:
        """Symmetric memory that every rank must provide."""
        return self.num_queues * self.queue_bytes


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


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
