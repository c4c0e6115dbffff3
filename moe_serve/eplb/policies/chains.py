"""Chains of moves for cases where single edits get stuck, as they do with few slots per rank.

Two tools, each over many ranks at once:
- `change_counts` drops some replicas and adds others, judged by the best packing of the new replicas (two slots per
  rank: lightest beside heaviest) and by the effect on the placement in use;
- `reassign` takes one replica from every rank and assigns all of them anew at minimum cost. The solution is the
  best set of cycles of moves through any number of ranks, with a price per move.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.edits import Bools, Edits, EditState, all_overwrites, apply_edits

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]


def change_counts(
    state: EditState, num_changes: int, seed: int, proposals: int = 64, allowed: Bools | None = None
) -> None:
    """Overwrites up to `num_changes` redundant replicas of each layer where that makes a better packing possible.

    Each change is the best of `proposals` exchanges (drop a replica of f, add one of e) for the packing of lightest
    beside heaviest; among equally good ones, the one that disturbs the placement least. Two slots per rank only.
    """
    num_layers, num_experts = state.unit.shape
    num_ranks = state.table.shape[1]
    draw = np.random.default_rng(seed)
    x, m = np.arange(num_layers)[:, None], np.arange(proposals)[None, :]
    layer = np.arange(num_layers)
    for _ in range(num_changes):
        count = state.count
        can_give = count > state.min_replicas
        num_givers = can_give.sum(axis=1, keepdims=True)
        givers = np.argsort(np.where(can_give, state.unit / np.maximum(count - 1, 1), np.inf), axis=1, kind="stable")
        takers = np.argsort(-state.unit / np.maximum(count, 1), axis=1, kind="stable")
        random = draw.random((2, num_layers, proposals))
        giver = givers[x, (num_givers * random[0] ** 1.5).astype(np.int64)]
        random[1][:, ::2] **= 3  # half of the proposals prefer the heaviest replicas
        taker = takers[x, (num_experts * random[1]).astype(np.int64)]
        tried = np.repeat(count[:, None], proposals, axis=1)
        tried[x, m, giver] -= 1
        tried[x, m, taker] += 1
        now = _packed_peak(state, count[:, None], num_ranks)[:, 0]
        gain = now[:, None] - _packed_peak(state, tried, num_ranks)
        gain[(giver == taker) | (num_givers == 0)] = -np.inf
        options = all_overwrites(state, allowed)
        if options.slot.shape[1] == 0:
            return  # nothing is redundant
        # The best slot for each proposal: a slot of `giver` where `taker` may go.
        fits = options.old[:, :, None] == giver[:, None, :]
        effect = np.where(fits, np.take_along_axis(options.gain, taker[:, None, :], axis=2), -np.inf)
        gain[~np.isfinite(effect.max(axis=1))] = -np.inf
        best_gain = gain.max(axis=1)
        close = gain >= 0.8 * best_gain[:, None]
        choice = np.where(close, effect.max(axis=1), -np.inf).argmax(axis=1)
        which = best_gain > 1e-3 * now
        if not which.any():
            return
        slot = options.slot[layer, effect[layer, :, choice].argmax(axis=1)]
        zeros = np.zeros(num_layers, dtype=np.int64)
        apply_edits(state, Edits(best_gain, zeros, slot, slot, taker[layer, choice]), which)


def _packed_peak(state: EditState, counts: NDArray[np.int64], num_ranks: int) -> Floats:
    """Returns the smooth maximum of the best packing of these counts with two slots per rank: [L, M, E] -> [L, M]."""
    num_layers, num_options, _ = counts.shape
    share = state.unit[:, None] / np.maximum(counts, 1)
    size = (share + state.risk * share * share + (0.0 if state.fixed is None else state.fixed[:, None])).astype(
        np.float32
    )
    rows = num_layers * num_options
    empty = 2 * num_ranks - counts.sum(axis=2, keepdims=True)
    repeats = np.concatenate([counts, empty], axis=2).reshape(rows, -1)
    values = np.concatenate([size, np.zeros((num_layers, num_options, 1), dtype=np.float32)], axis=2).reshape(rows, -1)
    replicas = np.repeat(values.ravel(), repeats.ravel()).reshape(rows, 2 * num_ranks)
    replicas.sort(axis=1)
    pairs = replicas[:, :num_ranks] + replicas[:, : num_ranks - 1 : -1]
    exponent = np.minimum(state.steepness * (pairs - np.float32(1.1)), 60.0)
    peak: Floats = np.exp(exponent).sum(axis=1).reshape(num_layers, num_options)
    return peak


def reassign(state: EditState, layer: int, slot_of: NDArray[np.int64], price: float) -> Ids:
    """Returns the table [R, K] of one layer after assigning the replicas in slot_of [R] (one per rank) anew.

    Minimises the smooth maximum plus `price` for every expert that a rank must receive. No rank gets an expert twice.
    """
    from scipy.optimize import linear_sum_assignment  # half a second to import; most plans never do

    table = state.table[layer]
    num_ranks = len(table)
    rank = np.arange(num_ranks)
    replicas, size = table[rank, slot_of], state.load[layer][rank, slot_of]
    rest = state.rank_load[layer] - size
    cost = np.exp(
        np.minimum(state.steepness * (rest[:, None] + size[None, :] - state.peak_load[layer]), 200.0)
    )  # [rank, replica]
    safe = np.maximum(replicas, 0)
    new = ~state.was_here[layer][:, safe] & (replicas >= 0)
    others = table.copy()
    others[rank, slot_of] = -1
    twice = (others[:, :, None] == replicas[None, None, :]).any(axis=1) & (replicas >= 0)
    cost += price * new
    cost[twice] = cost.max() * num_ranks + 1.0
    ranks, chosen = linear_sum_assignment(cost)
    out: Ids = table.copy()
    out[ranks, slot_of[ranks]] = replicas[chosen]
    return out
