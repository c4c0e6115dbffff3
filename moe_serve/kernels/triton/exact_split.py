# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of exact_split.py: one program, everything in registers, a few dozen dependent steps of [N, R] blocks.

Each step costs a reduction, so the number of steps is what matters, not the number of elements. The steps and every tie
are those of the reference, hence the same split, bit for bit, on every rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.exact_split import MAX_PUSHES, SWEEPS, SplitTable

ELEMENTS_PER_WARP = 1024  # of the [N, R] block; 2048 spill


def exact_split_triton(
    counts: Tensor, table: SplitTable, outcomes: Tensor, sweeps: int = SWEEPS, max_pushes: int = MAX_PUSHES
) -> Tensor:
    """Returns the tokens of each slot [P] int64 and adds one to outcomes[outcome] ([3] int64); nothing is read back.

    counts: [E] int64, sum below 2^31; all tensors on one CUDA device
    """
    num_experts, num_ranks = table.replica_slot.shape
    slot_tokens = torch.zeros(table.num_slots, dtype=torch.int64, device=counts.device)
    rows, ranks = triton.next_power_of_2(num_experts), triton.next_power_of_2(num_ranks)
    exact_split_kernel[(1,)](
        counts, table.fixed_slot, table.experts, table.replica_slot, slot_tokens, outcomes,
        counts.shape[0], num_experts, num_ranks, table.num_slots // num_ranks, sweeps, max_pushes,
        ROWS=rows, RANKS=ranks, FIXED=64, num_warps=max(1, min(8, rows * ranks // ELEMENTS_PER_WARP)),
    )  # fmt: skip
    return slot_tokens


@triton.jit
def exact_split_kernel(
    counts, fixed_slot, experts, replica_slot, slot_tokens, outcomes,
    num_logical, num_experts, num_ranks, slots_per_rank, sweeps, max_pushes,
    ROWS: tl.constexpr, RANKS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """int32 inside: a batch has fewer than 2^31 tokens."""
    rank = tl.arange(0, RANKS)
    row = tl.arange(0, ROWS)
    load, used = fixed_load(counts, fixed_slot, slot_tokens, num_logical, slots_per_rank, rank, RANKS, FIXED)
    at = row[:, None] * num_ranks + rank[None, :]
    slots = tl.load(replica_slot + at, mask=(row[:, None] < num_experts) & (rank[None, :] < num_ranks), other=-1)
    held = slots >= 0
    expert = tl.load(experts + row, mask=row < num_experts, other=-1)
    tokens = tl.load(counts + expert, mask=expert >= 0, other=0).to(tl.int32)
    live = tl.sum((tl.maximum(used, tl.max(held.to(tl.int32), axis=0)) > 0).to(tl.int32))
    # Position of each expert when sorted by tokens, most first, ties by id.
    ahead = (tokens[None, :] > tokens[:, None]) | ((tokens[None, :] == tokens[:, None]) & (row[None, :] < row[:, None]))
    order = tl.sum(ahead.to(tl.int32), axis=1)

    given = tl.zeros((ROWS, RANKS), dtype=tl.int32)
    for step in range(sweeps * num_experts):
        is_it = order == step % num_experts
        mine = is_it[:, None]
        old = tl.sum(tl.where(mine, given, 0), axis=0)
        load -= old
        new = water_fill(tl.sum(tl.where(is_it, tokens, 0)), tl.sum((mine & held).to(tl.int32), axis=0) > 0, load)
        load += new
        given = tl.where(mine, new[None, :], given)

    total = tl.sum(load)
    bound = (total + tl.maximum(live, 1) - 1) // tl.maximum(live, 1)
    load = tl.where(rank < num_ranks, load, -1)  # a rank that does not exist is never the heaviest
    pushes = 0
    stopped = 0
    while (tl.max(load) > bound) & (stopped == 0):
        source = first_of(load == tl.max(load), rank, RANKS)
        # Breadth first, a level at a time; via: (expert, giver) that reached each rank. Masks that a loop carries are
        # int32: Triton 3.7 fails to compile loops that carry blocks of booleans here.
        reached = (rank == source).to(tl.int32)
        via_expert = tl.full((RANKS,), -1, tl.int32)
        via_giver = tl.full((RANKS,), -1, tl.int32)
        grew = 1
        found = tl.max(reached * (load < bound).to(tl.int32))
        while (grew > 0) & (found == 0):
            giver = tl.min(tl.where((given > 0) & (reached[None, :] > 0), rank[None, :], RANKS), axis=1)
            by = tl.min(tl.where(held & (giver < RANKS)[:, None], row[:, None], ROWS), axis=0)
            new_ranks = (by < ROWS) & (reached == 0)
            by_giver = tl.sum(tl.where(row[:, None] == by[None, :], giver[:, None], 0), axis=0)
            via_expert = tl.where(new_ranks, by, via_expert)
            via_giver = tl.where(new_ranks, by_giver, via_giver)
            reached += new_ranks.to(tl.int32)
            grew = tl.sum(new_ranks.to(tl.int32))
            found = tl.max(reached * (load < bound).to(tl.int32))
        # No branches from here on (the compiler takes loops inside them badly): a round without a target moves nothing.
        target = tl.where(found > 0, first_of((reached > 0) & (load < bound), rank, RANKS), source)
        amount = tl.minimum(at_rank(load, source, rank) - bound, bound - at_rank(load, target, rank))
        # The path's moves as one signed block: -1 where tokens leave, +1 where they arrive.
        moves = tl.zeros((ROWS, RANKS), dtype=tl.int32)
        taker = target
        while taker != source:
            giver_rank = at_rank(via_giver, taker, rank)
            on_row = row[:, None] == at_rank(via_expert, taker, rank)
            leaves = on_row & (rank[None, :] == giver_rank)
            moves += (on_row & (rank[None, :] == taker)).to(tl.int32) - leaves.to(tl.int32)
            amount = tl.minimum(amount, tl.sum(tl.where(leaves, given, 0)))
            taker = giver_rank
        pushing = found * (pushes < max_pushes).to(tl.int32)
        stopped = found - pushing
        pushes += pushing
        given += moves * (amount * pushing)
        load += ((rank == target).to(tl.int32) - (rank == source).to(tl.int32)) * (amount * pushing)
        members = tl.sum(reached)
        proven = (tl.sum(reached * load) + members - 1) // members
        bound = tl.where(found > 0, bound, proven)
    outcome = tl.where(tl.max(load) > bound, 2, tl.where(pushes > 0, 1, 0))
    tl.atomic_add(outcomes + outcome, 1)
    tl.store(slot_tokens + slots, given.to(tl.int64), mask=held)


@triton.jit
def fixed_load(
    counts, fixed_slot, slot_tokens, num_logical, slots_per_rank, rank, RANKS: tl.constexpr, FIXED: tl.constexpr
):
    """Returns (load of the experts that live on one rank, [RANKS]; 1 where a rank has any), and stores their tokens."""
    load = tl.zeros((RANKS,), dtype=tl.int32)
    used = tl.zeros((RANKS,), dtype=tl.int32)
    for start in range(0, num_logical, FIXED):
        expert = start + tl.arange(0, FIXED)
        slot = tl.load(fixed_slot + expert, mask=expert < num_logical, other=-1)
        tokens = tl.load(counts + expert, mask=expert < num_logical, other=0)
        tl.store(slot_tokens + slot, tokens, mask=slot >= 0)
        here = (slot >= 0)[:, None] & ((slot // slots_per_rank)[:, None] == rank[None, :])
        load += tl.sum(tl.where(here, tokens[:, None], 0).to(tl.int32), axis=0)
        used = tl.maximum(used, tl.max(here.to(tl.int32), axis=0))
    return load, used


@triton.jit
def water_fill(tokens, filled, load):
    """Returns what each rank of `filled` gets so that the lowest end level; the first of them take the remainder."""
    number = tl.maximum(tl.sum(filled.to(tl.int32)), 1)
    volume = tokens + tl.sum(tl.where(filled, load, 0))
    while tl.max((filled & (load > volume // number)).to(tl.int32)) > 0:
        filled = filled & (load <= volume // number)
        number = tl.maximum(tl.sum(filled.to(tl.int32)), 1)
        volume = tokens + tl.sum(tl.where(filled, load, 0))
    position = tl.cumsum(filled.to(tl.int32), axis=0) - 1
    return tl.where(filled, volume // number + (position < volume % number).to(tl.int32) - load, 0)


@triton.jit
def first_of(mask, index, NONE: tl.constexpr):
    """Returns the lowest index in the mask."""
    return tl.min(tl.where(mask, index, NONE))


@triton.jit
def at_rank(vector, which, rank):
    """Returns one element of a vector over ranks."""
    return tl.sum(tl.where(rank == which, vector, 0))
