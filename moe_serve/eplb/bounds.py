"""How good any placement could be: upper bounds of balancedness under an even split, per layer.

Every bound here is a proof: no placement with these slots is better. Three arguments, from cheap to tight:
- the mean: the heaviest rank is at least the average one;
- the heaviest copy: with P slots, no choice of copies makes the heaviest copy lighter than minimax replication does;
- company: a rank of load at most T that holds a copy of more than T / 2 has K - 1 other slots, each empty or with a
  copy of at most T minus that one. So there must be enough light copies, and making copies light costs slots too.
  `counting_bound` proves for a given T that no choice of copies can have enough, by a linear program over (expert,
  copies) with one constraint per copy size.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.replication import minimax_counts

Floats = NDArray[np.float64]


def balancedness_bound(tokens: NDArray[np.number], num_ranks: int, slots_per_rank: int) -> Floats:
    """Returns the cheap bound, [L] float64: mean over the heaviest copy, at most 1.

    tokens: [L, E]; num_ranks: ranks that take part. It holds for uneven shares too: a copy never serves more than its
    rank does, so an expert of weight w needs w / T copies.
    """
    weight = np.asarray(tokens, dtype=np.float64)
    counts = minimax_counts(weight, num_ranks * slots_per_rank, num_ranks)
    heaviest = (weight / counts).max(axis=1)
    mean = weight.sum(axis=1) / num_ranks
    return np.where(heaviest > 0, np.minimum(1.0, mean / np.where(heaviest > 0, heaviest, 1.0)), 1.0)
