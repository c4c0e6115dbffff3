"""Packs replicas onto ranks: in rounds, longest first, and without duplicates. All rows at once.

Every rank has the same number of slots; an empty slot is the replica -1 with load 0. Refinement by swaps is in
`swapping.py`.

Shape words: X = rows planned at once, R = ranks of a row, K = slots per rank, n = R x K replicas of a row.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]


def pack_in_rounds(replicas: Ids, load: Floats, num_ranks: int) -> tuple[Ids, Floats]:
    """Returns a fast packing: in each of K rounds the next R heaviest replicas go to the ranks, heaviest to lightest.

    replicas: [X, n] int32 expert ids, load: [X, n] float64 -> table [X, R, K] int32, its loads [X, R, K] float64
    For two slots per rank this is the best packing of these replicas.
    """
    num_rows, num_replicas = replicas.shape
    num_rounds = num_replicas // num_ranks
    order = np.argsort(-load, axis=1, kind="stable")
    by_round = np.take_along_axis(replicas, order, axis=1).reshape(num_rows, num_rounds, num_ranks)
    load_by_round = np.take_along_axis(load, order, axis=1).reshape(num_rows, num_rounds, num_ranks)
    table = np.empty((num_rows, num_rounds, num_ranks), dtype=np.int32)
    packed = np.empty((num_rows, num_rounds, num_ranks))
    total = np.zeros((num_rows, num_ranks))
    for k in range(num_rounds):
        lightest_first = np.argsort(total, axis=1, kind="stable")
        np.put_along_axis(table[:, k], lightest_first, by_round[:, k], axis=1)
        np.put_along_axis(packed[:, k], lightest_first, load_by_round[:, k], axis=1)
        total += packed[:, k]
    return table.transpose(0, 2, 1).copy(), packed.transpose(0, 2, 1).copy()


def pack_longest_first(replicas: Ids, load: Floats, num_ranks: int) -> tuple[Ids, Floats]:
    """Returns the packing in which each replica, heaviest first, goes to the lightest rank with a free slot.

    Same arguments and result as `pack_in_rounds`; slower, and better where few replicas are very heavy.
    """
    num_rows, num_replicas = replicas.shape
    slots = num_replicas // num_ranks
    order = np.argsort(-load, axis=1, kind="stable")
    replicas, load = np.take_along_axis(replicas, order, axis=1), np.take_along_axis(load, order, axis=1)
    table = np.full((num_rows, num_ranks, slots), -1, dtype=np.int32)
    packed = np.zeros((num_rows, num_ranks, slots))
    filled = np.zeros((num_rows, num_ranks), dtype=np.int64)
    key = np.zeros((num_rows, num_ranks))  # load, or infinity once full
    rows = np.arange(num_rows)
    for i in range(num_replicas):
        rank = key.argmin(axis=1)
        slot = filled[rows, rank]
        table[rows, rank, slot] = replicas[:, i]
        packed[rows, rank, slot] = load[:, i]
        filled[rows, rank] = slot + 1
        key[rows, rank] = np.where(slot + 1 == slots, np.inf, key[rows, rank] + load[:, i])
    return table, packed


def duplicate_slots(table: Ids) -> NDArray[np.bool_]:
    """Returns which slots repeat an expert that an earlier slot of their rank holds: [X, R, K] -> [X, R, K] bool."""
    order = np.argsort(table, axis=2, kind="stable")
    by_id = np.take_along_axis(table, order, axis=2)
    repeated = np.zeros(table.shape, dtype=bool)
    repeated[:, :, 1:] = (by_id[:, :, 1:] == by_id[:, :, :-1]) & (by_id[:, :, 1:] >= 0)
    out = np.zeros(table.shape, dtype=bool)
    np.put_along_axis(out, order, repeated, axis=2)
    return out


def repair_duplicates(table: Ids, load: Floats) -> None:
    """Swaps replicas between ranks, in place, until no rank holds an expert twice; table [X, R, K], load [X, R, K].

    Among the swaps that take a duplicate away, the one with the most similar loads is chosen. An expert with no more
    replicas than ranks can always be repaired: a rank without it either holds a duplicate itself, or an expert that the
    crowded rank lacks. So every step leaves fewer duplicates.
    """
    num_slots = table.shape[2]
    rows = np.arange(len(table))
    while True:
        by_id = np.sort(table[rows], axis=2)
        rows = rows[((by_id[:, :, 1:] == by_id[:, :, :-1]) & (by_id[:, :, 1:] >= 0)).any(axis=(1, 2))]
        if len(rows) == 0:
            return
        mine, my_load = table[rows], load[rows]
        is_repeated = duplicate_slots(mine)
        first = is_repeated.reshape(len(rows), -1).argmax(axis=1)
        rank, slot = first // num_slots, first % num_slots
        each = np.arange(len(rows))
        expert, expert_load = mine[each, rank, slot], my_load[each, rank, slot]
        crowd = mine[each, rank]  # [x, K]
        held_by_crowd = (mine[:, :, :, None] == crowd[:, None, None, :]).any(axis=3) & (mine >= 0)
        lacks_expert = ~(mine == expert[:, None, None]).any(axis=2, keepdims=True)
        helps = lacks_expert & (is_repeated | ~held_by_crowd)
        cost = np.where(helps, np.abs(my_load - expert_load[:, None, None]), np.inf).reshape(len(rows), -1)
        best = cost.argmin(axis=1)
        can = np.isfinite(cost[each, best])
        if not can.any():
            return  # more replicas than ranks: nothing can be done
        rows, rank, slot, best = rows[can], rank[can], slot[can], best[can]
        other, other_slot = best // num_slots, best % num_slots
        for array in (table, load):
            kept = array[rows, rank, slot]
            array[rows, rank, slot] = array[rows, other, other_slot]
            array[rows, other, other_slot] = kept
