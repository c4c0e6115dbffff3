"""Fills the slots that a plan leaves empty, for engines that have no empty slots.

Our planners leave a slot empty where a replica brings nothing. Shape words: L = layers, E = experts, R = ranks.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement


def fill_empty_slots(
    placement: Placement,
    tokens: NDArray[np.number],
    num_nodes: int = 1,
    lost_ranks: Collection[int] = (),
    in_use: Placement | None = None,
) -> Placement:
    """Returns the placement with one more replica of an expert in every empty slot, but in those of lost ranks.

    tokens:    [L, E] load that the ranks shall be even under
    num_nodes: experts stay on the nodes that hold them; 1 = they may go anywhere
    in_use:    the placement that this one replaces, of the same shape; None = none
    Each slot takes the expert that leaves the layer's largest rank load lowest, of those that its rank does not hold
    yet (of all where it holds all). On a tie, one that the rank has in use, which nobody has to send; then the lowest.
    """
    table = placement.physical_to_logical.copy()
    num_ranks, num_logical = placement.num_ranks, placement.num_logical
    old = (placement if in_use is None else in_use).physical_to_logical.reshape(len(table), num_ranks, -1)
    for row in np.flatnonzero((table < 0).any(axis=1)).tolist():
        by_rank = table[row].reshape(num_ranks, -1)
        load = tokens[row].astype(np.float64)
        held = np.zeros((num_ranks, num_logical), dtype=np.int64)  # replicas
        ranks, slots = np.nonzero(by_rank >= 0)
        np.add.at(held, (ranks, by_rank[ranks, slots]), 1)
        for rank, slot in np.argwhere(by_rank < 0).tolist():
            if rank in lost_ranks:
                continue
            count = held.sum(axis=0)
            each, next_each = load / np.maximum(count, 1), load / (count + 1)
            now = _rank_load(by_rank, each)
            after = now[:, None] - held * (each - next_each)  # [R, E]: with one more replica of an expert
            after[rank] += next_each
            here = held.reshape(num_nodes, -1, num_logical)[rank * num_nodes // num_ranks].any(axis=0)
            choices = np.flatnonzero(here & (held[rank] == 0))
            if not len(choices):
                choices = np.flatnonzero(here) if here.any() else np.arange(num_logical)
            top = after.max(axis=0)[choices]
            choices = choices[top == top.min()]
            at_hand = choices[np.isin(choices, old[row, rank])]
            expert = (at_hand if len(at_hand) else choices)[0]
            by_rank[rank, slot] = expert
            held[rank, expert] += 1
    return replace(placement, physical_to_logical=table)


def _rank_load(by_rank: NDArray[np.int32], each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the load of each rank, [R].

    by_rank: [R, K] expert of each slot, -1 = empty;  each: [E] load of one replica
    Added in the order of the slots: each rank of an engine fills for itself, and a matrix product adds in an order that
    depends on the processor.
    """
    ranks, slots = np.nonzero(by_rank >= 0)
    return np.bincount(ranks, weights=each[by_rank[ranks, slots]], minlength=len(by_rank)).astype(np.float64)
