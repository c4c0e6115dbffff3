"""Upper bounds of the balancedness that any placement can reach under an even split, per layer.

Each bound is proved: no placement with these slots is better. Four arguments, from cheap to tight:
- the mean: the heaviest rank carries at least the mean load;
- the heaviest replica: with P slots, no choice of replicas makes the heaviest replica lighter than minimax replication
  does;
- few spare slots: a rank that holds a replica has K - 1 other slots. Each is empty, or holds a replica of an expert
  with more replicas than it needs, or is one of the lightest replicas at best; and the first two take spare slots, of
  which the replica's own expert may have taken some (`lightest_top`);
- company: a rank of load at most T that holds a replica of more than T / 2 has K - 1 other slots, each empty or with a
  replica of at most T minus that one. So there must be enough light replicas, and making replicas light costs slots
  too. `counting_bound` proves for a given T that no choice of replicas can have enough, by a linear program over
  (expert, replicas) with one constraint per replica size.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import minimax_counts

Floats = NDArray[np.float64]


def balancedness_bound(
    tokens: NDArray[np.number], num_ranks: int, slots_per_rank: int, heaviest: Floats | None = None
) -> Floats:
    """Returns the cheap bound, [L] float64: mean over the heaviest replica, at most 1.

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


def counting_bound(
    tokens: NDArray[np.number],
    num_ranks: int,
    slots_per_rank: int,
    reached: Floats | None = None,
    accuracy: float = 2e-3,
) -> Floats:
    """Returns the tight bound of an even split, [L] float64, by bisection over linear programs (0.1 s per layer).

    reached: [L] balancedness of some placement; the bound is searched above it, to within `accuracy`
    Worth its time with two to four slots per rank, where the cheap bound is loose.
    """
    weight = np.asarray(tokens, dtype=np.float64)
    cheap = balancedness_bound(weight, num_ranks, slots_per_rank)
    known = np.zeros(len(weight)) if reached is None else reached
    out = cheap.copy()
    for layer, load in enumerate(weight):
        mean = load.sum() / num_ranks
        low, high = (
            float(known[layer]),
            float(cheap[layer]),
        )  # proved possible, or nothing known; proved impossible above
        if mean <= 0 or slots_per_rank < 2:
            continue
        while high - low > accuracy:
            middle = 0.5 * (low + high)
            if _may_be_possible(load / mean, num_ranks, slots_per_rank, 1.0 / middle):
                low = middle
            else:
                high = middle
        out[layer] = high
    return np.maximum(out, known)


def _may_be_possible(load: Floats, num_ranks: int, slots_per_rank: int, top: float) -> bool:
    """Returns False only if no choice of replicas can keep every rank at or below `top`: load [E] in mean rank loads.

    The linear program chooses fractions of (expert, replicas). For every size t > top / 2 it asks that ranks with a
    replica of size >= t (one per rank) find K - 1 companions of size <= top - t. Empty slots count as companions, and
    so do all replicas of an expert with the most replicas considered: more of them cost more slots and are no lighter
    than empty.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    num_experts, num_slots = len(load), num_ranks * slots_per_rank
    spare = num_slots - num_experts
    most = min(num_ranks, spare + 1, max(12, int(np.ceil(load.max() / top)) + 4))
    replicas = np.tile(np.arange(1, most + 1), num_experts)
    expert = np.repeat(np.arange(num_experts), most)
    size = load[expert] / replicas
    if most < min(num_ranks, spare + 1):
        size = np.where(replicas == most, 0.0, size)
    keep = size <= top
    replicas, expert, size = replicas[keep], expert[keep], size[keep]
    if len(np.unique(expert)) < num_experts:
        return False
    levels = np.unique(size[size > top / 2])
    heavy = size[None, :] >= levels[:, None]
    light = size[None, :] <= top - levels[:, None]
    # (K - 1) heavy <= light + empty, with empty = num_slots - all replicas
    rows = replicas * ((slots_per_rank - 1) * heavy.astype(float) - light + 1.0)
    limits = np.concatenate([rows, replicas[None, :]]), np.full(len(levels) + 1, float(num_slots))
    one_each = csr_matrix((np.ones(len(expert)), (expert, np.arange(len(expert)))), shape=(num_experts, len(expert)))
    result = linprog(
        np.zeros(len(expert)), A_ub=limits[0], b_ub=limits[1], A_eq=one_each, b_eq=np.ones(num_experts), method="highs"
    )
    return bool(result.status != 2)  # anything but a proof of infeasibility leaves it possible
