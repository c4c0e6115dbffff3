"""Finds layers in which no split of tokens over replicas can make ranks even, and says what would.

An expert whose replicas are all on one rank is served there by every split. So the largest load of such experts on one
rank is a lower bound of the largest rank load, and it is reached where little else is on that rank.

Shape words: L = layers, E = experts, R = ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement

Floats = NDArray[np.float64]
WORTH_SAYING = 0.95  # balancedness; layers above it have little to gain
NOTHING = 0.005  # balancedness; a split that could gain less than this does not help


@dataclass(frozen=True, eq=False)
class SplitLimit:
    """The bounds of every split of these tokens on this placement.

    even:    [L] float64, balancedness where replicas share evenly
    most:    [L] float64, bound of the balancedness of every split, at most 1
    rank:    [L] int64, whose experts set the bound
    expert:  [L] int64, the heaviest of them; -1 = no expert is on one rank only
    weight:  [L] float64, its load in mean rank loads
    """

    even: Floats
    most: Floats
    rank: NDArray[np.int64]
    expert: NDArray[np.int64]
    weight: Floats

    @property
    def is_hopeless(self) -> NDArray[np.bool_]:
        """[L], whether ranks are uneven and no split makes them noticeably more even."""
        return np.asarray((self.even < WORTH_SAYING) & (self.most - self.even < NOTHING))


def split_limit(tokens: NDArray[np.number], placement: Placement) -> SplitLimit:
    """Returns the bound of every split, layer by layer. tokens: [L, E]"""
    table, num_ranks = placement.physical_to_logical, placement.num_ranks
    num_layers, num_logical = np.shape(tokens)
    load = np.asarray(tokens, dtype=np.float64)
    layer, slot = np.nonzero(table >= 0)
    first = np.full((num_layers, num_logical), num_ranks)  # lowest and highest rank with a replica of the expert
    last = np.full((num_layers, num_logical), -1)
    of = layer, table[layer, slot]
    np.minimum.at(first, of, slot // placement.slots_per_rank)
    np.maximum.at(last, of, slot // placement.slots_per_rank)
    rows, on_one = np.arange(num_layers), first == last
    x, e = np.nonzero(on_one)
    cells = np.bincount(x * num_ranks + first[x, e], weights=load[x, e], minlength=num_layers * num_ranks)
    by_rank = cells.reshape(num_layers, num_ranks)
    rank = by_rank.argmax(axis=1)
    mean = load.sum(axis=1) / len(placement.live_ranks)
    top = by_rank[rows, rank]
    there = on_one & (first == rank[:, None])
    expert = np.where(there, load, -1.0).argmax(axis=1)
    expert = np.where(there.any(axis=1), expert, -1)
    heaviest = np.where(expert >= 0, load[rows, expert], 0.0)
    weight = np.divide(heaviest, mean, out=np.zeros(num_layers), where=mean > 0)
    return SplitLimit(
        balancedness(rank_load(tokens, placement), placement.live_ranks),
        np.divide(mean, top, out=np.ones(num_layers), where=top > mean),
        rank,
        expert,
        weight,
    )


def fewest_slots(tokens: NDArray[np.number], num_ranks: int) -> int:
    """Returns the fewest slots, a multiple of the ranks, with which no replica is heavier than the mean rank.

    tokens: [E]; with fewer, no placement and no split is even.
    """
    load = np.asarray(tokens, dtype=np.float64)
    mean = load.sum() / num_ranks
    if mean <= 0:
        return -(-len(load) // num_ranks) * num_ranks
    replicas = np.maximum(np.ceil(load / mean * (1 - 1e-12)), 1)
    return -(-int(replicas.sum()) // num_ranks) * num_ranks


def where_no_split_helps(tokens: NDArray[np.number], placement: Placement) -> str | None:
    """Returns which layers stay uneven under every split, and what would help; None where there is none.

    tokens: [L, E], also of windows together
    """
    limit = split_limit(tokens, placement)
    layers = np.flatnonzero(limit.is_hopeless)
    if not len(layers):
        return None
    row = int(layers[limit.even[layers].argmin()])
    rank, expert, weight = int(limit.rank[row]), int(limit.expert[row]), float(limit.weight[row])
    head = (
        f"In {len(layers)} of {placement.num_layers} layers no split over replicas can help: the experts of one rank "
        f"are on no other. Worst is layer {placement.moe_layer_ids[row]} at {limit.even[row]:.3f}, where rank {rank} "
    )
    num_live = len(placement.live_ranks)
    if weight <= 1:
        return head + (
            f"has several such experts, the heaviest, {expert}, with {weight:.2f} times the mean load of a rank: a "
            "replica of one of them on another rank would, or one of them moved away."
        )
    replicas = min(int(np.ceil(weight * (1 - 1e-12))), num_live)
    head += f"alone holds expert {expert} with {weight:.2f} times the mean load of a rank: {replicas} replicas would, "
    slots, have = fewest_slots(np.asarray(tokens)[row], num_live), placement.slots_per_rank * num_live
    if slots > have:
        return head + f"and to even out that layer takes at least {slots} slots in place of {have}."
    return head + f"for which the {have} slots suffice."
