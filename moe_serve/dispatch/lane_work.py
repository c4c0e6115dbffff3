"""The work of the shared-memory transport on rows: plan, copy into lanes, place, add.

Here in plain numpy and torch, for every machine; `lane_work_native.py` has the same in C, with the same bits. No method
here knows of flags or waits. Shape words as in send_plan.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.inbox import InboxShape, Int64Array, Lane
from moe_serve.dispatch.send_plan import SendPlan, placed_rows, plan_sends, starts
from moe_serve.kernels.weighted_sum import weighted_sum


@dataclass(frozen=True)
class Lanes:
    """Where a rank writes and reads. out: its lane in each peer's region;  inbox: each peer's lane in its own."""

    rank: int
    shape: InboxShape
    out: list[Lane]
    inbox: list[Lane]


@dataclass(frozen=True)
class Heads:
    """counts:   [R, S] entries from each source for each slot here
    first:    [R + 1] where the entries of each source begin in arrival order
    per_slot: [S] sum of counts
    """

    counts: Int64Array
    first: list[int]
    per_slot: Int64Array


class LaneWork(Protocol):
    """others: the ranks that take part beside this one;  buffer: 0 or 1."""

    def plan(self, physical_ids: Tensor) -> SendPlan:
        """Returns what goes where. physical_ids: [T, K] int64"""
        ...

    def push_rows(self, plan: SendPlan, rows: Tensor, buffer: int, others: list[int]) -> None:
        """Writes rows, and which of them each slot gets, into the lanes of the others. rows: [T, …] contiguous"""
        ...

    def read_heads(self, plan: SendPlan, buffer: int, others: list[int]) -> Heads:
        """Returns how much has arrived; ranks that take no part have sent nothing."""
        ...

    def place_rows(
        self, plan: SendPlan, heads: Heads, pieces: Sequence[Tensor], buffer: int, out: Tensor
    ) -> Int64Array:
        """Fills the placed layout and returns the placed row of each arrived entry: [M], by source, slot, flat index.

        pieces: R of [n_r, H] compute dtype, contiguous: the rows of each source as they arrived; own ones: [T, H]
        out:    [M, H]
        """
        ...

    def push_results(self, heads: Heads, placed: Int64Array, rows: Tensor, buffer: int, others: list[int]) -> None:
        """Writes results into the lanes of their homes, in arrival order. rows: [M, …] contiguous, placed"""
        ...

    def weighted_sum(self, plan: SendPlan, own_placed: Int64Array, pieces: Sequence[Tensor], weights: Tensor) -> Tensor:
        """Returns sum over k, in order, of weights[t, k] x result of (t, k), in fused float32 steps: [T, H].

        pieces:     R of [n_r, H] compute dtype, contiguous: results of each rank's experts in the order of entries; own
                    ones in the placed layout, where own_placed [n] says which row an entry is
        weights:    [T, K] float32, not read where nothing was sent
        """
        ...


class PlainLaneWork:
    """LaneWork for every machine."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes

    def plan(self, physical_ids: Tensor) -> SendPlan:
        return plan_sends(physical_ids.numpy(), self._lanes.shape.num_ranks, self._lanes.shape.slots_per_rank)

    def push_rows(self, plan: SendPlan, rows: Tensor, buffer: int, others: list[int]) -> None:
        slots = self._lanes.shape.slots_per_rank
        for peer in others:
            lane = self._lanes.out[peer]
            tokens = plan.tokens[plan.first_token[peer] : plan.first_token[peer + 1]]
            first, end = plan.first_entry[peer], plan.first_entry[peer + 1]
            lane.head[buffer][:slots] = plan.counts[peer * slots : (peer + 1) * slots]
            lane.head[buffer][slots] = tokens.shape[0]
            lane.entries[buffer][: end - first] = plan.row[first:end]
            _take(rows, tokens, lane.rows[buffer])

    def read_heads(self, plan: SendPlan, buffer: int, others: list[int]) -> Heads:
        lanes, slots = self._lanes, self._lanes.shape.slots_per_rank
        counts = np.zeros((lanes.shape.num_ranks, slots), dtype=np.int64)
        for peer in others:
            counts[peer] = lanes.inbox[peer].head[buffer][:slots]
        counts[lanes.rank] = plan.counts[lanes.rank * slots : (lanes.rank + 1) * slots]
        return Heads(counts, starts(counts.sum(1)), counts.sum(0))

    def place_rows(
        self, plan: SendPlan, heads: Heads, pieces: Sequence[Tensor], buffer: int, out: Tensor
    ) -> Int64Array:
        rank, first = self._lanes.rank, heads.first
        placed = placed_rows(heads.counts)
        own_tokens = plan.tokens[plan.first_token[rank] : plan.first_token[rank + 1]]
        words = _words(out).numpy()
        for source, piece in enumerate(pieces):
            if source == rank:
                which = own_tokens[plan.row[plan.first_entry[rank] : plan.first_entry[rank + 1]]]
            else:
                which = self._lanes.inbox[source].entries[buffer][: first[source + 1] - first[source]].astype(np.int64)
            words[placed[first[source] : first[source + 1]]] = _words(piece).numpy()[which]
        return placed

    def push_results(self, heads: Heads, placed: Int64Array, rows: Tensor, buffer: int, others: list[int]) -> None:
        for peer in others:
            _take(rows, placed[heads.first[peer] : heads.first[peer + 1]], self._lanes.out[peer].home[buffer])

    def weighted_sum(self, plan: SendPlan, own_placed: Int64Array, pieces: Sequence[Tensor], weights: Tensor) -> Tensor:
        first = plan.first_entry
        results = [piece[: first[source + 1] - first[source]] for source, piece in enumerate(pieces)]
        own = pieces[self._lanes.rank]
        results[self._lanes.rank] = own.index_select(0, torch.from_numpy(own_placed))
        complete = plan.num_entries == plan.home.size
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
