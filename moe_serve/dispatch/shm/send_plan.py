"""What a rank sends where when a row is sent once to each rank that needs it, and where rows go on arrival.

An entry is one (token, k) pair that has an expert. For each rank, entries are listed by token, then k; a row is sent
there once, however many of its slots need it, and the first of its entries is marked. Both ends count the same: the
n-th entry of a source for a slot is the n-th of its rows there in the placed layout. So only the results are sent
back, and the numbers where those of each slot begin.

numpy, since a torch call would cost more than the work here.
Shape words: T tokens, K topk, R ranks, P slots, S = P / R, N entries for one rank, U rows for it, M entries received.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from moe_serve.dispatch.layout import FIRST
from moe_serve.dispatch.shm.region import Int32Array, Int64Array


@dataclass(frozen=True)
class SendPlan:
    """Lists have one item for each rank.

    counts:  [P] entries for each slot
    nth:     [T, K] for the i-th entry of this rank for its slot i, -1 = not sent
    pairs:   [N] flat index t * K + k of each entry
    entries: [N] int32 its slot, counted within the rank; + FIRST where a row begins
    tokens:  [U] tokens that are sent, ascending
    """

    counts: Int64Array
    nth: Int64Array
    pairs: list[Int64Array]
    entries: list[Int32Array]
    tokens: list[Int64Array]


def plan_sends(physical_ids: Int64Array, num_ranks: int, slots_per_rank: int) -> SendPlan:
    """physical_ids: [T, K] int64, -1 = none; the same id twice in a row makes two entries of one row."""
    num_tokens, topk = physical_ids.shape
    num_slots = num_ranks * slots_per_rank
    flat = physical_ids.reshape(-1)
    slot = np.where(flat < 0, num_slots, flat)
    counts = np.bincount(slot, minlength=num_slots + 1)
    order = np.argsort(slot, kind="stable")
    nth = np.empty(flat.shape, dtype=np.int64)
    nth[order] = np.arange(flat.size) - (np.cumsum(counts) - counts)[slot[order]]
    nth[flat < 0] = -1
    counts = counts[:num_slots]

    by_rank = starts(counts.reshape(num_ranks, slots_per_rank).sum(1))
    pairs = np.argsort(slot // slots_per_rank, kind="stable")[: by_rank[-1]]
    token, slot = pairs // max(topk, 1), slot[pairs]
    rank = slot // slots_per_rank
    begins = np.ones(pairs.shape, dtype=bool)
    begins[1:] = (token[1:] != token[:-1]) | (rank[1:] != rank[:-1])
    entries = (slot - rank * slots_per_rank + begins * FIRST).astype(np.int32)
    mine = [slice(begin, end) for begin, end in pairwise(by_rank)]
    return SendPlan(
        counts=counts,
        nth=nth.reshape(num_tokens, topk),
        pairs=[pairs[part] for part in mine],
        entries=[entries[part] for part in mine],
        tokens=[token[part][begins[part]] for part in mine],
    )


@dataclass(frozen=True)
class ArrivedEntries:
    """What entries mean where they arrive, of one source or of several in a row.

    row:  [M] of each entry, the number of its row
    slot: [M] of each entry
    k:    [M] for the i-th entry of its row i
    """

    row: Int64Array
    slot: Int64Array
    k: Int64Array

    def packed(self) -> Int64Array:
        """Returns where each entry's row goes: [M], by slot, then in the order of arrival."""
        packed = np.empty(len(self.slot), dtype=np.int64)
        packed[np.argsort(self.slot, kind="stable")] = np.arange(len(packed))
        return packed


def read_entries(entries: Int32Array) -> ArrivedEntries:
    """entries: [M] int32 as in SendPlan."""
    begins = entries >= FIRST
    row = np.cumsum(begins) - 1
    k = np.arange(len(entries)) - np.flatnonzero(begins)[row]
    return ArrivedEntries(row, (entries & (FIRST - 1)).astype(np.int64), k)


def starts(sizes: Int64Array) -> list[int]:
    """Returns where consecutive runs of these sizes begin, and where the last one ends."""
    return list(accumulate(map(int, sizes), initial=0))


def placed_starts(counts: Int64Array, slab_rows: int = 0) -> Int64Array:
    """Returns where the rows of each source for each slot begin in the placed layout: [R, S].

    counts:    [R, S] entries of each source for each slot here
    slab_rows: 0: slots follow each other without gaps; else each slot has a slab of so many rows
    """
    by_slot = counts.T.reshape(-1)
    packed: Int64Array = (np.cumsum(by_slot) - by_slot).reshape(counts.T.shape).T
    if not slab_rows:
        return packed
    slabs: Int64Array = packed - packed[0] + slab_rows * np.arange(counts.shape[1])
    return slabs
