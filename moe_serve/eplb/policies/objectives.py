"""Improves tables beyond even rank loads: fewer tokens between nodes, the exact split, replicas on two nodes.

Between nodes (off_node and step_time; needs load by source rank): under an even split a replica of expert e on node n
gets its share of every source's tokens for e; those from n stay on the node. So it matters how many tokens of e come
from the nodes that hold its replicas. First whole nodes trade their contents, which changes no rank's load; then
replicas of similar load on different nodes are swapped.

The exact split divides an expert's tokens over its replicas anew in every batch. The even split needs equal rank loads;
the exact split needs linked ranks: tokens can shift from a heavy rank to a light one through experts that both hold, so
every rank should be reachable through replicas with enough tokens. A ring that links all ranks by the heaviest experts
does that, but leaves no slots for experts that need three replicas or more. So several placements are made, from all
links to none, and each layer takes the one whose heaviest rank is lowest over sampled batches under a fractional
optimal split.

Replicas of an expert are spread over two nodes by swaps, so that a whole node can be lost; swaps inside a node then
even its ranks again, where no limit of moves forbids it.

Shape words: L = layers, E = experts, N = nodes, R = ranks, K = slots per rank, B = sampled batches.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.packing import (
    list_replicas,
    minimax_counts,
    pack_longest_first,
    repair_duplicates,
    replica_load,
    replicas_in,
    swap_until_even,
)
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, holds, replicas_per_node
from moe_serve.eplb.relabel import cheapest_columns
from moe_serve.eplb.split.fractions import levelled_load

WHOLE = 2.0**40  # shares as whole numbers


def improve_locality(problem: Problem, table: Ids, sweeps: int) -> Ids:
    """Returns a table [L, R, K] with fewer tokens between nodes; the same one unless the objective asks for it.

    A swap may raise the heaviest rank as far as the weights of the objective allow: by the mean rank load times
    (weight of off_node x the share of tokens saved). With off_node alone the maximum never rises.
    """
    price = price_of_locality(problem)
    if price == 0:
        return table
    local = tokens_by_node(problem)
    table = _trade_nodes(problem, table, local)
    _swap_between_nodes(problem, table, local, price, sweeps)
    return table


def price_of_locality(problem: Problem) -> float:
    """Returns how much of a mean rank load an off-node share of 1 costs; infinity is off_node alone.

    0 where the objective does not ask for it, on one node, and where the sources of tokens are not known.
    """
    if problem.num_nodes == 1 or problem.request.by_source is None:
        return 0.0
    weights = problem.request.objective_weights
    price = float(weights.get("off_node", 0.0))
    cost = problem.request.cost
    if cost is not None and weights.get("step_time") and cost.token_s > 0:
        price += weights["step_time"] * cost.off_node_token_s / cost.token_s
    balanced = sum(value for name, value in weights.items() if name != "off_node")
    return 0.0 if price == 0 else price / balanced if balanced else np.inf


def tokens_by_node(problem: Problem) -> Floats:
    """Returns the share of each layer's tokens that go from each node to each expert, [L, N, E]."""
    assert problem.request.by_source is not None
    by_rank = problem.request.by_source[:, problem.ranks].astype(np.float64)
    by_node = np.stack([by_rank[:, problem.node_of == n].sum(axis=1) for n in range(problem.num_nodes)], axis=1)
    total = problem.request.by_source.sum(axis=(1, 2), dtype=np.float64)
    share: Floats = by_node / np.where(total > 0, total, 1.0)[:, None, None]
    return share


def off_node_share(problem: Problem, table: Ids) -> Floats:
    """Returns the share of each layer's tokens that leave their node under an even split, [L]."""
    replicas = replicas_per_node(problem, table)
    local = tokens_by_node(problem)
    share: Floats = local.sum(axis=(1, 2)) - (local * replicas / replicas.sum(axis=1)[:, None]).sum(axis=(1, 2))
    return share


def _trade_nodes(problem: Problem, table: Ids, local: Floats) -> Ids:
    """Gives the contents of nodes with equally many ranks to the nodes that send them most."""
    num_layers, num_experts = problem.weight.shape
    sizes = np.bincount(problem.node_of)
    if len(set(sizes.tolist())) > 1:
        return table
    counts = np.maximum(replicas_in(table, num_experts), 1)
    by_node = table.reshape(num_layers, problem.num_nodes, sizes[0], -1)
    here = np.stack([replicas_in(by_node[:, n], num_experts) for n in range(problem.num_nodes)], axis=1)
    kept = np.einsum("lae,lbe->lab", here / counts[:, None], local)  # contents a on node b
    out = np.empty_like(by_node)
    for layer in range(num_layers):
        out[layer, cheapest_columns(np.rint(-WHOLE * kept[layer]).astype(np.int64))] = by_node[layer]
    return out.reshape(table.shape)


