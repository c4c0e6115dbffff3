"""The exact per-batch split of one layer: shares whose most loaded rank carries ceil of the LP optimum.

Minimising the largest rank load is a flow problem. Tokens of a replicated expert may flow between the ranks that hold
it; for any set S of ranks, the tokens of experts that live on S alone must stay there, so no split is better than
ceil(confined(S) / |S|), and the best S attains it (max-flow min-cut; integer capacities have integer flows).

1. Start: experts in descending order of tokens, each water-filled over its ranks, once. (Further sweeps were measured:
   they cost more than the paths that they save.)
2. L = ceil(total / ranks). While a rank carries more than L: search from it, along experts that have tokens to give,
   for a rank below L. Found: push tokens along the path. Not found: the ranks reached are such an S, so
   L <- ceil(load(S) / |S|): Newton's step on max over S (Dinkelbach). L only rises, and the flow is kept.
3. The last S that raised L is the certificate: anybody can check it with a sum over experts.

Whole numbers only, every tie broken by index: each rank and device gets the same answer. split_exact.c is this file
in C, step by step; both give equal results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.split.replica_graph import ReplicaGraph


@dataclass(frozen=True, eq=False)
class ExactSplit:
    """An optimal split and the proof that it is one.

    copy_tokens: [C] int64, tokens of each copy of the graph
    rank_load:   [R] int64
    max_load:    the largest rank load, the smallest possible one
    certificate: ranks S, ascending, with ceil(confined_load(S) / |S|) == max_load
    """

    copy_tokens: NDArray[np.int64]
    rank_load: NDArray[np.int64]
    max_load: int
    certificate: tuple[int, ...]


def confined_load(graph: ReplicaGraph, counts: Sequence[int], ranks: Sequence[int]) -> int:
    """Returns the tokens that no split can take off these ranks: those of experts that live on them alone.

    counts: [E], tokens of each expert
    """
    inside = set(ranks)
    slots_per_rank = graph.slots_per_rank
    load = sum(
        int(counts[e]) for e, s in enumerate(graph.home_slot.tolist()) if s >= 0 and s // slots_per_rank in inside
    )
    for i, expert in enumerate(graph.experts):
        if inside.issuperset(graph.copy_rank[graph.copy_start[i] : graph.copy_start[i + 1]]):
            load += int(counts[expert])
    return load


def split_exact(graph: ReplicaGraph, counts: Sequence[int], start: Sequence[int] | None = None) -> ExactSplit:
    """Returns the split with the smallest possible largest rank load. See the module for the method.

    counts: [E] whole numbers >= 0
    start:  [C] tokens per copy to begin from, at most its tokens for each expert; only the rest is water-filled, and
            of the start only what must move is moved: one that is good for another reason, such as short ways, stays
            mostly as it is. None = nothing
    """
    load = [0] * graph.num_ranks
    slots_per_rank = graph.slots_per_rank
    for slot, tokens in zip(graph.home_slot.tolist(), counts, strict=True):
        if slot >= 0:
            load[slot // slots_per_rank] += tokens
    given = [0] * graph.num_copies if start is None else list(start)
    tokens_of = [counts[e] for e in graph.experts]
    if start is not None:
        for i in range(len(tokens_of)):
            for c in range(graph.copy_start[i], graph.copy_start[i + 1]):
                load[graph.copy_rank[c]] += given[c]
                tokens_of[i] -= given[c]
    _water_fill(graph, tokens_of, load, given)
    max_load, cut = _level(graph, load, given)
    return ExactSplit(np.array(given, dtype=np.int64), np.array(load, dtype=np.int64), max_load, tuple(cut))


def _water_fill(graph: ReplicaGraph, tokens_of: Sequence[int], load: list[int], given: list[int]) -> None:
    """Gives each replicated expert's tokens_of[i] to its least loaded ranks; adds to load and given."""
    copy_start, copy_rank = graph.copy_start, graph.copy_rank
    for i in sorted(range(len(tokens_of)), key=lambda i: -tokens_of[i]):  # stable: ties stay in order of expert id
        tokens = tokens_of[i]
        if tokens == 0:
            break
        first, end = copy_start[i], copy_start[i + 1]
        if end - first == 2:  # the usual case, in closed form
            a, b = copy_rank[first], copy_rank[first + 1]
            to_a = min(max((tokens + load[b] - load[a] + 1) >> 1, 0), tokens)
            given[first] += to_a
            given[first + 1] += tokens - to_a
            load[a] += to_a
            load[b] += tokens - to_a
            continue
        by_load = sorted(range(first, end), key=lambda c: load[copy_rank[c]])
        # The least loaded ranks end level: the largest number of them whose tallest stays below that level.
        below, num_filled = 0, 0
        for c in by_load:
            if num_filled * load[copy_rank[c]] - below >= tokens:
                break
            below += load[copy_rank[c]]
            num_filled += 1
        level, extra = divmod(tokens + below, num_filled)
        for place, c in enumerate(by_load[:num_filled]):
            amount = level + (place < extra) - load[copy_rank[c]]
            given[c] += amount
            load[copy_rank[c]] += amount


def _level(graph: ReplicaGraph, load: list[int], given: list[int]) -> tuple[int, list[int]]:
    """Moves tokens between ranks until the largest load is optimal; returns it and its certificate."""
    copy_rank, copy_start = graph.copy_rank, graph.copy_start
    # A rank without any slot can take nothing, so it must not lower the first bound.
    live = sorted(set(copy_rank).union((graph.home_slot[graph.home_slot >= 0] // graph.slots_per_rank).tolist()))
    cut = live or list(range(graph.num_ranks))
    bound = -(-sum(load) // len(cut))
    owner = [i for i in range(len(graph.experts)) for _ in range(copy_start[i], copy_start[i + 1])]
    heaviest = max(load)
    while heaviest > bound:
        source = load.index(heaviest)
        # Breadth first, so that paths are short; via[r] = (copy that gives, copy on r that takes).
        via: dict[int, tuple[int, int]] = {source: (-1, -1)}
        queue = [source]
        target = -1
        for rank in queue:
            for give in graph.holder_copy[graph.holder_start[rank] : graph.holder_start[rank + 1]]:
                if given[give] == 0:
                    continue
                i = owner[give]
                for take in range(copy_start[i], copy_start[i + 1]):
                    other = copy_rank[take]
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
            rank = copy_rank[give]
        load[source] -= amount
        load[target] += amount
        rank = target
        while rank != source:
            give, take = via[rank]
            given[give] -= amount
            given[take] += amount
            rank = copy_rank[give]
        heaviest = max(load)
    return bound, cut
