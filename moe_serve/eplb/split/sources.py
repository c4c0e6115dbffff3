"""Who sends where: the per-source side of a split, once it is known (or not) how much each copy takes in all.

Everything is prefix sums over (source rank, copy): sources and copies of an expert are laid side by side as intervals
of its tokens, and their overlap is what one sends to the other. So every rank derives the same table from the same
all-gathered counts, and no token needs to be looked at.

Shape words: R = ranks, C = copies of replicated experts (see replica_graph), X = replicated experts, N = nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.split.replica_graph import ReplicaGraph
from moe_serve.topology import Topology

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CopyWays:
    """What `start_near` and `send_short` need to know of a graph on a topology. Build it with `of`.

    rank, owner, node: [C] int64, of each copy: its rank, its expert's place among the replicated, its node
    in_expert:  [C] int64, first copy of the same expert
    in_node:    [C] int64, first copy of the same expert on the same node
    """

    topology: Topology
    rank: Int64s
    owner: Int64s
    node: Int64s
    in_expert: Int64s
    in_node: Int64s

    @classmethod
    def of(cls, graph: ReplicaGraph, topology: Topology) -> "CopyWays":
        rank = np.array(graph.copy_rank, dtype=np.int64)
        owner = np.repeat(np.arange(len(graph.experts)), np.diff(graph.copy_start))
        node = rank // topology.ranks_per_node
        in_expert = np.array(graph.copy_start, dtype=np.int64)[owner]
        # Copies of an expert ascend in rank, so those of one node are neighbours.
        new_node = np.ones(len(rank), dtype=bool)
        new_node[1:] = (owner[1:] != owner[:-1]) | (node[1:] != node[:-1])
        in_node = np.maximum.accumulate(np.where(new_node, np.arange(len(rank)), 0))
        return cls(topology, rank, owner, node, in_expert, in_node)


def start_near(ways: CopyWays, tokens: Int64s) -> Int64s:
    """Returns tokens per copy [C] when sources keep to a copy of their own, else to their node's; the rest is left out.

    tokens: [R, X] int64, tokens of the replicated experts by source rank
    """
    local = tokens[ways.rank, ways.owner]
    by_node = tokens.reshape(ways.topology.num_nodes, ways.topology.ranks_per_node, -1).sum(axis=1)
    num_here = np.bincount(ways.in_node, minlength=len(local))[ways.in_node]
    local_here = np.zeros(len(local), dtype=np.int64)
    np.add.at(local_here, ways.in_node, local)
    visiting = by_node[ways.node, ways.owner] - local_here[ways.in_node]
    turn = np.arange(len(local)) - ways.in_node
    return np.asarray(local + (visiting + num_here - 1 - turn) // num_here)


def send_short(ways: CopyWays, tokens: Int64s, copy_tokens: Int64s) -> Int64s:
    """Returns who sends how much to which copy, [R, C] int64, over the shortest ways at these totals.

    First every rank fills its own copies, then nodes fill theirs, then the rest goes anywhere. For given totals no
    table has fewer tokens between nodes, and none of those has more tokens that stay on their rank.

    tokens:      [R, X] int64, tokens of the replicated experts by source rank
    copy_tokens: [C] int64, tokens of each copy; sums to those of its expert
    """
    num_ranks, num_copies = len(tokens), len(ways.rank)
    copies = np.arange(num_copies)
    left, room = tokens.copy(), copy_tokens.copy()
    local = np.minimum(tokens[ways.rank, ways.owner], room)
    left[ways.rank, ways.owner] -= local
    room -= local
    sent = np.zeros((num_copies, num_ranks), dtype=np.int64)
    sent[copies, ways.rank] = local

    num_nodes, per_node = ways.topology.num_nodes, ways.topology.ranks_per_node
    if num_nodes > 1:
        by_node = left.reshape(num_nodes, per_node, -1).swapaxes(1, 2)  # a view: [N, X, ranks of the node]
        near = _overlap(by_node[ways.node, ways.owner], room, ways.in_node)
        room -= near.sum(axis=1)
        sent.reshape(num_copies, num_nodes, per_node)[copies, ways.node] += near
        np.subtract.at(by_node, (ways.node, ways.owner), near)
    sent += _overlap(left.T[ways.owner], room, ways.in_expert)
    return sent.T


def send_nearest(ways: CopyWays, tokens: Int64s) -> Int64s:
    """Returns who sends how much to which copy, [R, C] int64, when everybody takes the nearest copy whatever its load.

    A rank uses its own copy; without one, its node's copies in turn; without any, all copies in turn.
    tokens: [R, X] int64, tokens of the replicated experts by source rank
    """
    num_ranks = len(tokens)
    node_of = np.arange(num_ranks) // ways.topology.ranks_per_node
    by_expert = tokens.T[ways.owner]  # [C, R]
    has_local = np.zeros((tokens.shape[1], num_ranks), dtype=bool)
    has_local[ways.owner, ways.rank] = True
    has_near = np.zeros((tokens.shape[1], ways.topology.num_nodes), dtype=bool)
    has_near[ways.owner, ways.node] = True
    own = np.arange(num_ranks) == ways.rank[:, None]
    same_node = (node_of == ways.node[:, None]) & ~has_local[ways.owner]
    far = ~has_near[ways.owner][:, node_of]
    return (
        np.where(own, by_expert, 0)
        + take_turns(np.where(same_node, by_expert, 0), ways.in_node)
        + take_turns(np.where(far, by_expert, 0), ways.in_expert)
    ).T


def take_turns(supply: Int64s, segment: Int64s) -> Int64s:
    """Deals each expert's tokens out to its copies one by one, in order of source.

    supply:  [C, R] int64, tokens that copy c's group gets from each source (equal within the group)
    segment: [C] int64, first copy of the group
    returns: [C, R] int64; the totals of a group differ by at most one
    """
    end = supply.cumsum(axis=1)
    start = end - supply
    size = np.bincount(segment, minlength=len(segment))[segment][:, None]
    turn = (np.arange(len(segment)) - segment)[:, None]
    # Groups begin their turns at different copies, or the odd tokens of all experts would pile up on low ranks.
    turn = (turn + segment[:, None]) % size
    return np.asarray((end - turn + size - 1) // size - (start - turn + size - 1) // size)


def _overlap(supply: Int64s, room: Int64s, segment: Int64s) -> Int64s:
    """supply [C, S] (equal within a segment), room [C] -> [C, S]: what each source sends to each copy, in order."""
    supply_end = supply.cumsum(axis=1)
    room_end = room.cumsum()
    room_start = room_end - room
    base = room_start[segment]
    low = np.maximum(supply_end - supply, (room_start - base)[:, None])
    high = np.minimum(supply_end, (room_end - base)[:, None])
    return np.asarray(np.maximum(high - low, 0))
