"""Plans placements for the exact split, which divides an expert's tokens over its replicas anew in every batch.

The even split needs equal rank loads. The exact split needs linked ranks: tokens can shift from a heavy rank to a light
one through experts that both hold, so every rank should be reachable through replicas with enough tokens. A ring that
links all ranks by the heaviest experts does that, but leaves no slots for experts that need three replicas or more.

So it makes several placements, from all links to none, and takes, layer by layer, the one whose heaviest rank is lowest
over sampled batches under a fractional optimal split.

Shape words: L = layers, E = experts, R = ranks, K = slots per rank, B = sampled batches.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness, rank_load
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
from moe_serve.eplb.policies.problem import Ids, Problem
from moe_serve.eplb.policies.shares import even_out_shares

Floats = NDArray[np.float64]
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
    tokens = batches.reshape(-1, num_experts)
    shares = even_out_shares(tokens, placement, sweeps=12)
    reached = balancedness(rank_load(tokens, placement, shares))
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
