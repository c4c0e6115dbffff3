"""Decides how many replicas each expert gets, before they are placed.

Shape words: X = rows planned at once (layers, or layers x nodes), E = experts of a row, n = replicas of a row.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


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
    num_layers = len(table)
    key = np.arange(num_layers)[:, None, None] * (num_experts + 1) + table + 1
    counts = np.bincount(key.ravel(), minlength=num_layers * (num_experts + 1))
    return counts.reshape(num_layers, num_experts + 1)[:, 1:]
