"""The work of the shared-memory transport on rows, in four halves: send rows, place them, send results, add them.

Here in plain numpy and torch, for every machine; `lane_work_native.py` has the same in C, with the same bits. No method
here knows of flags or waits: that data may be written, or are here, is the caller's business (low_latency.py). Shape
words as in send_plan.py.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.inbox import FIRST, PROGRESS, Float32Array, InboxShape, Int64Array, Lane, Outbox
from moe_serve.dispatch.send_plan import ArrivedEntries, SendPlan, placed_starts, plan_sends, read_entries, starts
from moe_serve.dispatch.wire import Wire
from moe_serve.errors import CapacityError
from moe_serve.kernels.weighted_sum import weighted_sum


@dataclass(frozen=True)
class Lanes:
    """Where a rank writes and reads, and what.

    hidden, dtype: of decoded rows;  out: its lane in each rank's region;  inbox: each rank's lane in its own (its own
    lane is in both)
    outboxes:      of all ranks;  slab_rows: 0: arrived rows are packed; else each slot has a slab of so many rows
    rank_sum:      results are added up by the rank that made them, and one row for each (token, rank) comes home
    """

    rank: int
    shape: InboxShape
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
        progress: int = 0,
    ) -> object:
        """Plans, and writes rows and what each slot gets of them into the lanes of the others.

        physical_ids: [T, K] int64;  own: [T, …] contiguous;  weights: [T, K] float32 where results are summed there
        progress:     the word that says that entries are here and no row yet; rows are counted up from it
        """
        ...

    def place_rows(
        self, sent: object, own: Tensor, room: Tensor, buffer: int, others: list[int], wanted: Tensor | None = None
    ) -> "Placed":
        """Puts a row for each arrived entry in the placed layout.

        room: [most_rows, H];  wanted: [S] bool, the slots whose rows are here and not placed yet; None: all at once
        """
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


@dataclass(frozen=True)
class _PlainPlaced:
    plan: SendPlan
    arrived: list[ArrivedEntries]  # of each source
    weights: list[Float32Array]  # of its entries, with rank_sum
    placed: list[Int64Array]  # [N] row of x of its entries
    packed: list[Int64Array]  # [N] row of the outbox
    starts: Int64Array  # [R, S] where the packed rows begin
    num_rows: list[int]  # U of each source
    x: Tensor
    rows_per_slot: Tensor


class PlainLaneWork:
    """LaneWork for every machine."""

    writes_in_place = False

    def __init__(self, lanes: Lanes):
        self._lanes = lanes

    def send_rows(
        self,
        physical_ids: Tensor,
        own: Tensor,
        weights: Tensor | None,
        buffer: int,
        others: list[int],
        progress: int = 0,
    ) -> SendPlan:
        slots, rank = self._lanes.shape.slots_per_rank, self._lanes.rank
        if physical_ids.numel() and physical_ids.max() >= slots * self._lanes.shape.num_ranks:
            raise refuse_id(physical_ids, slots * self._lanes.shape.num_ranks)
        plan = plan_sends(physical_ids.numpy(), self._lanes.shape.num_ranks, slots)
        for peer in [*others, rank]:
            lane, tokens, entries = self._lanes.out[peer], plan.tokens[peer], plan.entries[peer]
            lane.head[buffer][:slots] = plan.counts[peer * slots : (peer + 1) * slots]
            lane.head[buffer][slots] = len(tokens)
            lane.entries[buffer][: len(entries)] = entries
            if weights is not None:
                lane.weights[buffer][: len(entries)] = weights.reshape(-1).numpy()[plan.pairs[peer]]
            if peer != rank:
                lane.flags[PROGRESS + buffer] = progress
                _take(own, tokens, lane.rows[buffer])
                lane.flags[PROGRESS + buffer] = progress + len(tokens)
        return plan

    def place_rows(
        self, sent: object, own: Tensor, room: Tensor, buffer: int, others: list[int], wanted: Tensor | None = None
    ) -> Placed:
        assert isinstance(sent, SendPlan)
        lanes, slots = self._lanes, self._lanes.shape.slots_per_rank
        counts = np.zeros((lanes.shape.num_ranks, slots), dtype=np.int64)
        for source in [*others, lanes.rank]:
            counts[source] = lanes.inbox[source].head[buffer][:slots]
        per_slot = counts.sum(0)
        if lanes.slab_rows and per_slot.max() > lanes.slab_rows:
            raise refuse_slab(int(per_slot.max()), lanes.slab_rows)
        packed_start, placed_start = placed_starts(counts), placed_starts(counts, lanes.slab_rows)
        x = room[: lanes.slab_rows * slots or int(per_slot.sum())]
        words = _words(x).numpy()
        placed = _PlainPlaced(sent, [], [], [], [], packed_start, [], x, torch.from_numpy(per_slot))
        for source, lane in enumerate(lanes.inbox):
            num_entries = int(counts[source].sum())
            arrived = read_entries(lane.entries[buffer][:num_entries])
            num_rows = int(lane.head[buffer][slots]) if num_entries else 0
            placed.arrived.append(arrived)
            placed.weights.append(lane.weights[buffer][:num_entries].copy())
            placed.placed.append(placed_start[source, arrived.slot] + arrived.number)
            placed.packed.append(packed_start[source, arrived.slot] + arrived.number)
            placed.num_rows.append(num_rows)
            data = own if source == lanes.rank else lane.rows[buffer][:num_rows]
            which = sent.tokens[source][arrived.row] if source == lanes.rank else arrived.row
            here = slice(None) if wanted is None else wanted.numpy()[arrived.slot]
            if num_entries:
                words[placed.placed[source][here]] = _words(self._decode_rows(data)).numpy()[which[here]]
        return placed

    def send_results(self, placed: Placed, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _PlainPlaced)
        lanes, slots = self._lanes, self._lanes.shape.slots_per_rank
        outbox = lanes.outboxes[lanes.rank].rows[buffer]
        first_row = starts(np.array(placed.num_rows))
        own = encode_results(lanes, self._sums(placed, results) if lanes.rank_sum else results)
        if lanes.rank_sum:
            outbox[: len(own)] = as_bytes(own)
        for peer in others:
            lane = lanes.out[peer]
            if lanes.rank_sum:
                lane.starts[buffer][0] = first_row[peer]
            else:
                lane.starts[buffer][:slots] = placed.starts[peer]
                _words(outbox).numpy()[placed.packed[peer]] = _words(own).numpy()[placed.placed[peer]]
        return own

    def _sums(self, placed: _PlainPlaced, results: Tensor) -> Tensor:
        """Returns the weighted sum of each arrived row's results here, by source, then row: [U of all, H]."""
        sums = []
        for arrived, where, weights, num_rows in zip(
            placed.arrived, placed.placed, placed.weights, placed.num_rows, strict=True
        ):
            index = np.full((num_rows, self._lanes.shape.topk), -1, dtype=np.int64)
            index[arrived.row, arrived.k] = where
            scale = np.zeros(index.shape, dtype=np.float32)
            scale[arrived.row, arrived.k] = weights
            sums.append(weighted_sum(results, torch.from_numpy(index), torch.from_numpy(scale)))
        return torch.cat(sums)

    def add_results(self, placed: Placed, own: object, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _PlainPlaced)
        assert isinstance(own, Tensor)
        if self._lanes.rank_sum:
            first_row = starts(np.array(placed.num_rows))
            return add_sums(self._lanes, placed.plan, first_row[self._lanes.rank], weights.shape[0], buffer, others)
        own_rows = torch.from_numpy(placed.placed[self._lanes.rank])
        return add_fetched(self._lanes, placed.plan, own.index_select(0, own_rows), weights, buffer, others)

    def _decode_rows(self, data: Tensor) -> Tensor:
        codec = self._lanes.wire.dispatch
        return data if codec.is_identity else codec.decode(data, self._lanes.hidden).contiguous()


