"""Plans uneven shares of an expert's tokens over its replicas, so that rank loads become even.

These shares are fixed until the next plan; the split of a single batch is in `split/`.

Shape words: L = layers, E = experts, R = ranks, P = slots.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import slot_load
from moe_serve.eplb.placement import Placement

Floats = NDArray[np.float64]


def even_out_shares(tokens: NDArray[np.number], placement: Placement, sweeps: int = 60) -> Floats:
    """Returns the share of its expert's tokens that each slot serves, [L, P] float64; shares of an expert sum to 1.
    tokens: [L, E]

    Water-filling: one replicated expert after the other spreads its whole load over its ranks up to a common level.
    Each step is exact for its expert and never raises the maximum, so sweeps approach the optimum of the linear program
    from above. All layers take the same step at once.
    """
    num_layers = placement.num_layers
    load = slot_load(tokens, placement)
    total = load.reshape(num_layers, placement.num_ranks, -1).sum(axis=2)
    whole = np.asarray(tokens, dtype=np.float64)
    count = placement.replica_count
    width = int((count > 1).sum(axis=1).max(initial=0))
    # Replicated experts of each layer, heaviest first; layers with fewer repeat one whose step changes nothing.
    order = np.argsort(-np.where(count > 1, whole, -1.0), axis=1, kind="stable")[:, :width]
    rows = np.arange(num_layers)
    best, best_top = load.copy(), total.max(axis=1)
    for _ in range(sweeps if width else 0):
        for i in range(width):
            expert = order[:, i]
            slots = placement.logical_to_physical[rows, expert]  # [L, max_replicas]
            used = (slots >= 0) & (count[rows, expert] > 1)[:, None]
            slots = np.where(used, slots, 0)
            rank = slots // placement.slots_per_rank
            own = np.where(used, load[rows[:, None], slots], 0.0)
            # Replicas of an expert on the same rank count each other's load as the rank's.
            rest = np.where(used, total[rows[:, None], rank] - own, np.inf)
            new = np.where(used, _fill_to_a_level(rest, whole[rows, expert]), 0.0)
            x, c = np.nonzero(used)
            load[x, slots[x, c]] = new[x, c]
            np.add.at(total, (x, rank[x, c]), new[x, c] - own[x, c])
        top = total.max(axis=1)
        better = top < best_top * (1 - 1e-9)
        best[better], best_top[better] = load[better], top[better]
        if not better.any():
            break
    safe = np.where(placement.physical_to_logical < 0, 0, placement.physical_to_logical)
    of_expert = np.take_along_axis(whole, safe, axis=1)
    even = 1.0 / np.maximum(np.take_along_axis(count, safe, axis=1), 1)
    shares = np.divide(best, of_expert, out=even.copy(), where=of_expert > 0)
    return np.where(placement.physical_to_logical < 0, 0.0, shares)


def _fill_to_a_level(rest: Floats, amount: Floats) -> Floats:
    """Returns how much of `amount` goes to each column so that all columns that get some end at one level.

    rest: [X, C] load already there, infinity = unused column; amount: [X] -> [X, C]
    """
    ascending = np.sort(rest, axis=1)
    finite = np.isfinite(ascending)
    filled = np.cumsum(np.where(finite, ascending, 0.0), axis=1)
    places = np.arange(1, rest.shape[1] + 1)
    level = (amount[:, None] + filled) / places  # if the lowest `places` columns share it
    following = np.concatenate([ascending[:, 1:], np.full((len(rest), 1), np.inf)], axis=1)
    fits = finite & (level <= following)
    first = fits.argmax(axis=1)
    chosen = np.where(fits.any(axis=1), level[np.arange(len(rest)), first], 0.0)
    given: Floats = np.maximum(chosen[:, None] - rest, 0.0)
    given[~np.isfinite(rest)] = 0.0
    scale = np.divide(amount, given.sum(axis=1), out=np.ones_like(amount), where=given.sum(axis=1) > 0)
    given *= scale[:, None]
    return given
