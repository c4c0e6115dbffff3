"""The work of the shared-memory transport on rows, in four halves: send rows, place them, send results, add them.

Here in plain numpy and torch, for every machine; `lane_work_native.py` has the same in C, with the same bits. No method
here knows of flags or waits: that data may be written, or are here, is the caller's business (low_latency.py). Shape
words as in send_plan.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.inbox import InboxShape, Int64Array, Lane
from moe_serve.dispatch.send_plan import SendPlan, placed_rows, plan_sends, starts
from moe_serve.errors import CapacityError
from moe_serve.kernels.weighted_sum import weighted_sum

Decode = Callable[[Tensor], Tensor]  # encoded rows [n, row_bytes] uint8 -> [n, H] compute dtype, contiguous


@dataclass(frozen=True)
class Lanes:
    """Where a rank writes and reads.

    hidden, dtype: of decoded rows;  out: its lane in each peer's region;  inbox: each peer's lane in its own
    slab_rows:     0: arrived rows are packed; else each slot has a slab of so many rows
    """

    rank: int
    shape: InboxShape
    hidden: int
    dtype: torch.dtype
    out: list[Lane]
    inbox: list[Lane]
    slab_rows: int = 0


class LaneWork(Protocol):
    """The four halves. What one gives the next is opaque to the caller but for the attributes of Placed.

    others: the ranks that take part beside this one
    buffer: 0 or 1
    own:    this rank's rows, encoded; they are read where they lie
    decode: None where rows lie in the lanes as they are computed with
    """

    def send_rows(self, physical_ids: Tensor, own: Tensor, buffer: int, others: list[int]) -> object:
        """Plans, and writes rows and which of them each slot gets into the lanes of the others.

        physical_ids: [T, K] int64;  own: [T, …] contiguous
        """
        ...

    def place_rows(self, sent: object, own: Tensor, buffer: int, others: list[int], decode: Decode | None) -> "Placed":
        """Puts a row for each arrived entry in the placed layout."""
        ...

    def send_results(self, placed: "Placed", own: Tensor, buffer: int, others: list[int]) -> None:
        """Writes results into the lanes of their homes, in arrival order. own: [M, …] contiguous, placed"""
        ...

    def add_results(self, placed: "Placed", own: Tensor, weights: Tensor, buffer: int, decode: Decode | None) -> Tensor:
        """Returns sum over k, in order, of weights[t, k] x result of (t, k), in fused float32 steps: [T, H].

        weights: [T, K] float32, not read where nothing was sent
        """
        ...


class Placed(Protocol):
    @property
    def x(self) -> Tensor:
        """[M, H] the rows, or slabs one after the other, in a buffer that the call after the next one uses again."""
        ...

    @property
    def rows_per_slot(self) -> Tensor:
        """[S] int64"""
        ...


class PlacedRows:
    """Room for the placed layout. Kept from call to call, since fresh pages cost as much as the copy into them."""

    def __init__(self, lanes: Lanes):
        self._slab_rows, self._num_slabs = lanes.slab_rows, lanes.shape.slots_per_rank
        self._rows = [torch.empty(0, lanes.hidden, dtype=lanes.dtype) for _ in range(2)]

    def room(self, buffer: int, num_rows: int, largest_slot: int) -> Tensor:
        """Returns [num_rows, H], or all slabs. largest_slot: rows of the slot that has most"""
        if self._slab_rows:
            if largest_slot > self._slab_rows:
                raise CapacityError(
                    f"a slot received {largest_slot} rows, its slab has {self._slab_rows}: a token named the same slot "
                    "twice; use packed rows where ids may repeat"
                )
            num_rows = self._num_slabs * self._slab_rows
        rows = self._rows[buffer]
        if rows.shape[0] < num_rows:
            rows = torch.empty(num_rows + num_rows // 4, rows.shape[1], dtype=rows.dtype)
            self._rows[buffer] = rows
        return rows[:num_rows]


@dataclass(frozen=True)
class _PlainPlaced:
    plan: SendPlan
    first: list[int]  # [R + 1] where the entries of each source begin in arrival order
    placed: Int64Array  # [M] placed row of each arrived entry
    x: Tensor
    rows_per_slot: Tensor


class PlainLaneWork:
    """LaneWork for every machine."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._room = PlacedRows(lanes)

    def send_rows(self, physical_ids: Tensor, own: Tensor, buffer: int, others: list[int]) -> SendPlan:
        slots = self._lanes.shape.slots_per_rank
        plan = plan_sends(physical_ids.numpy(), self._lanes.shape.num_ranks, slots)
        for peer in others:
            lane = self._lanes.out[peer]
            tokens = plan.tokens[plan.first_token[peer] : plan.first_token[peer + 1]]
            first, end = plan.first_entry[peer], plan.first_entry[peer + 1]
            lane.head[buffer][:slots] = plan.counts[peer * slots : (peer + 1) * slots]
            lane.head[buffer][slots] = tokens.shape[0]
            lane.entries[buffer][: end - first] = plan.row[first:end]
            _take(own, tokens, lane.rows[buffer])
        return plan

    def place_rows(self, sent: object, own: Tensor, buffer: int, others: list[int], decode: Decode | None) -> Placed:
        assert isinstance(sent, SendPlan)
        rank, slots, num_ranks = self._lanes.rank, self._lanes.shape.slots_per_rank, self._lanes.shape.num_ranks
        counts = np.zeros((num_ranks, slots), dtype=np.int64)
        for peer in others:
            counts[peer] = self._lanes.inbox[peer].head[buffer][:slots]
        counts[rank] = sent.counts[rank * slots : (rank + 1) * slots]
        first, placed = starts(counts.sum(1)), placed_rows(counts, self._lanes.slab_rows)
        per_slot = counts.sum(0)
        x = self._room.room(buffer, first[-1], int(per_slot.max()))
        words = _words(x).numpy()
        for source in [*others, rank]:
            if source == rank:
                data = own
                own_tokens = sent.tokens[sent.first_token[rank] : sent.first_token[rank + 1]]
                which = own_tokens[sent.row[sent.first_entry[rank] : sent.first_entry[rank + 1]]]
            else:
                lane = self._lanes.inbox[source]
                data = lane.rows[buffer][: int(lane.head[buffer][slots])]
                which = lane.entries[buffer][: first[source + 1] - first[source]].astype(np.int64)
            piece = data if decode is None else decode(data)
            words[placed[first[source] : first[source + 1]]] = _words(piece).numpy()[which]
        return _PlainPlaced(sent, first, placed, x, torch.from_numpy(per_slot))

    def send_results(self, placed: Placed, own: Tensor, buffer: int, others: list[int]) -> None:
        assert isinstance(placed, _PlainPlaced)
        for peer in others:
            which = placed.placed[placed.first[peer] : placed.first[peer + 1]]
            _take(own, which, self._lanes.out[peer].home[buffer])

    def add_results(self, placed: Placed, own: Tensor, weights: Tensor, buffer: int, decode: Decode | None) -> Tensor:
        assert isinstance(placed, _PlainPlaced)
        rank, plan = self._lanes.rank, placed.plan
        results = []
        for source in range(self._lanes.shape.num_ranks):
            if source == rank:
                which = torch.from_numpy(placed.placed[placed.first[rank] : placed.first[rank + 1]])
                data = own.index_select(0, which)
            else:
                data = self._lanes.inbox[source].home[buffer][: plan.first_entry[source + 1] - plan.first_entry[source]]
            results.append(data.view(self._lanes.dtype) if decode is None else decode(data))
        complete = plan.first_entry[-1] == plan.home.size
        return weighted_sum(torch.cat(results), torch.from_numpy(plan.home), weights, complete)


def as_bytes(rows: Tensor) -> Tensor:
    """Returns contiguous rows as bytes, a view: [n, width x itemsize] uint8."""
    if rows.shape[1] == 1:  # a width of one may come with any stride, and view() minds
        rows = rows.as_strided(rows.shape, (1, 1))
    return rows.view(torch.uint8)


def _take(rows: Tensor, which: Int64Array, out: Tensor) -> None:
    """out[i] = rows[which[i]]"""
    torch.index_select(_words(rows), 0, torch.from_numpy(which), out=_words(out)[: which.shape[0]])


def _words(rows: Tensor) -> Tensor:
    """Returns rows as 8-byte words where they divide, else as bytes: a gather of words runs at the speed of a copy."""
    rows = as_bytes(rows)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0 else rows
