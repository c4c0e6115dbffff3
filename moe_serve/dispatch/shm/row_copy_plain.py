"""RowCopier in numpy and torch, for every machine; the C form has the same bits."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.layout import FIRST
from moe_serve.dispatch.shm.region import Float32Array, Int64Array
from moe_serve.dispatch.shm.row_copy import RowBuffers, decode_results, encode_results, refuse_id, refuse_slab
from moe_serve.dispatch.shm.send_plan import ArrivedEntries, SendPlan, placed_starts, plan_sends, read_entries, starts
from moe_serve.kernels.rows import weighted_sum


@dataclass(frozen=True)
class _PlainPlaced:
    plan: SendPlan
    arrived: ArrivedEntries  # of all sources, in their order
    weights: Float32Array  # [M] of them, with rank_sum
    placed: Int64Array  # [M] row of x of each
    packed: Int64Array  # [M] row of the send buffer
    first_entry: list[int]  # [R + 1] where those of each source begin
    first_row: list[int]  # [R + 1] where its rows begin, counted over all sources
    starts: Int64Array  # [R, S] where the packed rows begin
    x: Tensor
    rows_per_slot: Tensor

    def of(self, source: int) -> slice:
        """Returns the slice of a source's entries."""
        return slice(self.first_entry[source], self.first_entry[source + 1])


