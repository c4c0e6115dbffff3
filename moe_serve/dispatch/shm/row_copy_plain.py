"""LaneWork in numpy and torch, for every machine: what the C form is held against, bit for bit."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.shm.region import FIRST, Float32Array, Int64Array
from moe_serve.dispatch.shm.row_copy import Lanes, Placed, decode_results, encode_results, refuse_id, refuse_slab
from moe_serve.dispatch.shm.send_plan import ArrivedEntries, SendPlan, placed_starts, plan_sends, read_entries, starts
from moe_serve.kernels.weighted_sum import weighted_sum


@dataclass(frozen=True)
class _PlainPlaced:
    plan: SendPlan
    arrived: ArrivedEntries  # of all sources, in their order
    weights: Float32Array  # [M] of them, with rank_sum
    placed: Int64Array  # [M] row of x of each
    packed: Int64Array  # [M] row of the outbox
    first_entry: list[int]  # [R + 1] where those of each source begin
    first_row: list[int]  # [R + 1] where its rows begin, counted over all sources
    starts: Int64Array  # [R, S] where the packed rows begin
    x: Tensor
    rows_per_slot: Tensor

    def of(self, source: int) -> slice:
        """Returns where the entries of a source are."""
        return slice(self.first_entry[source], self.first_entry[source + 1])


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
                _take(own, tokens, lane.rows[buffer])
        return plan

    def place_rows(self, sent: object, own: Tensor, room: Tensor, buffer: int, others: list[int]) -> Placed:
        assert isinstance(sent, SendPlan)
        lanes, slots = self._lanes, self._lanes.shape.slots_per_rank
        counts = np.zeros((lanes.shape.num_ranks, slots), dtype=np.int64)
        for source in [*others, lanes.rank]:
            counts[source] = lanes.inbox[source].head[buffer][:slots]
        per_slot = counts.sum(0)
        if lanes.slab_rows and per_slot.max() > lanes.slab_rows:
            raise refuse_slab(int(per_slot.max()), lanes.slab_rows)
        sizes = counts.sum(1)
        rows = [int(lane.head[buffer][slots]) if size else 0 for lane, size in zip(lanes.inbox, sizes, strict=True)]
        arrived = read_entries(
            np.concatenate([lane.entries[buffer][:size] for lane, size in zip(lanes.inbox, sizes, strict=True)])
        )
        weights = [lane.weights[buffer][:size] for lane, size in zip(lanes.inbox, sizes, strict=True)]
        packed = arrived.packed()
        shift = lanes.slab_rows * np.arange(slots) - (np.cumsum(per_slot) - per_slot) if lanes.slab_rows else None
        placed = _PlainPlaced(
            plan=sent,
            arrived=arrived,
            weights=np.concatenate(weights) if lanes.rank_sum else weights[0][:0],
            placed=packed if shift is None else packed + shift[arrived.slot],
            packed=packed,
            first_entry=starts(sizes),
            first_row=starts(np.array(rows)),
            starts=placed_starts(counts),
            x=room[: lanes.slab_rows * slots or int(per_slot.sum())],
            rows_per_slot=torch.from_numpy(per_slot),
        )
        words = _words(placed.x).numpy()
        for source in range(lanes.shape.num_ranks):
            part = placed.of(source)
            if not sizes[source]:
                continue
            which = arrived.row[part] - placed.first_row[source]
            if source == lanes.rank:
                data, which = own, sent.tokens[source][which]
            else:
                data = lanes.inbox[source].rows[buffer][: rows[source]]
            words[placed.placed[part]] = _words(self._decode_rows(data)).numpy()[which]
        return placed

    def send_results(self, placed: Placed, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _PlainPlaced)
        lanes, slots = self._lanes, self._lanes.shape.slots_per_rank
        outbox = lanes.outboxes[lanes.rank].rows[buffer]
        own = encode_results(lanes, self._sums(placed, results) if lanes.rank_sum else results)
        if lanes.rank_sum:
            outbox[: len(own)] = as_bytes(own)
        for peer in others:
            lane = lanes.out[peer]
            if lanes.rank_sum:
                lane.starts[buffer][0] = placed.first_row[peer]
            else:
                part = placed.of(peer)
                lane.starts[buffer][:slots] = placed.starts[peer]
                _words(outbox).numpy()[placed.packed[part]] = _words(own).numpy()[placed.placed[part]]
        return own

    def _sums(self, placed: _PlainPlaced, results: Tensor) -> Tensor:
        """Returns the weighted sum of each arrived row's results here, by source, then row: [U of all, H]."""
        arrived = placed.arrived
        index = np.full((placed.first_row[-1], self._lanes.shape.topk), -1, dtype=np.int64)
        index[arrived.row, arrived.k] = placed.placed
        scale = np.zeros(index.shape, dtype=np.float32)
        scale[arrived.row, arrived.k] = placed.weights
        return weighted_sum(results, torch.from_numpy(index), torch.from_numpy(scale))

    def add_results(self, placed: Placed, own: object, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _PlainPlaced)
        assert isinstance(own, Tensor)
        if self._lanes.rank_sum:
            first_row = placed.first_row[self._lanes.rank]
            return add_sums(self._lanes, placed.plan, first_row, weights.shape[0], buffer, others)
        own_rows = torch.from_numpy(placed.placed[placed.of(self._lanes.rank)])
        return add_fetched(self._lanes, placed.plan, own.index_select(0, own_rows), weights, buffer, others)

    def _decode_rows(self, data: Tensor) -> Tensor:
        codec = self._lanes.wire.dispatch
        return data if codec.is_identity else codec.decode(data, self._lanes.hidden).contiguous()


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
