"""The exact per-batch split of one layer: shares whose most loaded rank carries ceil of the LP optimum.

Minimising the largest rank load is a flow problem. Tokens of a replicated expert may flow between the ranks that hold
it; for any set S of ranks, the tokens of experts that live on S alone must stay there, so no split is better than
ceil(confined(S) / |S|), and the best S attains it (max-flow min-cut; integer capacities have integer flows).

1. Start. Where sources are known, tokens stay near them; the rest, in descending order of tokens, is water-filled
   once, each expert over its ranks. (Further sweeps were measured: they cost more than the paths that they save.)
   Else: evenly over all replicas, then one pass over a spanning forest of the ranks, leaves first: a rank passes what
   it has above the mean to its parent, or takes what it lacks from there, by an expert that both hold. That costs a
   third of the water-filling and leaves fewer paths. (With sources it would move tokens off replicas near them.)
2. L = ceil(total / ranks). While a rank carries more than L: search from it, along experts that have tokens to give,
   for a rank below L. Found: push tokens along the path. Not found: the ranks reached are such an S, so
   L <- ceil(load(S) / |S|): Newton's step on max over S (Dinkelbach). L only rises, and the flow is kept.
3. The last S that raised L is the certificate: anybody can check it with a sum over experts, and every batch is
   counted as proven by that check alone.

Whole numbers only, every tie broken by index: each rank gets the same answer, and split.c, which is this file step by
step, the same integers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_serve.eplb.split.layer import Int64s, LayerSlots, ReplicaGraph
from moe_serve.eplb.split.policy import NativeSplit, SplitPolicy, TurnSplit

PROVEN, REPAIRED, UNPROVEN = 0, 1, 2  # outcomes: optimal at once, optimal after repair, not proven


class ExactSplit(SplitPolicy):
    """The smallest possible largest rank load. reaches: 1, ranks of a node, all ranks."""

    def __init__(
        self,
        layer: LayerSlots,
        reaches: tuple[int, ...],
        library: ctypes.CDLL | None = None,
        weight_rows: int = 0,
        tile_rows: int = 0,
    ):
        """weight_rows, tile_rows: of the split by time; 0 = by tokens"""
        self._graph = graph = ReplicaGraph.of(layer)
        prices = weight_rows, tile_rows
        native = None if library is None else NativeSplit(library, layer, reaches, graph, prices)
        super().__init__("exact", layer, native)
        self._reaches = reaches

    @cached_property
    def _near(self) -> TurnSplit:
        """The split to begin from: within all reaches but the last, over the replicas of the graph."""
        layer, graph = self.layer, self._graph
        slots = np.full(layer.num_slots, layer.num_logical)
        slots[list(graph.replica_slot)] = np.array(graph.experts, dtype=np.int64)[list(graph.owner)]
        one_each = LayerSlots(slots, layer.num_logical, layer.topology, layer.layer_row)
        return TurnSplit("near", one_each, self._reaches[:-1])

    def _start_of(self, counts: Int64s) -> list[int] | None:
        """Returns the tokens of each replica to begin from; None where sources are not known."""
        if len(counts) == 1:
            return None
        start: list[int] = self._near.split_plainly(counts).sum(axis=0)[list(self._graph.replica_slot)].tolist()
        return start

    def split_plainly(self, counts: Int64s) -> Int64s:
        graph, totals = self._graph, counts.sum(axis=0).tolist()
        result = split_exact(graph, totals, self._start_of(counts))
        if len(counts) == 1:
            sent = result.replica_tokens[None]
        else:
            sent = send_short(graph, self._reaches, counts[:, graph.experts], result.replica_tokens)
        proven = is_proven(graph, totals, result)
        self.outcomes[UNPROVEN if not proven else REPAIRED if result.num_pushes else PROVEN] += 1
        return graph.to_slots(counts, sent)


@dataclass(frozen=True, eq=False)
class ExactResult:
    """An optimal split and the proof that it is one.

    replica_tokens: [C] int64, tokens of each replica of the graph
    rank_load:      [R] int64
    max_load:       the largest rank load, the smallest possible one
    certificate:    ranks S, ascending, with ceil(confined_load(S) / |S|) == max_load
    num_pushes:     paths along which tokens were moved after the start
    """

    replica_tokens: Int64s
    rank_load: Int64s
    max_load: int
    certificate: tuple[int, ...]
    num_pushes: int


def is_proven(graph: ReplicaGraph, counts: Sequence[int], result: ExactResult) -> bool:
    """Returns whether the certificate proves that no split has a smaller largest rank load. counts: [E]"""
    least = -(-confined_load(graph, counts, result.certificate) // len(result.certificate))
    return least == int(result.rank_load.max())


def confined_load(graph: ReplicaGraph, counts: Sequence[int], ranks: Sequence[int]) -> int:
    """Returns the tokens that no split can take off these ranks: those of experts that live on them alone.

    counts: [E], tokens of each expert
    """
    inside = set(ranks)
    slots_per_rank = graph.layer.slots_per_rank
    load = sum(
        int(counts[e]) for e, s in enumerate(graph.fixed_slot.tolist()) if s >= 0 and s // slots_per_rank in inside
    )
    for i, expert in enumerate(graph.experts):
        if inside.issuperset(graph.replica_rank[graph.replica_start[i] : graph.replica_start[i + 1]]):
            load += int(counts[expert])
    return load


def split_exact(graph: ReplicaGraph, counts: Sequence[int], start: Sequence[int] | None = None) -> ExactResult:
    """Returns the split with the smallest possible largest rank load. See the module for the method.

    counts: [E] whole numbers >= 0
    start:  [C] tokens per replica to begin from, at most its tokens for each expert; None = nothing. The rest is
            water-filled, and only what must leave the start does: one with short routes mostly keeps them
    """
    load = [0] * graph.num_ranks
    slots_per_rank = graph.layer.slots_per_rank
    for slot, tokens in zip(graph.fixed_slot.tolist(), counts, strict=True):
        if slot >= 0:
            load[slot // slots_per_rank] += tokens
    given = [0] * graph.num_replicas if start is None else list(start)
    tokens_of = [counts[e] for e in graph.experts]
    if start is not None:
        for i in range(len(tokens_of)):
            for c in range(graph.replica_start[i], graph.replica_start[i + 1]):
                load[graph.replica_rank[c]] += given[c]
                tokens_of[i] -= given[c]
    if start is None:
        _share_evenly(graph, tokens_of, load, given)
        _level_forest(graph, load, given)
    else:
        _water_fill(graph, tokens_of, load, given)
    max_load, cut, num_pushes = level(graph, load, given)
    return ExactResult(
        np.array(given, dtype=np.int64), np.array(load, dtype=np.int64), max_load, tuple(cut), num_pushes
    )


def _water_fill(graph: ReplicaGraph, tokens_of: Sequence[int], load: list[int], given: list[int]) -> None:
    """Gives each replicated expert's tokens_of[i] to its least loaded ranks; adds to load and given."""
    replica_start, replica_rank = graph.replica_start, graph.replica_rank
    for i in sorted(range(len(tokens_of)), key=lambda i: -tokens_of[i]):  # stable: ties stay in order of expert id
        tokens = tokens_of[i]
        if tokens == 0:
            break
        first, end = replica_start[i], replica_start[i + 1]
        by_load = sorted(range(first, end), key=lambda c: load[replica_rank[c]])
        # The least loaded ranks end level: the largest number of them whose tallest stays below that level.
        below, num_filled = 0, 0
        for c in by_load:
            if num_filled * load[replica_rank[c]] - below >= tokens:
                break
            below += load[replica_rank[c]]
            num_filled += 1
        level, extra = divmod(tokens + below, num_filled)
        for position, c in enumerate(by_load[:num_filled]):
            amount = level + (position < extra) - load[replica_rank[c]]
            given[c] += amount
            load[replica_rank[c]] += amount


