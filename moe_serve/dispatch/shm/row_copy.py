"""What the shared-memory transport does with rows: send them, place them, send results, add results.

`row_copy_plain.py` does it in numpy and torch on every machine, `row_copy_native.py` in C with the same bits. Nothing
here knows of flags or waits: the caller (transport.py) sees to it that buffers may be written and that data are here.
Shape words as in send_plan.py.
"""

import contextlib
import mmap
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moe_serve.dispatch.shm.region import ReceiveSlice, RegionShape, SendBuffer
from moe_serve.dispatch.wire import Wire
from moe_serve.errors import CapacityError


@dataclass(frozen=True)
class RowBuffers:
    """Where a rank writes and reads, and what.

    hidden, dtype: of decoded rows
    to_peers:      this rank's slice of each rank's receive buffer, its own included
    received:      the slices of this rank's receive buffer, by source rank
    send_buffers:  of all ranks
    slab_rows:     0: arrived rows are packed; else each slot has a slab of so many rows
    rank_sum:      results are summed by the rank that made them, and one row for each (token, rank) is sent back
    local_mask:    the ranks of this host as bits; the link sends rows to all others
    """

    rank: int
    shape: RegionShape
    hidden: int
    dtype: torch.dtype
    wire: Wire
    to_peers: list[ReceiveSlice]
    received: list[ReceiveSlice]
    send_buffers: list[SendBuffer]
    slab_rows: int = 0
    rank_sum: bool = False
    local_mask: int = -1

    @property
    def most_rows(self) -> int:
        """Rows of x, slabs included."""
        return self.slab_rows * self.shape.slots_per_rank or self.shape.max_results


class Placed(Protocol):
    """Rows that have been placed for the experts."""

    @property
    def x(self) -> Tensor:
        """[M, H] the rows, or slabs one after the other, in a staging buffer."""
        ...

    @property
    def rows_per_slot(self) -> Tensor:
        """[S] int64"""
        ...


Sent = TypeVar("Sent")
PlacedT = TypeVar("PlacedT", bound=Placed)


class RowCopier(Protocol[Sent, PlacedT]):
    """The four halves of a dispatch and its combine; what one returns the next one takes.

    others: the ranks that take part beside this one
    buffer: 0 or 1, of the call
    own:    this rank's rows, encoded; they are not copied before they are placed
    """

    writes_in_place: bool
    """Whether results may be written straight into the send buffer: stores are fenced before they are signalled."""

    def send_rows(
        self, physical_ids: Tensor, own: Tensor, weights: Tensor | None, buffer: int, others: list[int]
    ) -> Sent:
        """Plans, and writes rows and entries into this rank's slices of the others' receive buffers.

        physical_ids: [T, K] int64;  own: [T, …] contiguous
        weights:      [T, K] float32 with rank_sum, else None
        """
        ...

    def place_rows(self, sent: Sent, own: Tensor, staging: Tensor, buffer: int, others: list[int]) -> PlacedT:
        """Copies a row for each arrived entry to its place in the placed layout. staging: [most_rows, H]"""
        ...

    def send_results(self, placed: PlacedT, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        """Leaves results in the send buffer, and tells each source rank where its own begin.

        results: [M, H] compute dtype, contiguous, in the layout of x; not copied where they are in the send buffer
        Returns what `add_results` needs of this rank's own results.
        """
        ...

    def add_results(self, placed: PlacedT, own: Tensor, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        """Returns sum over k, in order, of weights[t, k] x result of (t, k), in fused float32 steps: [T, H].

        weights: [T, K] float32, not read where nothing was sent
        With rank_sum: the sum over ranks, in order, of the sums that they made.
        """
        ...


@dataclass(frozen=True, eq=False)
class StagingBuffer:
    """The memory of this number, held by one dispatch until another one takes it."""

    number: int


class StagingBuffers:
    """Memory for rows that arrive, kept from call to call: fresh pages cost as much as the copy into them.

    Two, since two handles may be in flight; the one that was given back last is taken first, while it is in the cache.
    """

    def __init__(self, buffers: RowBuffers):
        self._buffers = buffers
        self._rows: list[Tensor | None] = [None, None]
        self._free = [1, 0]
        self._taken: list[StagingBuffer] = []

    def take(self) -> StagingBuffer:
        """Returns a buffer; the one that was taken longest ago where none was given back."""
        staging = StagingBuffer(self._free.pop() if self._free else self._taken.pop(0).number)
        self._taken.append(staging)
        return staging

    def give_back(self, staging: StagingBuffer) -> None:
        """Frees a buffer. Does nothing where another dispatch has taken its memory."""
        if staging in self._taken:
            self._taken.remove(staging)
            self._free.append(staging.number)

    def rows(self, staging: StagingBuffer) -> Tensor:
        """Returns all rows of a buffer: [most_rows, H]; pages that are never written take no memory."""
        rows = self._rows[staging.number]
        if rows is None:
            rows = _huge_pages(self._buffers.most_rows, self._buffers.hidden, self._buffers.dtype)
            self._rows[staging.number] = rows
        return rows


def _huge_pages(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Returns [num_rows, hidden] in huge pages where the system gives them: rows go to places far from each other."""
    num_bytes = num_rows * hidden * dtype.itemsize
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(num_rows, hidden)


def refuse_id(physical_ids: Tensor, num_slots: int) -> IndexError:
    """Returns what to raise when an id names no slot."""
    return IndexError(f"physical id {int(physical_ids.max())} among {num_slots} slots; ids come from the replica map")


def refuse_slab(num_rows: int, slab_rows: int) -> CapacityError:
    """Returns what to raise when a slot receives more rows than its slab has."""
    return CapacityError(
        f"a slot received {num_rows} rows, its slab has {slab_rows}: a token named the same slot twice; use packed "
        "rows where ids may repeat"
    )


def encode_results(buffers: RowBuffers, results: Tensor) -> Tensor:
    """Returns results as they lie in a send buffer: [n, …], the same rows or their bytes."""
    codec = buffers.wire.combine
    return results if codec.is_identity else codec.encode(results)


def decode_results(buffers: RowBuffers, data: Tensor) -> Tensor:
    """Returns [n, H] compute dtype of what `encode_results` gave, or of its bytes."""
    codec = buffers.wire.combine
    if codec.is_identity:
        return data if data.dtype == buffers.dtype else data.view(buffers.dtype)
    return codec.decode(data, buffers.hidden)
