"""How one rank's region of shared memory is divided: an owner's page, its send buffer, and its receive buffer.

The receive buffer has one slice for each source rank. Every byte has a single writer: the owner writes page and send
buffer, source r writes slice r. So a rank that is late, or writes on after the others masked it, can only spoil data
that nobody reads. Rows are pushed into the slices of the ranks that need them. Results stay in the send buffer of the
rank that computed them, and the source ranks of their tokens read them there; where the experts write them in place,
nobody copies them.

A slice holds two buffers for every kind of call, used in turn:

    flags    16 words of int64 on cache lines of their own: the calls whose data this source has sent here, and the
             calls whose data it has read (names below)
    counts   [max_counts] int64                       what exchange_counts gathers
    head     [S + 1] int64                            entries for each slot here, and how many rows follow
    entries  [T_max * K] int32                        slot of each entry, by token, then k; FIRST begins a row
    weights  [T_max * K] float32                      of the entries, where results are summed before they are sent
    rows     [T_max, row_bytes]                       encoded rows, one for each token that comes here, by token
    starts   [S] int64                                where in this source's send buffer the results of each slot begin

The send buffer has two buffers of [R * T_max * K, result_row_bytes] encoded results. A canary behind each part changes
when somebody writes too far. Regions are sparse, so their sizes are the most that they can ever take; what is never
written takes nothing.

Shape words: R ranks, S slots of one rank, T_max most tokens of a dispatch, K topk.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.buffer_sizes import BufferSizes, largest_that_fits
from moe_serve.dispatch.wire import Wire

LINE_BYTES = 64
NUM_BUFFERS = 2  # of each kind of data, used in turn: so many calls of a kind may be in flight
NUM_FLAGS = 16  # words: two cache lines, since processors fetch lines in pairs
COUNTS, ROWS, RESULTS = 0, 2, 4  # + buffer: the call whose data it holds
COUNTS_READ, ROWS_READ, RESULTS_READ = 6, 7, 8  # the last call whose data this source has read
OWNER_WORDS = 512  # the owner's page: a process may read it while waiting
CANARY = 0x5AFE_C0DE_0F_CA11
MIN_COUNTS = 4096  # numbers that one exchange of counts can carry at least: 32 KiB
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RegionShape:
    """row_bytes: of an encoded row of a dispatch;  result_row_bytes: of an encoded result."""

    num_ranks: int
    slots_per_rank: int
    topk: int
    max_tokens: int
    row_bytes: int
    result_row_bytes: int
    max_counts: int

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part of one buffer of a slice, without canaries."""
        entries = self.max_tokens * self.topk
        return {
            "counts": 8 * self.max_counts,
            "head": 8 * (self.slots_per_rank + 1),
            "entries": 4 * entries,
            "weights": 4 * entries,
            "rows": self.max_tokens * self.row_bytes,
            "starts": 8 * self.slots_per_rank,
        }

    @property
    def max_results(self) -> int:
        """Rows of one buffer of the send buffer: all tokens of all ranks may come here, each to K slots."""
        return self.num_ranks * self.max_tokens * self.topk

    @property
    def results_bytes(self) -> int:
        return self.max_results * self.result_row_bytes

    @property
    def send_buffer_bytes(self) -> int:
        return NUM_BUFFERS * (_lines(self.results_bytes) + LINE_BYTES)

    @property
    def slice_bytes(self) -> int:
        return 8 * NUM_FLAGS + NUM_BUFFERS * sum(_lines(size) + LINE_BYTES for size in self.part_bytes.values())

    @property
    def num_bytes(self) -> int:
        """Size of the whole region of one rank."""
        return 8 * OWNER_WORDS + self.send_buffer_bytes + self.num_ranks * self.slice_bytes


class ReceiveSlice:
    """What one source writes into one rank's region; lists are indexed by buffer."""

    def __init__(self, region: Tensor, shape: RegionShape, source: int):
        start = _first_slice(shape) + source * shape.slice_bytes
        self.flags: Int64Array = region[start : start + 8 * NUM_FLAGS].numpy().view(np.int64)
        start += 8 * NUM_FLAGS
        parts: dict[str, list[Tensor]] = {name: [] for name in shape.part_bytes}
        canaries = []
        for _ in range(NUM_BUFFERS):
            for name, size in shape.part_bytes.items():
                parts[name].append(region[start : start + size])
                start += _lines(size)
                canaries.append(region[start : start + LINE_BYTES].numpy().view(np.int64))
                start += LINE_BYTES
        self.counts: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["counts"]]
        self.head: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["head"]]
        self.entries: list[Int32Array] = [part.numpy().view(np.int32) for part in parts["entries"]]
        self.weights: list[Float32Array] = [part.numpy().view(np.float32) for part in parts["weights"]]
        self.rows = [part.view(-1, shape.row_bytes) for part in parts["rows"]]
        self.starts: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["starts"]]
        self.canaries = canaries

    def set_canaries(self) -> None:
        """Called once by the source of this slice, before its first call."""
        for canary in self.canaries:
            canary[:] = CANARY


class SendBuffer:
    """The results that a rank keeps for the others to read; lists are indexed by buffer."""

    def __init__(self, region: Tensor, shape: RegionShape):
        self.rows: list[Tensor] = []
        self.canaries: list[Int64Array] = []
        start = 8 * OWNER_WORDS
        for _ in range(NUM_BUFFERS):
            self.rows.append(region[start : start + shape.results_bytes].view(-1, shape.result_row_bytes))
            start += _lines(shape.results_bytes)
            self.canaries.append(region[start : start + LINE_BYTES].numpy().view(np.int64))
            start += LINE_BYTES

    def set_canaries(self) -> None:
        """Called once by the owner, before its first call."""
        for canary in self.canaries:
            canary[:] = CANARY


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
    """Returns the size of the regions, by what is in them."""
    shape = region_shape(num_ranks, limits, wire)
    slices = {name: NUM_BUFFERS * num_ranks * size for name, size in shape.part_bytes.items()}
    parts = {
        "rows": slices.pop("rows"),
        "results": NUM_BUFFERS * shape.results_bytes,
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


def owner_words(region: Tensor) -> Int64Array:
    """Returns the owner's page: [OWNER_WORDS] int64."""
    return region[: 8 * OWNER_WORDS].numpy().view(np.int64)


def all_flags(region: Tensor, shape: RegionShape) -> Int64Array:
    """Returns the flags of all slices of a region: [R, NUM_FLAGS] int64, a view."""
    slices = region[_first_slice(shape) :][: shape.num_ranks * shape.slice_bytes]
    flags = torch.as_strided(slices, (shape.num_ranks, 8 * NUM_FLAGS), (shape.slice_bytes, 1))
    return flags.numpy().view(np.int64)


def _first_slice(shape: RegionShape) -> int:
    return 8 * OWNER_WORDS + shape.send_buffer_bytes


def _lines(size: int) -> int:
    """Returns size rounded up to whole cache lines."""
    return -(-size // LINE_BYTES) * LINE_BYTES