def _share_evenly(graph: ReplicaGraph, tokens_of: Sequence[int], load: list[int], given: list[int]) -> None:
    """Gives every replica of an expert the same share of its tokens_of[i] tokens; adds to load and given."""
    for i, tokens in enumerate(tokens_of):
        first, end = graph.replica_start[i], graph.replica_start[i + 1]
        share, odd = divmod(tokens, end - first)
        for c in range(first, end):
            amount = share + (c - first < odd)
            given[c] += amount
            load[graph.replica_rank[c]] += amount


def _level_forest(graph: ReplicaGraph, load: list[int], given: list[int]) -> None:
    """Brings every rank to the mean of all, leaves first, as far as the expert shared with its parent allows."""
    level = -(-sum(load) // len(graph.live))
    forest = graph.forest
    for rank, up, mine, theirs in zip(
        forest.child, forest.parent, forest.child_replica, forest.parent_replica, strict=True
    ):
        amount = max(min(load[rank] - level, given[mine]), -given[theirs])  # to the parent, or from it
        given[mine] -= amount
        load[rank] -= amount
        given[theirs] += amount
        load[up] += amount


def level(graph: ReplicaGraph, load: list[int], given: list[int]) -> tuple[int, list[int], int]:
    """Moves tokens between ranks until the largest load is optimal; returns it, its certificate, and the moves."""
    replica_rank, replica_start = graph.replica_rank, graph.replica_start
    cut = list(graph.live)  # a rank without any slot can take nothing, so it must not lower the first bound
    bound = -(-sum(load) // len(cut))
    num_pushes = 0
    heaviest = max(load)
    while heaviest > bound:
        source = load.index(heaviest)
        # Breadth first, so that paths are short; via[r] = (replica that gives, replica on r that takes).
        via: dict[int, tuple[int, int]] = {source: (-1, -1)}
        queue = [source]
        target = -1
        for rank in queue:
            for give in graph.holder_replica[graph.holder_start[rank] : graph.holder_start[rank + 1]]:
                if given[give] == 0:
                    continue
                i = graph.owner[give]
                for take in range(replica_start[i], replica_start[i + 1]):
                    other = replica_rank[take]
                    if other not in via:
                        via[other] = (give, take)
                        if load[other] < bound:
                            target = other
                            break
                        queue.append(other)
                if target >= 0:
                    break
            if target >= 0:
                break
        if target < 0:
            cut = sorted(queue)
            bound = -(-sum(load[r] for r in cut) // len(cut))
            continue
        amount = min(heaviest - bound, bound - load[target])
        rank = target
        while rank != source:
            give, _ = via[rank]
            amount = min(amount, given[give])
            rank = replica_rank[give]
        load[source] -= amount
        load[target] += amount
        rank = target
        while rank != source:
            give, take = via[rank]
            given[give] -= amount
            given[take] += amount
            rank = replica_rank[give]
        heaviest = max(load)
        num_pushes += 1
    return bound, cut, num_pushes


def send_short(graph: ReplicaGraph, reaches: tuple[int, ...], tokens: Int64s, replica_tokens: Int64s) -> Int64s:
    """Returns how much each rank sends to each replica, [R, C] int64, over the shortest routes at these totals.

    Everything is prefix sums over (source rank, replica): sources and replicas of an expert are laid side by side as
    intervals of its tokens, and their overlap is what one sends to the other. So every rank derives the same table from
    the same counts, and no token needs to be looked at.

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


class FewestActivatedSplit(SplitPolicy):
    """All tokens of an expert go to one replica; the exact split of one token per active expert says which.

    The worst rank has as few active experts as possible: decode at small batches is bound by streaming their weights
    (METRO).
    """

    def __init__(self, layer: LayerSlots):
        super().__init__("fewest_activated", layer)
        self._graph = ReplicaGraph.of(layer)

    def split_plainly(self, counts: Int64s) -> Int64s:
        graph = self._graph
        totals = counts.sum(axis=0)
        active = (totals > 0).astype(np.int64).tolist()
        chosen = split_exact(graph, active, self._start(totals.tolist())).replica_tokens
        owner = np.array(graph.owner, dtype=np.int64)
        return graph.to_slots(counts, counts[:, graph.experts][:, owner] * chosen)

    def _start(self, totals: list[int]) -> list[int]:
        """Picks, heaviest expert first, the rank with fewest active experts, then fewest tokens: among choices with
        the same number of active experts this leans to balanced tokens."""
        graph = self._graph
        load = [(0, 0)] * graph.num_ranks
        for slot, tokens in zip(graph.fixed_slot.tolist(), totals, strict=True):
            if slot >= 0 and tokens:
                rank = slot // graph.layer.slots_per_rank
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        start = [0] * graph.num_replicas
        for i in sorted(range(len(graph.experts)), key=lambda i: -totals[graph.experts[i]]):
            tokens = totals[graph.experts[i]]
            if tokens:
                replicas = range(graph.replica_start[i], graph.replica_start[i + 1])
                best = min(replicas, key=lambda c: load[graph.replica_rank[c]])
                start[best] = 1
                rank = graph.replica_rank[best]
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        return start
