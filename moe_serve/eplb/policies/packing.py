"""Decides how many replicas each expert gets, packs them onto ranks, and proves how even any placement could be.

Replicas are packed in rounds or longest first, without duplicates, and swapped until ranks are even. All rows are
planned at once; the effort of swaps is counted in sweeps. Every rank has the same number of slots; an empty slot is the
replica -1 with load 0.

The bounds hold for an even split: no placement with these slots is better. Three arguments, from cheap to tight:
- the mean: the heaviest rank carries at least the mean load;
- the heaviest replica: with P slots, no choice of replicas makes the heaviest replica lighter than minimax replication
  does;
- few spare slots: a rank that holds a replica has K - 1 other slots. Each is empty, or holds a replica of an expert
  with more replicas than it needs, or is one of the lightest replicas at best; and the first two take spare slots, of
  which the replica's own expert may have taken some (`lightest_top`).

Shape words: X = rows planned at once (layers, or layers x nodes), E = experts of a row, R = ranks of a row, K = slots
per rank, n = R x K replicas of a row; of bounds: L = layers, P = slots.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import count_replicas

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Ids = NDArray[np.int32]


def minimax_counts(
    weight: Floats, num_replicas: int, max_replicas: int, fixed: Floats | None = None, min_replicas: int = 1
) -> Counts:
    """Returns the replicas of each expert so that the heaviest replica is as light as it can be.

    weight:     [X, E] float64 >= 0
    num_replicas: replicas to hand out per row; at least E x min_replicas. Fewer are used where every expert has
                max_replicas already
    max_replicas: most replicas of one expert (the ranks that could hold one each)
    fixed:      [X, E] cost that each replica has on its own, on top of its share weight / replicas; None = none
    returns:    [X, E] int64 >= min_replicas

    Giving the next replica to the currently heaviest one is exact: it is Adams' method of apportionment. Replicas of
    experts without load go to the expert with the fewest.
    """
    num_rows, num_experts = weight.shape
    if num_rows == 0:
        return np.ones((0, num_experts), dtype=np.int64)
    total = min(num_replicas, num_experts * max_replicas)
    if fixed is None:
        counts = _sure_counts(weight, total, min_replicas, max_replicas)
    else:
        counts = np.full(weight.shape, min_replicas, dtype=np.int64)
    spare = total - counts.sum(axis=1)
    rows = np.arange(num_rows)
    key = _replica_key(weight, counts, fixed)
    key[counts >= max_replicas] = -np.inf
    for step in range(int(spare.max(initial=0))):
        take = rows if step < spare.min() else rows[spare > step]
        heaviest = key[take].argmax(axis=1) if len(take) < num_rows else key.argmax(axis=1)
        counts[take, heaviest] += 1
        now = counts[take, heaviest]
        load = weight[take, heaviest]
        value = np.where(load > 0, load / now, -now.astype(np.float64))
        if fixed is not None:
            value = value + fixed[take, heaviest]
        key[take, heaviest] = np.where(now >= max_replicas, -np.inf, value)
    return counts


def _replica_key(weight: Floats, counts: Counts, fixed: Floats | None) -> Floats:
    key = np.where(weight > 0, weight / counts, -counts.astype(np.float64))
    return key if fixed is None else key + fixed


def _sure_counts(weight: Floats, total: int, min_replicas: int, max_replicas: int) -> Counts:
    """Returns counts that the one-by-one method passes through.

    It splits all replicas above a load t first, so ceil(weight / t), at least min_replicas, is one of its states for
    every t at which that needs at most `total` replicas.
    """
    least = min_replicas * weight.shape[1]
    spread = max(total - least, 0)
    if spread == 0:
        return np.full(weight.shape, min_replicas, dtype=np.int64)
    safe = weight.sum(axis=1, keepdims=True) / spread  # sum of ceil(w / t) <= sum of w / t + least = total
    low, high = safe * (spread / total), safe
    counts = _counts_at(weight, high, min_replicas, max_replicas)
    for _ in range(min(12, spread // 8)):
        middle = 0.5 * (low + high)
        tried = _counts_at(weight, middle, min_replicas, max_replicas)
        fits = tried.sum(axis=1, keepdims=True) <= total
        counts = np.where(fits, tried, counts)
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    return counts


def _counts_at(weight: Floats, load: Floats, min_replicas: int, max_replicas: int) -> Counts:
    # Slightly less than exact division, so that rounding never gives a replica that the one-by-one method would not.
    quotient = np.divide(weight * (1 - 1e-12), load, out=np.zeros_like(weight), where=load > 0)
    return np.clip(np.ceil(quotient), min_replicas, max_replicas).astype(np.int64)


def apportion(
    weight: Floats, num_replicas: int, max_replicas: int, rounding: Floats, power: Floats, min_replicas: int = 1
) -> Counts:
    """Returns counts by a divisor method: the next replica goes to the largest weight**power / (replicas + rounding).

    rounding: [X] 0 = Adams (minimax), 0.5 = Webster (proportional), 1 = Jefferson
    power:    [X] flattens (< 1) or sharpens (> 1) the load first
    `RefinedPolicy` tries such counts where minimax counts cannot be packed well.
    """
    num_rows, num_experts = weight.shape
    total = min(num_replicas, num_experts * max_replicas)
    scaled = weight ** power[:, None]
    counts = np.full(weight.shape, min_replicas, dtype=np.int64)
    rows = np.arange(num_rows)
    key = scaled / (min_replicas + rounding[:, None])
    if min_replicas == max_replicas:
        return counts
    for _ in range(total - num_experts * min_replicas):
        heaviest = key.argmax(axis=1)
        counts[rows, heaviest] += 1
        now = counts[rows, heaviest]
        key[rows, heaviest] = np.where(now >= max_replicas, -np.inf, scaled[rows, heaviest] / (now + rounding))
    return counts


def list_replicas(counts: Counts, num_slots: int) -> NDArray[np.int32]:
    """Returns one expert id per replica, ascending, -1 for slots left over: [X, E] -> [X, num_slots] int32."""
    num_rows, num_experts = counts.shape
    empty = num_slots - counts.sum(axis=1, keepdims=True)
    assert (empty >= 0).all(), "more replicas than slots"
    repeats = np.concatenate([counts, empty], axis=1).ravel()
    ids = np.tile(np.append(np.arange(num_experts, dtype=np.int32), np.int32(-1)), num_rows)
    return np.repeat(ids, repeats).reshape(num_rows, num_slots)


def replica_load(weight: Floats, counts: Counts, replicas: NDArray[np.int32], fixed: Floats | None = None) -> Floats:
    """Returns the load of each replica under an even split, 0 for empty slots: [X, n] int32 -> [X, n] float64."""
    per_replica = weight / counts
    if fixed is not None:
        per_replica = per_replica + fixed
    flat = replicas.reshape(len(replicas), -1)
    load = np.take_along_axis(per_replica, np.where(flat < 0, 0, flat), axis=1)
    return np.where(flat < 0, 0.0, load).reshape(replicas.shape)


def replicas_in(table: NDArray[np.int32], num_experts: int) -> Counts:
    """Returns how many replicas each expert has in a table: [L, R, K] (-1 = empty) -> [L, E] int64."""
    return count_replicas(table.reshape(len(table), -1), num_experts).astype(np.int64)


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


@dataclass(frozen=True)
class Deadline:
    """A stop on the wall clock; None = never."""

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        return cls(None if seconds is None else time.perf_counter() + seconds)

    @property
    def passed(self) -> bool:
        return self.at is not None and time.perf_counter() >= self.at


def swap_until_even(
    table: Ids, load: Floats, sweeps: int, tolerance: float = 3e-4, deadline: Deadline | None = None
) -> bool:
    """Swaps replicas in place until the heaviest rank of each row is within `tolerance` of the mean, or for `sweeps`.

    table: [X, R, K] int32 expert ids, load: [X, R, K] float64. Never makes a rank hold an expert twice.
    Returns True when the deadline stopped it.

    A sweep pairs heavy ranks with light ones and makes in each pair the swap that evens it most; later sweeps pair them
    differently. Where pairs no longer help the heaviest rank, it is compared with all ranks.
    """
    num_ranks = table.shape[1]
    if num_ranks < 2 or len(table) == 0:
        return False
    mean = load.sum(axis=(1, 2)) / num_ranks
    active = np.arange(len(table))
    work_table, work_load = table, load
    stalled = np.zeros(len(table), dtype=np.int64)
    half = num_ranks // 2
    for sweep in range(sweeps):
        total = work_load.sum(axis=2)
        going = (total.max(axis=1) > mean[active] * (1 + tolerance)) & (stalled < 4)
        if not going.all():
            table[active], load[active] = work_table, work_load
            active, stalled = active[going], stalled[going]
            work_table, work_load, total = table[active], load[active], total[going]
        if len(active) == 0:
            return False
        if deadline is not None and deadline.passed:
            table[active], load[active] = work_table, work_load
            return True
        order = np.argsort(total, axis=1, kind="stable")
        heavy = order[:, ::-1][:, :half]
        light = np.roll(order[:, :half], sweep * sweep % half if sweep > 1 else 0, axis=1)
        if sweep % 3 == 2:
            improved = _swap_worst(work_table, work_load, total, order[:, -1])
            stalled = np.where(improved, 0, stalled + 1)
        else:
            _swap_pairs(work_table, work_load, total, heavy, light)
    table[active], load[active] = work_table, work_load
    return False


def _swap_pairs(table: Ids, load: Floats, total: Floats, heavy: NDArray[np.int64], light: NDArray[np.int64]) -> None:
    """Makes the swap that evens each (heavy, light) pair of ranks most: heavy, light [X, pairs]."""
    num_rows, num_pairs = heavy.shape
    slots = table.shape[2]
    rows = np.arange(num_rows)[:, None]
    heavy_ids, light_ids = table[rows, heavy], table[rows, light]  # [X, pairs, K]
    heavy_load, light_load = load[rows, heavy], load[rows, light]
    half_gap = 0.5 * (total[rows, heavy] - total[rows, light])
    # A swap that moves d from the heavy to the light rank leaves them 2 |half_gap - d| apart.
    apart = heavy_load[:, :, :, None] - light_load[:, :, None, :]
    apart -= half_gap[:, :, None, None]
    np.abs(apart, out=apart)
    same = heavy_ids[:, :, :, None] == light_ids[:, :, None, :]
    same &= (heavy_ids >= 0)[:, :, :, None]
    if same.any():
        apart[same.any(axis=3)] = np.inf
        apart.transpose(0, 1, 3, 2)[same.any(axis=2)] = np.inf
    flat = apart.reshape(num_rows, num_pairs, slots * slots)
    best = flat.argmin(axis=2)
    gain = half_gap - np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]
    x, p = np.nonzero(gain > 1e-12 * (half_gap + 1e-300))
    _exchange(table, load, x, heavy[x, p], best[x, p] // slots, light[x, p], best[x, p] % slots)


def _swap_worst(table: Ids, load: Floats, total: Floats, worst: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Makes, for the heaviest rank of each row, the swap with any rank that leaves the lowest maximum of the two."""
    num_rows, num_ranks, slots = table.shape
    each = np.arange(num_rows)
    ids, own = table[each, worst], load[each, worst]  # [X, K]
    top = total[each, worst]
    delta = own[:, :, None, None] - load[:, None, :, :]  # [X, K, R, K], what the swap moves away
    new_other = total[:, None, :, None] + delta
    result = np.maximum(top[:, None, None, None] - delta, new_other)
    same = (ids[:, :, None, None] == table[:, None, :, :]) & (ids >= 0)[:, :, None, None]
    result[same.any(axis=3)] = np.inf
    other_holds = same.any(axis=1)  # [X, R, K]: the other replica is on the worst rank already
    result = np.where(other_holds[:, None], np.inf, result)
    result[each, :, worst] = np.inf
    flat = result.reshape(num_rows, -1)
    best = flat.argmin(axis=1)
    improved: NDArray[np.bool_] = flat[each, best] < top * (1 - 1e-12)
    x = np.flatnonzero(improved)
    mine, other = best // (num_ranks * slots), best % (num_ranks * slots)
    _exchange(table, load, x, worst[x], mine[x], other[x] // slots, other[x] % slots)
    return improved


def _exchange(
    table: Ids,
    load: Floats,
    rows: NDArray[np.int64],
    rank: NDArray[np.int64],
    slot: NDArray[np.int64],
    other: NDArray[np.int64],
    other_slot: NDArray[np.int64],
) -> None:
    for array in (table, load):
        kept = array[rows, rank, slot]
        array[rows, rank, slot] = array[rows, other, other_slot]
        array[rows, other, other_slot] = kept


def balancedness_bound(
    tokens: NDArray[np.number], num_ranks: int, slots_per_rank: int, heaviest: Floats | None = None
) -> Floats:
    """Returns the bound of an even split, [L] float64: mean over the heaviest replica, at most 1.

    tokens: [L, E]; num_ranks: ranks that take part; heaviest: [L] heaviest replica of minimax replication, if known
    The bound holds for uneven shares too: a replica never serves more than its rank, so an expert of weight w needs
    w / T replicas.
    """
    weight = np.asarray(tokens, dtype=np.float64)
    if heaviest is None:
        heaviest = (weight / minimax_counts(weight, num_ranks * slots_per_rank, num_ranks)).max(axis=1)
    mean = weight.sum(axis=1) / num_ranks
    return np.where(heaviest > 0, np.minimum(1.0, mean / np.where(heaviest > 0, heaviest, 1.0)), 1.0)


def lightest_top(
    weight: Floats, num_ranks: int, slots_per_rank: int, fixed: Floats | None = None, min_replicas: int = 1
) -> Floats:
    """Returns the load below which no placement can bring the heaviest rank of a layer, [L] float64.

    weight: [L, E], which replicas share evenly; fixed: [L, E] cost of each replica on its own, or None
    Tight where experts are about as many as slots. Works on [L, E, replicas of an expert] at once.
    """
    num_slots, num_experts = num_ranks * slots_per_rank, weight.shape[1]
    own = np.zeros_like(weight) if fixed is None else fixed
    mean = (weight.sum(axis=1) + own.sum(axis=1)) / num_ranks
    counts = minimax_counts(weight, num_slots, num_ranks, fixed, min_replicas)
    heaviest = (weight / counts + own).max(axis=1)
    spare = num_slots - num_experts * min_replicas
    replicas = np.arange(min_replicas, min(num_ranks, min_replicas + spare) + 1)
    left = spare - (replicas - min_replicas)
    each = weight[:, :, None] / replicas + own[:, :, None]
    lightest = np.sort(weight / min_replicas + own, axis=1)
    # One rank: its companions are of different experts, so a spare slot changes one of them.
    on_one = _sum_of_first(lightest, slots_per_rank - 1 - left)
    # All ranks with a replica of the expert: a spare slot changes all replicas of another expert.
    companions = replicas * (slots_per_rank - 1) - (min_replicas + 1) * left
    on_all = _sum_of_first(np.repeat(lightest, min_replicas, axis=1), companions) / replicas
    with_company = (each + np.maximum(on_one, on_all)[:, None, :]).min(axis=2).max(axis=1)
    top: Floats = np.maximum.reduce([mean, heaviest, with_company])
    return top


def _sum_of_first(values: Floats, counts: NDArray[np.int64]) -> Floats:
    """Returns the sums of the first counts[i] values of each row: [L, X], [N] -> [L, N]."""
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return sums[:, np.clip(counts, 0, values.shape[1])]
