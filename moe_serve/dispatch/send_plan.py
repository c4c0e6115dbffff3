"""What a rank sends where when a row travels once to each rank that wants it, and where rows go on arrival.

An entry is one (token, k) pair. A rank's entries are ordered by slot, then by flat index t * K + k, as in layout.py; a
row goes to a destination rank once, however many of its slots want it, and entries say which row they mean. Home finds
a result by the position of its entry in that order, so nothing has to travel back but the results.

numpy on purpose: these run on the host beside the copies, where a torch call would cost more than its work.
Shape words: T tokens, K topk, R ranks, P slots, S = P / R, N entries sent, M entries received.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from moe_serve.dispatch.inbox import Int64Array


@dataclass(frozen=True)
class SendPlan:
    """counts:      [P] entries for each slot
    home:        [T, K] which entry of the order each pair became, -1 = not sent
    row:         [N] of each entry, the number of its row among those that its rank gets
    first_entry: [R + 1] where the entries of each rank begin
    tokens:      [U] tokens that travel, by rank, then ascending
    first_token: [R + 1] where the tokens of each rank begin
    """

    counts: Int64Array
    home: Int64Array
    row: Int64Array
    first_entry: list[int]
    tokens: Int64Array
    first_token: list[int]

    @property
    def num_entries(self) -> int:
        return self.first_entry[-1]


def plan_sends(physical_ids: Int64Array, num_ranks: int, slots_per_rank: int) -> SendPlan:
    """physical_ids: [T, K] int64, -1 = none; the same id twice in a row makes two entries of one row."""
    num_tokens, topk = physical_ids.shape
    num_slots = num_ranks * slots_per_rank
    flat = physical_ids.reshape(-1)
    counts = np.bincount(flat + 1, minlength=num_slots + 1)[1:]
    num_entries = int(counts.sum())
    order = np.argsort(np.where(flat < 0, num_slots, flat), kind="stable")[:num_entries]
    home = np.full(flat.shape, -1, dtype=np.int64)
    home[order] = np.arange(num_entries)

    wants = np.zeros((num_ranks + 1, num_tokens), dtype=bool)  # the last row takes what goes nowhere
    wants[(physical_ids // slots_per_rank).T, np.arange(num_tokens)] = True
    wants = wants[:num_ranks]
    number = np.cumsum(wants, axis=1) - 1
    return SendPlan(
        counts=counts,
        home=home.reshape(num_tokens, topk),
        row=number[flat[order] // slots_per_rank, order // topk],
        first_entry=starts(counts.reshape(num_ranks, slots_per_rank).sum(1)),
        tokens=np.nonzero(wants)[1],
        first_token=starts(wants.sum(1)),
    )


def starts(sizes: Int64Array) -> list[int]:
    """Returns where consecutive runs of these sizes begin, and where the last one ends."""
    return list(accumulate(map(int, sizes), initial=0))


def placed_rows(counts: Int64Array, slab_rows: int = 0) -> Int64Array:
    """Returns the row of each arriving entry in the placed layout: [M], entries by source rank, slot, flat index.

    counts:    [R, S] entries of each source for each slot here
    slab_rows: 0: slots follow each other without gaps; else each slot has a slab of so many rows
    """
    sizes = counts.reshape(-1)
    first_in_arrival = np.cumsum(sizes) - sizes
    by_slot = counts.T.reshape(-1)
    first_in_placed = (np.cumsum(by_slot) - by_slot).reshape(counts.T.shape).T
    if slab_rows:
        first_in_placed = first_in_placed - first_in_placed[0] + slab_rows * np.arange(counts.shape[1])
    return np.repeat(first_in_placed.reshape(-1) - first_in_arrival, sizes) + np.arange(int(sizes.sum()))
