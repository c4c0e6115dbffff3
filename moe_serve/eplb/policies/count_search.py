"""Chooses replica counts and packing together, for two to four slots per rank.

Minimax replication makes the heaviest replica light. With few slots per rank, though, what a heavy replica shares its
rank with matters more: often it is better to split a small expert, whose halves then sit beside heavy replicas.

With two slots per rank the best packing of given replicas is known (lightest beside heaviest), so the search tries
thousands of counts alone, all layers at once. With three or four slots it packs and compares a few apportionments.

Shape words: L = layers, E = experts, M = proposals per layer and iteration.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import pack_in_rounds, pack_longest_first, repair_duplicates
from moe_serve.eplb.policies.replication import apportion, list_replicas, minimax_counts, replica_load
from moe_serve.eplb.policies.swapping import Deadline, swap_until_even

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]

# (rounding, power) of `apportion` that win on Zipf and lognormal loads where minimax (0, 1) does not.
APPORTIONMENTS = ((0.0, 0.85), (0.25, 0.85), (0.75, 0.7), (0.75, 1.0), (1.0, 0.85), (0.5, 1.15), (0.0, 0.7), (0.5, 0.7))


def search_pair_counts(
    weight: Floats,
    num_ranks: int,
    iterations: int,
    seed: int,
    fixed: Floats | None = None,
    proposals: int = 16,
    deadline: Deadline | None = None,
    min_replicas: int = 1,
) -> tuple[Counts, bool]:
    """Returns replica counts for two slots per rank, [L, E] int64, and whether the deadline cut the search short.

    Every iteration proposes M exchanges in each layer (one or two replicas from experts that stay light without them go
    to others) and keeps the best if a steep power mean of the pair loads does not rise. Never worse than minimax.
    """
    num_layers, num_experts = weight.shape
    num_slots = 2 * num_ranks
    mean = weight.sum(axis=1) / num_ranks
    unit = weight / np.where(mean > 0, mean, 1.0)[:, None]
    unit_fixed = None if fixed is None else fixed / np.where(mean > 0, mean, 1.0)[:, None]
    counts, top = _start(unit, unit_fixed, num_slots, num_ranks, min_replicas)
    best, best_top = counts.copy(), top.copy()
    draw = np.random.default_rng(seed)
    layer = np.arange(num_layers)
    many_unit = np.repeat(unit, proposals, axis=0)
    many_fixed = None if unit_fixed is None else np.repeat(unit_fixed, proposals, axis=0)
    reference, value = top, np.zeros(num_layers, dtype=np.float32)
    for iteration in range(iterations):
        if deadline is not None and deadline.passed:
            return best, True
        if iteration % 20 == 0:  # keep the power mean in the range of float32 as the maximum falls
            pairs = _pair_loads(unit, counts, unit_fixed, num_slots)
            reference = np.maximum(pairs.max(axis=1), np.float32(1e-30))
            value = _power_sum(pairs, reference)
        tried = _propose(unit, counts, proposals, (min_replicas, num_ranks), draw)
        pairs = _pair_loads(many_unit, tried.reshape(-1, num_experts), many_fixed, num_slots)
        values = _power_sum(pairs, np.repeat(reference, proposals)).reshape(num_layers, proposals)
        chosen = values.argmin(axis=1)
        ok = values[layer, chosen] <= value
        counts = np.where(ok[:, None], tried[layer, chosen], counts)
        value = np.where(ok, values[layer, chosen], value)
        top = pairs.max(axis=1).reshape(num_layers, proposals)[layer, chosen]
        better = ok & (top < best_top)
        best[better], best_top[better] = counts[better], top[better]
    return best, False


def _start(
    unit: Floats, fixed: Floats | None, num_slots: int, num_ranks: int, min_replicas: int
) -> tuple[Counts, Singles]:
    """Returns the best counts over all a: minimax with a replicas fewer, and the a lightest experts split instead."""
    num_experts = unit.shape[1]
    lightest = np.argsort(unit, axis=1, kind="stable")
    best, best_top = None, np.full(len(unit), np.inf, dtype=np.float32)
    spare = num_slots - num_experts * min_replicas
    for split in range(0, min(spare, num_experts) + 1, max(1, spare // 16)):
        counts = minimax_counts(unit, num_slots - split, num_ranks, fixed, min_replicas)
        light = lightest[:, :split]
        now = np.take_along_axis(counts, light, axis=1)
        np.put_along_axis(counts, light, np.minimum(now + 1, num_ranks), axis=1)
        top = _pair_loads(unit, counts, fixed, num_slots).max(axis=1)
        best = counts if best is None else np.where((top < best_top)[:, None], counts, best)
        best_top = np.minimum(best_top, top)
    assert best is not None
    return best, best_top


def _propose(
    unit: Floats, counts: Counts, proposals: int, limits: tuple[int, int], draw: np.random.Generator
) -> Counts:
    """Returns counts [L, M, E] that differ from `counts` [L, E] by one or two replicas moved between experts.

    limits: fewest and most replicas of an expert
    """
    num_layers, num_experts = counts.shape
    min_replicas, max_replicas = limits
    x, m = np.arange(num_layers)[:, None], np.arange(proposals)[None, :]
    can_give = counts > min_replicas
    givers = np.argsort(np.where(can_give, unit / np.maximum(counts - 1, 1), np.inf), axis=1, kind="stable")
    takers = np.argsort(unit / (counts + 1), axis=1, kind="stable")
    num_givers = can_give.sum(axis=1, keepdims=True)
    tried = np.repeat(counts[:, None], proposals, axis=1)
    random = draw.random((4, num_layers, proposals))
    for step in range(2):
        giver = givers[x, (num_givers * random[2 * step] ** 1.5).astype(np.int64)]
        position = random[2 * step + 1].copy()
        position[:, : proposals // 2] **= 2  # half of the proposals prefer the lightest experts
        taker = takers[x, (num_experts * position).astype(np.int64)]
        # Every third proposal moves two replicas.
        moved = (num_givers > 0) & ((m % 3 == 0) | (step == 0))
        tried[x, m, giver] -= moved
        tried[x, m, taker] += moved
    illegal = ((tried < min_replicas) | (tried > max_replicas)).any(axis=2)
    rows, columns = np.nonzero(illegal)
    tried[rows, columns] = counts[rows]
    return tried


def _pair_loads(unit: Floats, counts: Counts, fixed: Floats | None, num_slots: int) -> Singles:
    """Returns rank loads with the lightest replica beside the heaviest, and so on: [X, num_slots / 2] float32."""
    each = (unit / counts if fixed is None else unit / counts + fixed).astype(np.float32)
    empty = num_slots - counts.sum(axis=1, keepdims=True)
    repeats = np.concatenate([counts, empty], axis=1)
    values = np.concatenate([each, np.zeros((len(unit), 1), dtype=np.float32)], axis=1)
    replicas = np.repeat(values.ravel(), repeats.ravel()).reshape(len(unit), num_slots)
    replicas.sort(axis=1)
    half = num_slots // 2
    pairs: Singles = replicas[:, :half] + replicas[:, : half - 1 : -1]
    return pairs


def _power_sum(pairs: Singles, reference: Singles) -> Singles:
    """Returns the sum of (pair / reference) ** 64: smooth, but dominated by the heaviest pairs."""
    power = np.minimum(pairs / reference[:, None], np.float32(3.5))  # 3.5 ** 64 x 2^10 stays finite in float32
    for _ in range(6):
        power *= power
    total: Singles = power.sum(axis=1)
    return total


def try_apportionments(
    weight: Floats,
    num_ranks: int,
    slots_per_rank: int,
    sweeps: int,
    deadline: Deadline | None = None,
    min_replicas: int = 1,
) -> Iterator[tuple[Ids, Floats, bool]]:
    """Yields (table [L, R, K], its loads [L, R, K], deadline passed) for each apportionment of replicas."""
    num_layers = len(weight)
    num_slots = num_ranks * slots_per_rank
    tried: list[Counts] = []
    for rounding, power in APPORTIONMENTS:
        how = np.full(num_layers, rounding), np.full(num_layers, power)
        counts = apportion(weight, num_slots, num_ranks, *how, min_replicas)
        if any(np.array_equal(counts, other) for other in tried):
            continue  # all are the same where no slot is spare
        tried.append(counts)
        replicas = list_replicas(counts, num_slots)
        load = replica_load(weight, counts, replicas)
        table, packed = pack_longest_first(replicas, load, num_ranks)
        repair_duplicates(table, packed)
        cut = swap_until_even(table, packed, sweeps, deadline=deadline)
        yield table, packed, cut
        if cut:
            return


def pack_pairs(weight: Floats, counts: Counts, num_ranks: int, fixed: Floats | None = None) -> tuple[Ids, Floats]:
    """Returns the best packing of these replicas with two slots per rank, free of duplicates."""
    replicas = list_replicas(counts, 2 * num_ranks)
    table, load = pack_in_rounds(replicas, replica_load(weight, counts, replicas, fixed), num_ranks)
    repair_duplicates(table, load)
    return table, load
