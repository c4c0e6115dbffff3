"""Anneals replica counts with a full packing for every trial: the thorough search for few slots.

Each layer has several independent chains. A trial moves one or two replicas between experts, packs, swaps, and is kept
unless it is much worse; the tolerance shrinks from round to round. Larger problems get fewer chains, so that a round
costs about the same: small problems are searched nearly to the optimum, large ones only a little.

Shape words: L = layers, C = chains, X = L x C.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.bounds import lightest_top
from moe_serve.eplb.policies.packing import pack_in_rounds, pack_longest_first, repair_duplicates
from moe_serve.eplb.policies.replication import list_replicas, replica_load, replicas_in
from moe_serve.eplb.policies.swapping import Deadline, swap_until_even

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]

_AT_THE_BOUND = 1e-4  # a heaviest rank this share above what is proved is not worth a search


def anneal_counts(
    weight: Floats,
    table: Ids,
    rounds: int,
    seed: int,
    fixed: Floats | None = None,
    good_enough: float = 0.999,
    deadline: Deadline | None = None,
    replicas_per_round: int = 10_000,
    min_replicas: int = 1,
) -> bool:
    """Improves tables in place; returns whether the deadline cut the search short.

    weight: [L, E]; table: [L, R, K], the start; a layer's table is replaced only by a better one
    replicas_per_round: replicas in all trials of a round together; sets the number of chains
    good_enough: balancedness at which a layer is left alone, as it is where no placement can be better
    """
    num_layers, num_ranks, slots = table.shape
    num_experts = weight.shape[1]
    num_slots = num_ranks * slots
    chains = int(np.clip(replicas_per_round // max(1, num_layers * num_slots), 1, 48))
    limits = (min_replicas, num_ranks)
    draw = np.random.default_rng(seed)
    top_of = _tops(weight, table, fixed)
    mean = weight.sum(axis=1) / num_ranks + (0.0 if fixed is None else fixed.sum(axis=1) / num_ranks)
    lightest = lightest_top(weight, num_ranks, slots, fixed, min_replicas) * (1 + _AT_THE_BOUND)
    counts = np.repeat(replicas_in(table, num_experts), chains, axis=0)
    current = np.repeat(top_of, chains)
    for step in range(rounds):
        if deadline is not None and deadline.passed:
            return True
        going = np.flatnonzero((top_of * good_enough > mean) & (top_of > lightest))
        if len(going) == 0:
            return False
        rows = (going[:, None] * chains + np.arange(chains)).ravel()
        layer = np.repeat(going, chains)
        tried = _neighbours(counts[rows], weight[layer], limits, num_slots, draw)
        if num_experts <= 8:  # so few counts that random ones find what small steps miss
            dice = rows % 2 == 1
            tried[dice] = _any_counts(int(dice.sum()), num_experts, limits, num_slots, draw)
        own = None if fixed is None else fixed[layer]
        packed, load = _pack(tried, weight[layer], own, num_ranks, slots, slots == 2 and step % 2 == 0, draw)
        top = load.sum(axis=2).max(axis=1)
        patience = 0.06 * (1 - step / rounds) ** 2
        keep = top <= current[rows] * (1 + patience * draw.random(len(rows)))
        counts[rows[keep]], current[rows[keep]] = tried[keep], top[keep]
        by_layer = top.reshape(len(going), chains)
        winner = by_layer.argmin(axis=1)
        value = by_layer[np.arange(len(going)), winner]
        better = value < top_of[going] * (1 - 1e-12)
        chosen = packed.reshape(len(going), chains, num_ranks, slots)[np.arange(len(going)), winner]
        table[going[better]], top_of[going[better]] = chosen[better], value[better]
    return False


def _pack(
    counts: NDArray[np.int64],
    weight: Floats,
    fixed: Floats | None,
    num_ranks: int,
    slots: int,
    in_pairs: bool,
    draw: np.random.Generator,
) -> tuple[Ids, Floats]:
    """Returns the tables [X, R, K] of these counts [X, E] and the load of each slot; in_pairs: two slots per rank."""
    replicas = list_replicas(counts, num_ranks * slots)
    load = replica_load(weight, counts, replicas, fixed)
    if in_pairs:
        # Optimal, unless experts with many replicas had to be kept apart.
        packed, load = pack_in_rounds(replicas, load, num_ranks)
        repair_duplicates(packed, load)
        return packed, load
    # Perturb the loads, so that the same counts get different packings in different trials.
    packed, _ = pack_longest_first(replicas, load * draw.uniform(0.8, 1.25, load.shape), num_ranks)
    load = replica_load(weight, counts, packed, fixed)
    repair_duplicates(packed, load)
    swap_until_even(packed, load, 16, tolerance=1e-4)
    return packed, load


def _neighbours(
    counts: NDArray[np.int64], weight: Floats, limits: tuple[int, int], num_slots: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Returns counts [X, E] with one to three replicas moved between experts, or to or from an empty slot.

    limits: fewest and most replicas of an expert
    """
    min_replicas, max_replicas = limits
    tried = counts.copy()
    rows = np.arange(len(counts))
    num_moves = draw.integers(1, 4, len(counts))
    for step in range(3):
        moving = step < num_moves
        spare = np.where(tried > min_replicas, draw.random(tried.shape), -1.0)
        giver = spare.argmax(axis=1)
        can_give = spare[rows, giver] >= 0
        # Draw takers by a softened replica load: heavy replicas are split more often, but any expert can be.
        wish = draw.random(tried.shape) ** (1.0 / (0.3 + weight / tried / (weight.max(axis=1, keepdims=True) + 1e-300)))
        taker = np.where(tried < max_replicas, wish, -1.0).argmax(axis=1)
        can_take = tried[rows, taker] < max_replicas
        full = tried.sum(axis=1) >= num_slots
        give = moving & can_give & (full | (draw.random(len(counts)) < 0.3))
        tried[rows[give], giver[give]] -= 1
        # One replica fewer can allow a better packing, so a slot may also stay empty.
        take = moving & can_take & (draw.random(len(counts)) < 0.8) & (tried.sum(axis=1) < num_slots)
        tried[rows[take], taker[take]] += 1
    return tried


def _any_counts(
    num_rows: int, num_experts: int, limits: tuple[int, int], num_slots: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Returns counts [num_rows, E] drawn from all that fit the slots and the limits of an expert's replicas."""
    min_replicas, max_replicas = limits
    extra = draw.integers(0, num_slots - num_experts * min_replicas + 1, num_rows)
    share = draw.dirichlet(np.ones(num_experts), num_rows)
    return np.minimum(min_replicas + draw.multinomial(extra, share), max_replicas)


def _tops(weight: Floats, table: Ids, fixed: Floats | None) -> Floats:
    counts = np.maximum(replicas_in(table, weight.shape[1]), 1)
    top: Floats = replica_load(weight, counts, table, fixed).sum(axis=2).max(axis=1)
    return top
