"""Who sends to which replica, once it is known how much each replica takes in all.

Everything is prefix sums over (source rank, replica): sources and replicas of an expert are laid side by side as
intervals of its tokens, and their overlap is what one sends to the other. So every rank derives the same table from
the same counts, and no token needs to be looked at.

Shape words: R = ranks, C = replicas, X = replicated experts (see replica_graph.py).
"""

import numpy as np

from moe_serve.eplb.split.layer_slots import Int64s
from moe_serve.eplb.split.replica_graph import ReplicaGraph


def send_short(graph: ReplicaGraph, reaches: tuple[int, ...], tokens: Int64s, replica_tokens: Int64s) -> Int64s:
    """Returns who sends how much to which replica, [R, C] int64, over the shortest routes at these totals.

    First every rank fills its own replicas, then nodes fill theirs, then the rest goes anywhere. For given totals no
    table has fewer tokens between nodes, and none of those has more tokens that stay on their rank.

    reaches:        ranks of a group, ascending: 1, those of a node, all
    tokens:         [R, X] int64, tokens of the replicated experts by source rank
    replica_tokens: [C] int64, tokens of each replica; sums to those of its expert
    """
    num_ranks, num_replicas = len(tokens), graph.num_replicas
    rank, owner = np.array(graph.replica_rank, dtype=np.int64), np.array(graph.owner, dtype=np.int64)
    left, free = tokens.copy(), replica_tokens.copy()
    sent = np.zeros((num_replicas, num_ranks), dtype=np.int64)
    for width in reaches:
        group = rank // width
        # Replicas of an expert ascend in rank, so those of one group are neighbours; first: the first of them.
        keys = owner * num_ranks + group
        first = np.searchsorted(keys, keys)
        by_group = left.reshape(num_ranks // width, width, tokens.shape[1]).swapaxes(1, 2)  # a view: [groups, X, width]
        moved = _overlap(by_group[group, owner], free, first)
        free -= moved.sum(axis=1)
        sent.reshape(num_replicas, num_ranks // width, width)[np.arange(num_replicas), group] += moved
        np.subtract.at(by_group, (group, owner), moved)
    return sent.T


def _overlap(supply: Int64s, free: Int64s, first: Int64s) -> Int64s:
    """supply [C, S] (equal within a group), free [C] -> [C, S]: what each source sends to each replica, in order."""
    supply_end = supply.cumsum(axis=1)
    free_end = free.cumsum()
    free_start = free_end - free
    base = free_start[first]
    low = np.maximum(supply_end - supply, (free_start - base)[:, None])
    high = np.minimum(supply_end, (free_end - base)[:, None])
    return np.asarray(np.maximum(high - low, 0))
