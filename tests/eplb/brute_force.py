"""Every placement of a tiny problem, as an oracle: sets of experts on ranks, all combinations."""

from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np


@cache
def all_placements(num_experts: int, num_ranks: int, slots: int) -> np.ndarray:
    """[placements, ranks, experts] bool: every way (ranks alike) to put at most `slots` different experts on each rank,
    with every expert somewhere."""
    sets = [s for k in range(slots + 1) for s in combinations(range(num_experts), k)]
    member = np.zeros((len(sets), num_experts), dtype=bool)
    for i, s in enumerate(sets):
        member[i, list(s)] = True
    chosen = np.array(list(combinations_with_replacement(range(len(sets)), num_ranks)))
    table = member[chosen]
    return table[table.any(axis=1).all(axis=1)]


def best_top(
    weight: np.ndarray, num_ranks: int, slots: int, min_replicas: int = 1, fixed: np.ndarray | float = 0.0
) -> float:
    """The lowest possible load of the heaviest rank: weight [E] (and the cost of each replica, fixed [E]) -> float."""
    table = all_placements(len(weight), num_ranks, slots)
    table = table[(table.sum(axis=1) >= min_replicas).all(axis=1)]
    each = np.where(table, (weight / table.sum(axis=1) + fixed)[:, None, :], 0.0)
    return float(each.sum(axis=2).max(axis=1).min())