def rows_needed(lanes: Lanes, buffer: int, others: list[int]) -> Int64Array:
    """Returns how many rows of each source must be here before all that a slot wants of them are: [R, S] int64.

    To be called once entries are here. 0 for this rank's own rows, and where a slot wants none.
    """
    slots = lanes.shape.slots_per_rank
    needed = np.zeros((lanes.shape.num_ranks, slots), dtype=np.int64)
    for source in others:
        lane = lanes.inbox[source]
        arrived = read_entries(lane.entries[buffer][: int(lane.head[buffer][:slots].sum())])
        np.maximum.at(needed[source], arrived.slot, arrived.row + 1)
    return needed


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


def add_fetched(lanes: Lanes, plan: SendPlan, own: Tensor, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
    """Fetches each entry's result from the outbox where it lies, and adds them in top-k order.

    own: encoded results of this rank's own entries, in their order
    """
    index = np.full(plan.home.size, -1, dtype=np.int64)
    pieces, at = [], 0
    for source in sorted([*others, lanes.rank]):
        pairs = plan.pairs[source]
        if source == lanes.rank:
            pieces.append(own)
        else:
            where = lanes.inbox[source].starts[buffer]
            rows = where[plan.entries[source] & (FIRST - 1)] + plan.home.reshape(-1)[pairs]
            pieces.append(_pick(lanes.outboxes[source].rows[buffer], rows))
        index[pairs] = at + np.arange(len(pairs))
        at += len(pairs)
    results = torch.cat([decode_results(lanes, piece) for piece in pieces])
    return weighted_sum(results, torch.from_numpy(index.reshape(plan.home.shape)), weights, at == plan.home.size)


def add_sums(lanes: Lanes, plan: SendPlan, own_start: int, num_tokens: int, buffer: int, others: list[int]) -> Tensor:
    """Fetches the sum that each rank made for each token, and adds them in the order of ranks.

    own_start: row of this rank's own sums in its own outbox
    """
    index = torch.full((num_tokens, lanes.shape.num_ranks), -1, dtype=torch.int64)
    pieces, at = [], 0
    for source in sorted([*others, lanes.rank]):
        tokens = plan.tokens[source]
        start = own_start if source == lanes.rank else int(lanes.inbox[source].starts[buffer][0])
        pieces.append(decode_results(lanes, lanes.outboxes[source].rows[buffer][start : start + len(tokens)]))
        index[torch.from_numpy(tokens), source] = at + torch.arange(len(tokens))
        at += len(tokens)
    return weighted_sum(torch.cat(pieces), index, torch.ones(index.shape))


def as_bytes(rows: Tensor) -> Tensor:
    """Returns contiguous rows as bytes, a view: [n, width x itemsize] uint8."""
    if rows.shape[1] == 1:  # a width of one may come with any stride, and view() minds
        rows = rows.as_strided(rows.shape, (1, 1))
    return rows.view(torch.uint8)


def _take(rows: Tensor, which: Int64Array, out: Tensor) -> None:
    """out[i] = rows[which[i]]"""
    torch.index_select(_words(rows), 0, torch.from_numpy(which), out=_words(out)[: which.shape[0]])


def _pick(rows: Tensor, which: Int64Array) -> Tensor:
    """Returns rows[which], as bytes."""
    return _words(rows).index_select(0, torch.from_numpy(which)).view(torch.uint8)


def _words(rows: Tensor) -> Tensor:
    """Returns rows as 8-byte words where they divide, else as bytes: a gather of words runs at the speed of a copy."""
    rows = as_bytes(rows)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0 else rows
