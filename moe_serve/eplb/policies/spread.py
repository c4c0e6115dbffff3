"""Spreads the replicas of an expert over two nodes by swaps, so that a whole node can be lost.

Swaps inside a node then even its ranks again, where no limit of moves forbids it.

Shape words: L = layers, E = experts, N = nodes, R = ranks, K = slots per rank.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import replica_load, replicas_in, swap_until_even
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, holds, replicas_per_node

MOST_RISE = 0.05  # of a layer's heaviest rank
_AT_FIRST = 3 * MOST_RISE  # before swaps inside nodes
_SWEEPS = 20


def spread_over_nodes(problem: Problem, table: Ids) -> Ids:
    """Returns a table [L, R, K] in which more experts with replicas are on two nodes; the same one unless the request
    asks for it.

    No swap takes an expert's second node away, repeats an expert on a rank, breaks a limit of moves, or makes the
    heaviest rank of its layer heavier by more than MOST_RISE than it was. Replica counts stay.
    """
    if not problem.request.two_nodes or problem.num_nodes == 1 or not problem.is_global:
        return table
    table = table.copy()
    counts = np.maximum(replicas_in(table, problem.weight.shape[1]), 1)
    load = replica_load(problem.weight, counts, table, problem.fixed)
    on_node = replicas_per_node(problem, table)
    request, moved = problem.request, 0
    if problem.current is not None:
        moved = int((holds(table, counts.shape[1]) & ~holds(problem.current, counts.shape[1])).sum())
    left = table.size if request.max_total_moves is None else request.max_total_moves - moved
    for row in np.flatnonzero(((on_node > 0).sum(axis=1) < np.minimum(counts, 2)).any(axis=1)):
        layer = _Layer(problem, int(row), table[row], load[row], on_node[row])
        if problem.limits_moves:
            left -= layer.spread(left, MOST_RISE)
            continue
        limit = load[row].sum(axis=1).max() * (1 + MOST_RISE)
        tried_table, tried_load = table[row].copy(), load[row].copy()
        tried = _Layer(problem, int(row), tried_table, tried_load, on_node[row].copy())
        tried.spread(left, _AT_FIRST)
        for node in range(problem.num_nodes):
            here = problem.node_of == node
            part, part_load = tried_table[here][None], tried_load[here][None]
            swap_until_even(part, part_load, _SWEEPS)
            tried_table[here], tried_load[here] = part[0], part_load[0]
        if tried_load.sum(axis=1).max() <= limit:
            table[row] = tried_table
        else:
            layer.spread(left, MOST_RISE)
    return table


class _Layer:
    """One layer, edited in place."""

    def __init__(self, problem: Problem, row: int, table: Ids, load: Floats, on_node: NDArray[np.int64]) -> None:
        """table: [R, K];  load: of each slot, [R, K];  on_node: replicas of each expert, [N, E]"""
        request, num_experts = problem.request, on_node.shape[1]
        self._node_of, self._table, self._load, self._on_node = problem.node_of, table, load, on_node
        self._weight = problem.weight[row]
        # The last column stands for an empty slot, which any number of ranks may hold.
        self._held = np.zeros((len(table), num_experts + 1), dtype=bool)
        self._held[:, :-1] = holds(table[None], num_experts)[0]
        self._was = self._held.copy()
        self._was[:, -1] = True
        if problem.current is not None:
            self._was[:, :-1] = holds(problem.current[row][None], num_experts)[0]
        self._most = request.max_moves if request.max_moves is not None else table.size
        self._rank_most = request.max_rank_moves if request.max_rank_moves is not None else table.shape[1]
        self._cap = np.inf

    def spread(self, most: int, rise: float) -> int:
        """Swaps what can be swapped with so many further moves. Returns how many it took.

        rise: share by which the heaviest rank may become heavier
        """
        self._cap = self._load.sum(axis=1).max() * (1 + rise)
        before = self._num_moved().sum()
        nodes = (self._on_node > 0).sum(axis=0)
        alone = np.flatnonzero((nodes == 1) & (self._on_node.sum(axis=0) > 1))
        for expert in alone[np.argsort(-self._weight[alone], kind="stable")]:
            if (self._on_node[:, expert] > 0).sum() == 1:
                self._swap_away(int(expert), int(most - (self._num_moved().sum() - before)))
        return int(self._num_moved().sum() - before)

    def _num_moved(self) -> NDArray[np.int64]:
        return np.asarray((self._held & ~self._was)[:, :-1].sum(axis=1))

    def _swap_away(self, expert: int, left: int) -> None:
        """Swaps a replica of an expert that is on one node with one of another node."""
        table, load, held, slots = self._table, self._load, self._held, self._table.shape[1]
        node = int(self._on_node[:, expert].argmax())
        sources = np.argwhere(table == expert)  # [S, 2]
        elsewhere = np.flatnonzero(self._node_of != node)
        there = np.repeat(elsewhere, slots)  # [T] rank of each slot elsewhere
        other, other_load = table[elsewhere].ravel(), load[elsewhere].ravel()
        node_there = self._node_of[there]
        spread = (self._on_node > 0).sum(axis=0)
        after = spread[other] - (self._on_node[node_there, other] == 1) + (self._on_node[node, other] == 0)
        legal = (other < 0) | (after >= np.minimum(spread[other], 2))
        rank = sources[:, 0][:, None]  # [S, 1]
        legal = legal[None] & ((other < 0)[None] | ~held[rank, other[None]])
        total, shift = load.sum(axis=1), load[table == expert][:, None] - other_load[None]
        higher = np.maximum(total[rank] - shift, total[there][None] + shift)
        legal &= higher <= np.maximum(self._cap, np.maximum(total[rank], total[there][None]))
        moved = self._num_moved()
        here_more = (~self._was[rank, other[None]]).astype(np.int64) - (~self._was[rank, expert])
        there_more = (~self._was[there, expert]).astype(np.int64) - (~self._was[there, other])
        legal &= (here_more <= 0) | (moved[rank] + here_more <= self._rank_most)
        legal &= ((there_more <= 0) | (moved[there] + there_more <= self._rank_most))[None]
        more = here_more + there_more[None]
        legal &= (more <= 0) | ((more <= left) & (moved.sum() + more <= self._most))
        if not legal.any():
            return
        fewest = more == more[legal].min()
        best = int(np.where(legal & fewest, higher, np.inf).argmin())
        (here, slot), target = sources[best // len(there)], best % len(there)
        to, to_slot, came = int(there[target]), target % slots, int(other[target])
        for array in (table, load):
            array[here, slot], array[to, to_slot] = array[to, to_slot], array[here, slot]
        to_node = int(self._node_of[to])
        held[here, expert], held[to, expert] = False, True
        self._on_node[node, expert] -= 1
        self._on_node[to_node, expert] += 1
        if came >= 0:
            held[here, came], held[to, came] = True, False
            self._on_node[to_node, came] -= 1
            self._on_node[node, came] += 1