class PlainRowCopier:
    """RowCopier for every machine."""

    writes_in_place = False

    def __init__(self, buffers: RowBuffers):
        self._buffers = buffers

    def send_rows(
        self,
        physical_ids: Tensor,
        own: Tensor,
        weights: Tensor | None,
        buffer: int,
        others: list[int],
    ) -> SendPlan:
        slots, rank = self._buffers.shape.slots_per_rank, self._buffers.rank
        if physical_ids.numel() and physical_ids.max() >= slots * self._buffers.shape.num_ranks:
            raise refuse_id(physical_ids, slots * self._buffers.shape.num_ranks)
        plan = plan_sends(physical_ids.numpy(), self._buffers.shape.num_ranks, slots)
        for peer in [*others, rank]:
            target, tokens, entries = self._buffers.to_peers[peer], plan.tokens[peer], plan.entries[peer]
            target.head[buffer][:slots] = plan.counts[peer * slots : (peer + 1) * slots]
            target.head[buffer][slots] = len(tokens)
            target.entries[buffer][: len(entries)] = entries
            if weights is not None:
                target.weights[buffer][: len(entries)] = weights.reshape(-1).numpy()[plan.pairs[peer]]
            if peer != rank:
                _take(own, tokens, target.rows[buffer])
        return plan

    def place_rows(self, sent: SendPlan, own: Tensor, staging: Tensor, buffer: int, others: list[int]) -> _PlainPlaced:
        buffers, slots = self._buffers, self._buffers.shape.slots_per_rank
        counts = np.zeros((buffers.shape.num_ranks, slots), dtype=np.int64)
        for source in [*others, buffers.rank]:
            counts[source] = buffers.received[source].head[buffer][:slots]
        per_slot = counts.sum(0)
        if buffers.slab_rows and per_slot.max() > buffers.slab_rows:
            raise refuse_slab(int(per_slot.max()), buffers.slab_rows)
        sizes = counts.sum(1)
        rows = [
            int(each.head[buffer][slots]) if size else 0 for each, size in zip(buffers.received, sizes, strict=True)
        ]
        arrived = read_entries(
            np.concatenate([each.entries[buffer][:size] for each, size in zip(buffers.received, sizes, strict=True)])
        )
        weights = [each.weights[buffer][:size] for each, size in zip(buffers.received, sizes, strict=True)]
        packed = arrived.packed()
        shift = buffers.slab_rows * np.arange(slots) - (np.cumsum(per_slot) - per_slot) if buffers.slab_rows else None
        placed = _PlainPlaced(
            plan=sent,
            arrived=arrived,
            weights=np.concatenate(weights) if buffers.rank_sum else weights[0][:0],
            placed=packed if shift is None else packed + shift[arrived.slot],
            packed=packed,
            first_entry=starts(sizes),
            first_row=starts(np.array(rows)),
            starts=placed_starts(counts),
            x=staging[: buffers.slab_rows * slots or int(per_slot.sum())],
            rows_per_slot=torch.from_numpy(per_slot),
        )
        words = _words(placed.x).numpy()
        for source in range(buffers.shape.num_ranks):
            part = placed.of(source)
            if not sizes[source]:
                continue
            which = arrived.row[part] - placed.first_row[source]
            if source == buffers.rank:
                data, which = own, sent.tokens[source][which]
            else:
                data = buffers.received[source].rows[buffer][: rows[source]]
            words[placed.placed[part]] = _words(self._decode_rows(data)).numpy()[which]
        return placed

    def send_results(self, placed: _PlainPlaced, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        buffers, slots = self._buffers, self._buffers.shape.slots_per_rank
        send_buffer = buffers.send_buffers[buffers.rank].rows[buffer]
        own = encode_results(buffers, self._sums(placed, results) if buffers.rank_sum else results)
        if buffers.rank_sum:
            send_buffer[: len(own)] = as_bytes(own)
        for peer in others:
            each = buffers.to_peers[peer]
            if buffers.rank_sum:
                each.starts[buffer][0] = placed.first_row[peer]
            else:
                part = placed.of(peer)
                each.starts[buffer][:slots] = placed.starts[peer]
                _words(send_buffer).numpy()[placed.packed[part]] = _words(own).numpy()[placed.placed[part]]
        return own

    def _sums(self, placed: _PlainPlaced, results: Tensor) -> Tensor:
        """Returns the weighted sum of each arrived row's results here, by source, then row: [U of all, H]."""
        arrived = placed.arrived
        index = np.full((placed.first_row[-1], self._buffers.shape.topk), -1, dtype=np.int64)
        index[arrived.row, arrived.k] = placed.placed
        scale = np.zeros(index.shape, dtype=np.float32)
        scale[arrived.row, arrived.k] = placed.weights
        return weighted_sum(results, torch.from_numpy(index), torch.from_numpy(scale))

    def add_results(self, placed: _PlainPlaced, own: Tensor, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        if self._buffers.rank_sum:
            first_row = placed.first_row[self._buffers.rank]
            return add_sums(self._buffers, placed.plan, first_row, weights.shape[0], buffer, others)
        own_rows = torch.from_numpy(placed.placed[placed.of(self._buffers.rank)])
        return add_fetched(self._buffers, placed.plan, own.index_select(0, own_rows), weights, buffer, others)

    def _decode_rows(self, data: Tensor) -> Tensor:
        codec = self._buffers.wire.dispatch
        return data if codec.is_identity else codec.decode(data, self._buffers.hidden).contiguous()


def add_fetched(
    buffers: RowBuffers, plan: SendPlan, own: Tensor, weights: Tensor, buffer: int, others: list[int]
) -> Tensor:
    """Reads each entry's result from the peers' send buffers, and adds them in top-k order.

    own: encoded results of this rank's own entries, in their order
    """
    index = np.full(plan.nth.size, -1, dtype=np.int64)
    pieces, at = [], 0
    for source in sorted([*others, buffers.rank]):
        pairs = plan.pairs[source]
        if source == buffers.rank:
            pieces.append(own)
        else:
            where = buffers.received[source].starts[buffer]
            rows = where[plan.entries[source] & (FIRST - 1)] + plan.nth.reshape(-1)[pairs]
            pieces.append(_pick(buffers.send_buffers[source].rows[buffer], rows))
        index[pairs] = at + np.arange(len(pairs))
        at += len(pairs)
    results = torch.cat([decode_results(buffers, piece) for piece in pieces])
    return weighted_sum(results, torch.from_numpy(index.reshape(plan.nth.shape)), weights, at == plan.nth.size)


def add_sums(
    buffers: RowBuffers, plan: SendPlan, own_start: int, num_tokens: int, buffer: int, others: list[int]
) -> Tensor:
    """Reads the sum that each rank made for each token, and adds them in the order of ranks.

    own_start: row of this rank's own sums in its own send buffer
    """
    index = torch.full((num_tokens, buffers.shape.num_ranks), -1, dtype=torch.int64)
    pieces, at = [], 0
    for source in sorted([*others, buffers.rank]):
        tokens = plan.tokens[source]
        start = own_start if source == buffers.rank else int(buffers.received[source].starts[buffer][0])
        pieces.append(decode_results(buffers, buffers.send_buffers[source].rows[buffer][start : start + len(tokens)]))
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
