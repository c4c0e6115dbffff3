"""What a rank sends where when a row travels once to each rank that wants it, and where rows go on arrival.

An entry is one (token, k) pair that has an expert. For each rank, entries are listed by token, then k; a row goes there
once, however many of its slots want it, and the first of its entries is marked. Both ends count the same: the n-th
entry of a source for a slot is the n-th of its rows there in the placed layout, so nothing has to travel back but the
results, and where those of each slot begin.

numpy on purpose: these run on the host beside the copies, where a torch call would cost more than its work.
Shape words: T tokens, K topk, R ranks, P slots, S = P / R, N entries for one rank, U rows for it, M entries received.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from moe_serve.dispatch.inbox import FIRST, Int32Array, Int64Array


@dataclass(frozen=True)
class SendPlan:
    """Lists have one item for each rank.

    counts:  [P] entries for each slot
    home:    [T, K] the how many-th entry of this rank for its slot each pair is, -1 = not sent
    pairs:   [N] flat index t * K + k of each entry
    entries: [N] int32 its slot, counted within the rank; + FIRST where a row begins
    tokens:  [U] tokens that travel, ascending
    """

    counts: Int64Array
    home: Int64Array
    pairs: list[Int64Array]
    entries: list[Int32Array]
    tokens: list[Int64Array]


def plan_sends(physical_ids: Int64Array, num_ranks: int, slots_per_rank: int) -> SendPlan:
    """physical_ids: [T, K] int64, -1 = none; the same id twice in a row makes two entries of one row."""
    num_tokens, topk = physical_ids.shape
    num_slots = num_ranks * slots_per_rank
    flat = physical_ids.reshape(-1)
    counts = np.bincount(flat + 1, minlength=num_slots + 1)[1:]
    home = np.where(flat < 0, -1, occurrences(np.where(flat < 0, num_slots, flat)))
    rank_of_pair = flat // slots_per_rank
    plan = SendPlan(counts, home.reshape(num_tokens, topk), [], [], [])
    for rank in range(num_ranks):
        pairs = np.flatnonzero(rank_of_pair == rank)
        token = pairs // max(topk, 1)
        begins = np.diff(token, prepend=-1) != 0
        plan.pairs.append(pairs)
        plan.entries.append((flat[pairs] - rank * slots_per_rank + np.where(begins, FIRST, 0)).astype(np.int32))
        plan.tokens.append(token[begins])
    return plan


@dataclass(frozen=True)
class ArrivedEntries:
    """What one source's entries mean at this rank.

    row:    [N] of each entry, the number of its row among those of the source
    slot:   [N] of each entry
    number: [N] the how many-th of the source's entries for that slot it is
    """

    row: Int64Array
    slot: Int64Array
    number: Int64Array

    @property
    def k(self) -> Int64Array:
        """Returns the how many-th entry of its row each is: [N]."""
        return occurrences(self.row)


def read_entries(entries: Int32Array) -> ArrivedEntries:
    """entries: [N] int32 as in SendPlan."""
    wide = entries.astype(np.int64)
    slot = wide & (FIRST - 1)
    return ArrivedEntries(np.cumsum(wide >= FIRST) - 1, slot, occurrences(slot))


def occurrences(values: Int64Array) -> Int64Array:
    """Returns for each of values [N] how many equal ones precede it: [N] int64."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    first = np.repeat(begins, np.diff(begins, append=len(values)))
    numbers = np.empty(len(values), dtype=np.int64)
    numbers[order] = np.arange(len(values)) - first
    return numbers


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
