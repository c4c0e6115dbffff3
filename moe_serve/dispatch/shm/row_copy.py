"""The work of the shared-memory transport on rows, in four halves: send rows, place them, send results, add them.

`row_copy_plain.py` does it in numpy and torch, on every machine; `row_copy_native.py` has the same in C, with the
same bits. No method here knows of flags or waits: that data may be written, or are here, is the caller's business
(transport.py). Shape words as in send_plan.py.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.dispatch.shm.region import Lane, Outbox, RegionShape
from moe_serve.dispatch.wire import Wire
from moe_serve.errors import CapacityError


@dataclass(frozen=True)
class Lanes:
    """Where a rank writes and reads, and what.

    hidden, dtype: of decoded rows;  out: its lane in each rank's region;  inbox: each rank's lane in its own (its own
    lane is in both)
    outboxes:      of all ranks;  slab_rows: 0: arrived rows are packed; else each slot has a slab of so many rows
    rank_sum:      results are added up by the rank that made them, and one row for each (token, rank) comes home
    """

    rank: int
    shape: RegionShape
    hidden: int
    dtype: torch.dtype
    wire: Wire
    out: list[Lane]
    inbox: list[Lane]
    outboxes: list[Outbox]
    slab_rows: int = 0
    rank_sum: bool = False

    @property
    def most_rows(self) -> int:
        """Rows of x, slabs included."""
        return self.slab_rows * self.shape.slots_per_rank or self.shape.max_results


class Placed(Protocol):
    @property
    def x(self) -> Tensor:
        """[M, H] the rows, or slabs one after the other, in a room."""
        ...

    @property
    def rows_per_slot(self) -> Tensor:
        """[S] int64"""
        ...


class LaneWork(Protocol):
    """The four halves. What one gives the next is opaque to the caller but for the attributes of Placed.

    others: the ranks that take part beside this one
    buffer: 0 or 1, of the call
    own:    this rank's rows, encoded; they are read where they lie
    """

    writes_in_place: bool
    """Whether results may be written straight into the outbox: this form's stores are fenced before they are
    announced."""

    def send_rows(
        self,
        physical_ids: Tensor,
        own: Tensor,
        weights: Tensor | None,
        buffer: int,
        others: list[int],
    ) -> object:
        """Plans, and writes rows and what each slot gets of them into the lanes of the others.

        physical_ids: [T, K] int64;  own: [T, …] contiguous;  weights: [T, K] float32 where results are summed there
        """
        ...

    def place_rows(self, sent: object, own: Tensor, room: Tensor, buffer: int, others: list[int]) -> "Placed":
        """Puts a row for each arrived entry in the placed layout. room: [most_rows, H]"""
        ...

    def send_results(self, placed: Placed, results: Tensor, buffer: int, others: list[int]) -> object:
        """Makes results ready in the outbox, and tells each home where its own begin.

        results: [M, H] compute dtype, contiguous, in the layout of x; nothing is copied where they are in the outbox
        Returns what `add_results` needs of this rank's own results.
        """
        ...

    def add_results(self, placed: Placed, own: object, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        """Returns sum over k, in order, of weights[t, k] x result of (t, k), in fused float32 steps: [T, H].

        weights: [T, K] float32, not read where nothing was sent
        With rank_sum: the sum over ranks, in order, of the sums that they made.
        """
        ...


@dataclass(frozen=True, eq=False)
class Room:
    """What one dispatch holds of the memory with this number, until another one takes it."""

    number: int


class Rooms:
    """Memory for the rows that arrive, kept from call to call: fresh pages cost as much as the copy into them.

    Two, since two handles may be in flight; the one that was left last is taken first, while its memory is warm.
    """

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._rows: list[Tensor | None] = [None, None]
        self._free = [1, 0]
        self._taken: list[Room] = []

    def take(self) -> Room:
        """Returns a room; the one that was taken longest ago where none was left."""
        room = Room(self._free.pop() if self._free else self._taken.pop(0).number)
        self._taken.append(room)
        return room

    def leave(self, room: Room) -> None:
        """The rows of a room are needed no more. Nothing happens where another dispatch has taken its memory."""
        if room in self._taken:
            self._taken.remove(room)
            self._free.append(room.number)

    def rows(self, room: Room) -> Tensor:
        """Returns all rows of a room: [most_rows, H]; pages that are never written take no memory."""
        rows = self._rows[room.number]
        if rows is None:
            rows = torch.empty(self._lanes.most_rows, self._lanes.hidden, dtype=self._lanes.dtype)
            self._rows[room.number] = rows
        return rows


def refuse_id(physical_ids: Tensor, num_slots: int) -> IndexError:
    """Returns what to raise when an id names no slot."""
    return IndexError(f"physical id {int(physical_ids.max())} among {num_slots} slots; ids come from the replica map")


def refuse_slab(num_rows: int, slab_rows: int) -> CapacityError:
    """Returns what to raise when a slot receives more rows than its slab has."""
    return CapacityError(
        f"a slot received {num_rows} rows, its slab has {slab_rows}: a token named the same slot twice; use packed "
        "rows where ids may repeat"
    )


def encode_results(lanes: Lanes, results: Tensor) -> Tensor:
    """Returns results as they lie in an outbox: [n, …], the same rows or their bytes."""
    codec = lanes.wire.combine
    return results if codec.is_identity else codec.encode(results)


def decode_results(lanes: Lanes, data: Tensor) -> Tensor:
    """Returns [n, H] compute dtype of what `encode_results` gave, or of its bytes."""
    codec = lanes.wire.combine
    if codec.is_identity:
        return data if data.dtype == lanes.dtype else data.view(lanes.dtype)
    return codec.decode(data, lanes.hidden)