def _swap_between_nodes(problem: Problem, table: Ids, local: Floats, price: float, sweeps: int) -> None:
    """Swaps replicas between ranks of different nodes, paired at random, in place."""
    num_layers, num_experts = problem.weight.shape
    num_ranks, slots = table.shape[1:]
    counts = np.maximum(replicas_in(table, num_experts), 1)
    load = replica_load(problem.weight, counts, table, problem.fixed)
    mean = np.maximum(load.sum(axis=(1, 2)) / num_ranks, 1e-300)
    kept = np.concatenate([local / counts[:, None], np.zeros((num_layers, problem.num_nodes, 1))], axis=2)
    draw = np.random.default_rng(problem.request.seed)
    rows = np.arange(num_layers)[:, None]
    for _ in range(sweeps):
        order = draw.permuted(np.tile(np.arange(num_ranks), (num_layers, 1)), axis=1)
        half = num_ranks // 2
        a, b = order[:, :half], order[:, half : 2 * half]
        total = load.sum(axis=2)
        top = total.max(axis=1)[:, None, None, None]
        ids_a, ids_b, load_a, load_b = table[rows, a], table[rows, b], load[rows, a], load[rows, b]
        node_a, node_b = problem.node_of[a][:, :, None], problem.node_of[b][:, :, None]
        third = rows[:, :, None]
        gain_a = (
            kept[third, node_b, ids_a] - kept[third, node_a, ids_a]
        )  # tokens that stay local when a's replicas move to b's node
        gain_b = kept[third, node_a, ids_b] - kept[third, node_b, ids_b]
        gain = gain_a[:, :, :, None] + gain_b[:, :, None, :]
        shift = load_a[:, :, :, None] - load_b[:, :, None, :]
        higher = np.maximum(total[rows, a][:, :, None, None] - shift, total[rows, b][:, :, None, None] + shift)
        rise = np.maximum(higher - top, 0.0) / mean[:, None, None, None]
        if np.isinf(price):
            gain[rise > 1e-12] = -np.inf
        else:
            gain -= rise / price
        same = (ids_a[:, :, :, None] == ids_b[:, :, None, :]) & (ids_a >= 0)[:, :, :, None]
        gain[same.any(axis=3)] = -np.inf
        gain.transpose(0, 1, 3, 2)[same.any(axis=2)] = -np.inf
        flat = gain.reshape(num_layers, half, -1)
        best = flat.argmax(axis=2)
        value = np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]
        # Only the best swap of a layer may raise the maximum, so that such swaps cannot add up.
        which = value > 1e-12
        if not np.isinf(price):
            raises = np.take_along_axis(rise.reshape(num_layers, half, -1), best[:, :, None], axis=2)[:, :, 0] > 0
            first = np.where(which, value, -np.inf).argmax(axis=1)
            which &= ~raises | (np.arange(half) == first[:, None])
        x, p = np.nonzero(which)
        for array in (table, load):
            kept_a = array[x, a[x, p], best[x, p] // slots]
            array[x, a[x, p], best[x, p] // slots] = array[x, b[x, p], best[x, p] % slots]
            array[x, b[x, p], best[x, p] % slots] = kept_a


NUM_BATCHES = 6
TOKENS_PER_RANK = 256  # (token, expert) pairs of a sampled batch: 32 tokens, top 8


def best_for_exact_split(problem: Problem, table: Ids, sweeps: int) -> Ids:
    """Returns, layer by layer, the best of `table` [L, R, K] and linked placements for the exact split."""
    num_layers, num_experts = problem.weight.shape
    spare = problem.num_slots - num_experts * problem.min_replicas
    if spare <= 0 or problem.num_ranks < 2 or problem.slots_per_rank < 2:
        return table
    candidates = [table]
    # Where every expert is on two ranks, all are linked already.
    most_links = min(spare, problem.num_ranks, num_experts) if problem.min_replicas == 1 else 0
    for links in dict.fromkeys((most_links, most_links // 2, most_links // 4)):
        if links >= 2:
            candidates.append(_linked(problem, links))
    least = problem.min_replicas
    most = min(max(3, least), problem.num_ranks)
    capped = minimax_counts(problem.weight, problem.num_slots, most, min_replicas=least)
    candidates.append(_packed(problem, capped, sweeps))
    batches = sample_batches(problem.weight, problem.num_ranks, problem.request.seed)
    score = np.stack([split_balance(problem, candidate, batches) for candidate in candidates])
    best = score.argmax(axis=0)
    chosen: Ids = np.stack(candidates)[best, np.arange(num_layers)]
    return chosen


def sample_batches(weight: Floats, num_ranks: int, seed: int) -> NDArray[np.int64]:
    """Returns token counts of batches drawn from the load: [L, E] -> [L, B, E] int64."""
    draw = np.random.default_rng(seed)
    total = weight.sum(axis=1, keepdims=True)
    popularity = np.where(total > 0, weight / np.where(total > 0, total, 1.0), 1.0 / weight.shape[1])
    mean = popularity * num_ranks * TOKENS_PER_RANK
    return np.asarray(draw.poisson(np.repeat(mean[:, None], NUM_BATCHES, axis=1)), dtype=np.int64)


def split_balance(problem: Problem, table: Ids, batches: NDArray[np.int64]) -> Floats:
    """Returns mean over max of rank loads under the fractional optimal split, mean over batches: [L, R, K] -> [L]."""
    num_layers, num_batches, num_experts = batches.shape
    flat = np.repeat(table.reshape(num_layers, -1), num_batches, axis=0)
    placement = Placement(flat, num_experts, problem.num_ranks)
    load = levelled_load(batches.reshape(-1, num_experts), placement)
    reached = balancedness(load.reshape(len(flat), *table.shape[1:]).sum(axis=2))
    mean: Floats = reached.reshape(num_layers, num_batches).mean(axis=1)
    return mean


def _linked(problem: Problem, links: int) -> Ids:
    """Returns a table with `links` experts that have one replica on rank i and one on rank i + 1; the rest by minimax.

    The experts of the ring are the heaviest that minimax replication of the other slots leaves with one replica each.
    """
    num_layers, num_experts = problem.weight.shape
    num_ranks, slots = problem.num_ranks, problem.slots_per_rank
    counts = minimax_counts(problem.weight, problem.num_slots - links, num_ranks)
    single = np.where(counts == 1, problem.weight, -1.0)
    ring = np.argsort(-single, axis=1, kind="stable")[:, :links]
    # Heavy beside light, so that neighbours in the ring have similar sums.
    order = np.empty(links, dtype=np.int64)
    order[::2], order[1::2] = np.arange((links + 1) // 2), np.arange(links - 1, (links + 1) // 2 - 1, -1)
    ring = ring[:, order].astype(np.int32)
    np.put_along_axis(counts, ring.astype(np.int64), np.take_along_axis(counts, ring.astype(np.int64), axis=1) + 1, 1)
    table = np.full((num_layers, num_ranks, slots), -1, dtype=np.int32)
    table[:, :links, 0] = ring
    table[:, (np.arange(links) + 1) % num_ranks, 1] = ring
    rest = counts.copy()
    np.put_along_axis(rest, ring.astype(np.int64), np.take_along_axis(rest, ring.astype(np.int64), axis=1) - 2, 1)
    rest = np.maximum(rest, 0)
    each = problem.weight / counts
    _fill(table, list_replicas(rest, problem.num_slots - 2 * links), each)
    load = replica_load(problem.weight, np.maximum(replicas_in(table, num_experts), 1), table)
    repair_duplicates(table, load)
    return table


def _fill(table: Ids, replicas: Ids, each: Floats) -> None:
    """Puts replicas [L, n] (-1 = none), heaviest first, into free slots of the lightest ranks, in place."""
    num_layers = len(table)
    rows = np.arange(num_layers)
    load = np.where(replicas < 0, -1.0, np.take_along_axis(each, np.maximum(replicas, 0), axis=1))
    order = np.argsort(-load, axis=1, kind="stable")
    held = np.where(table < 0, 0.0, np.take_along_axis(each, np.maximum(table, 0).reshape(num_layers, -1), 1).reshape(
        table.shape
    ))  # fmt: skip
    total = held.sum(axis=2)
    free = (table < 0).sum(axis=2)
    for i in range(replicas.shape[1]):
        expert = np.take_along_axis(replicas, order[:, i : i + 1], axis=1)[:, 0]
        rank = np.where(free > 0, total, np.inf).argmin(axis=1)
        x = rows[expert >= 0]
        slot = (table[x, rank[x]] < 0).argmax(axis=1)
        table[x, rank[x], slot] = expert[x]
        total[x, rank[x]] += load[x, order[x, i]]
        free[x, rank[x]] -= 1


def _packed(problem: Problem, counts: NDArray[np.int64], sweeps: int) -> Ids:
    replicas = list_replicas(counts, problem.num_slots)
    table, load = pack_longest_first(replicas, replica_load(problem.weight, counts, replicas), problem.num_ranks)
    repair_duplicates(table, load)
    swap_until_even(table, load, sweeps)
    return table


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
