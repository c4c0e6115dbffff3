# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Shares a batch over the replicas of its experts and gives each token its slot, in one launch: ep/device_split.py,
with the same integers.

Program: an expert, and one more for entries without an expert and slots without one. For the exact split every
program of a replicated expert solves the whole split again, since that takes less time than another launch or a wait
for the one that solved it: a few dozen dependent steps of [N, R] blocks, each of them a reduction, so the number of
steps is what matters, not the number of elements. The steps and every tie are those of kernels/exact_split.py, hence
the same split, bit for bit, on every rank.

Shape words: E = num_logical, P = num_slots, R = num_ranks, N = experts that may have replicas.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.exact_split import MAX_PUSHES, SWEEPS

ELEMENTS_PER_WARP = 1024  # of the [N, R] block; 2048 spill
_STEP_ELEMENTS = 8192  # of the [entries, slots of an expert] block
_SHARE_ELEMENTS = 2048  # of the [ranks, slots of an expert] block


def split_replicas_triton(
    ids: Tensor, counts: Tensor, rank: int, tables: Mapping[str, Tensor], ranks_per_node: int,
    outcomes: Tensor | None, sweeps: int = SWEEPS, max_pushes: int = MAX_PUSHES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the slot of each entry, [T, K] int64 (-1 stays -1), and the rows of every rank for every slot, [R, P].

    ids: [T, K] int64, -1 = none;  counts: [R, E] int64, whose row `rank` counts ids;  tables: as of DeviceSplit
    outcomes: [3] int64, to which the exact split adds how it ended; None: slots take turns
    """
    (num_ranks, num_logical), num_slots, exact = counts.shape, tables["by_expert"].shape[0], outcomes is not None
    physical, ids, counts = torch.empty_like(ids), ids.contiguous(), counts.contiguous()
    rows = torch.empty(num_ranks, num_slots, dtype=torch.int64, device=ids.device)
    # A fact of the shape: if every expert has a slot, one has no more than this. So many slots may be empty, too.
    columns = triton.next_power_of_2(num_slots - num_logical + 1)
    table = [tables[name] for name in ("fixed_slot", "experts", "replica_slot")] if exact else [None] * 3
    num_replicated = tables["experts"].shape[0] if exact else 0
    block = triton.next_power_of_2(max(1, num_replicated)) * triton.next_power_of_2(num_ranks)
    split_replicas_kernel[(num_logical + 1,)](
        ids, counts, physical, rows, outcomes, tables["by_expert"], tables["slot_start"],
        *(tables[name] for name in ("size", "turn", "uses", "serves")), *table,
        rank, ids.numel(), num_logical, num_slots, num_ranks, ranks_per_node, num_replicated, sweeps, max_pushes,
        NEAREST=tables["size"].shape[0] > 1, EXACT=exact, COLUMNS=columns, STEP=max(16, _STEP_ELEMENTS // columns),
        SOURCES=max(1, min(triton.next_power_of_2(num_ranks), _SHARE_ELEMENTS // columns)),
        ROWS=triton.next_power_of_2(max(1, num_replicated)), RANKS=triton.next_power_of_2(num_ranks),
        num_warps=max(4, min(8, block // ELEMENTS_PER_WARP)),
    )  # fmt: skip
    return physical, rows


@triton.jit(do_not_specialize=["rank", "num_ids"])
def split_replicas_kernel(
    ids, counts, physical, rows, outcomes, by_expert, slot_start, size, turn, uses, serves,
    fixed_slot, experts, replica_slot,
    rank, num_ids, num_logical, num_slots, num_ranks, ranks_per_node, num_replicated, sweeps, max_pushes,
    NEAREST: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SOURCES: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """int32 inside: a batch has fewer than 2^31 tokens."""
    expert = tl.program_id(0)
    is_expert = expert < num_logical
    column = tl.arange(0, COLUMNS)
    first = tl.load(slot_start + expert).to(tl.int32)
    end = tl.load(slot_start + expert + 1).to(tl.int32)
    in_slots = column < end - first
    slot = tl.load(by_expert + first + column, mask=in_slots, other=0).to(tl.int32)
    if EXACT:
        given, outcome = share_exactly(
            counts, fixed_slot, experts, replica_slot, expert, num_logical, num_replicated, num_ranks,
            num_slots // num_ranks, sweeps, max_pushes, ROWS, RANKS,
        )  # fmt: skip
        if is_expert == 0:
            tl.atomic_add(outcomes + outcome, 1)
        # Two slots of an expert on one rank: the lower one takes all.
        slot_rank = slot // (num_slots // num_ranks)
        slot_before = tl.load(by_expert + first + column - 1, mask=in_slots & (column > 0), other=-1).to(tl.int32)
        is_lowest = in_slots & ((column == 0) | (slot_before // (num_slots // num_ranks) != slot_rank))
        at_rank = slot_rank[:, None] == tl.arange(0, RANKS)[None, :]
        slot_tokens = tl.where(is_lowest, tl.sum(tl.where(at_rank, given[None, :], 0), axis=1), 0)
        slot_end = tl.cumsum(slot_tokens, axis=0)
        slot_begin = slot_end - slot_tokens

    # The rows of each source rank for each slot, SOURCES ranks at a time.
    own = tl.zeros((COLUMNS,), dtype=tl.int32)
    before, node_before, last_node = 0, 0, -1  # tokens of lower ranks, of all and of the last node
    for start in range(0, num_ranks, SOURCES):
        source = start + tl.arange(0, SOURCES)
        inside = source < tl.where(is_expert, num_ranks, 0)
        tokens = tl.load(counts + source * num_logical + expert, mask=inside, other=0).to(tl.int32)
        if EXACT:
            # Tokens of the expert lie in a row, by source rank; its slots cut the same row, in order of slot.
            source_end = before + tl.cumsum(tokens, axis=0)
            ends = tl.minimum(slot_end[None, :], source_end[:, None])
            begins = tl.maximum(slot_begin[None, :], (source_end - tokens)[:, None])
            shares = tl.maximum(ends - begins, 0)
            before += tl.sum(tokens)
        elif NEAREST:
            # A source uses the first of its reaches that holds the expert: itself, its node, all.
            at = source * num_logical + expert
            mine = tl.where(tl.load(uses + at, mask=inside, other=0) != 0, tokens, 0)
            at += num_ranks * num_logical
            of_node = tl.where(tl.load(uses + at, mask=inside, other=0) != 0, tokens, 0)
            at += num_ranks * num_logical
            of_all = tl.where(tl.load(uses + at, mask=inside, other=0) != 0, tokens, 0)
            node = source // ranks_per_node
            lower = (node[:, None] == node[None, :]) & (source[None, :] < source[:, None])
            node_ahead = tl.sum(tl.where(lower, of_node[None, :], 0), axis=1)
            node_ahead += tl.where(node == last_node, node_before, 0)
            ahead = before + tl.cumsum(of_all, axis=0) - of_all
            shares = take_turns(mine, 0 * mine, source, slot, in_slots, 0, size, turn, serves, num_ranks, num_slots)
            shares += take_turns(
                of_node, node_ahead, source, slot, in_slots, 1, size, turn, serves, num_ranks, num_slots
            )
            shares += take_turns(of_all, ahead, source, slot, in_slots, 2, size, turn, serves, num_ranks, num_slots)
            before += tl.sum(of_all)
            newest = tl.minimum(start + SOURCES, num_ranks) - 1
            kept = tl.where(newest // ranks_per_node == last_node, node_before, 0)
            last_node = newest // ranks_per_node
            node_before = kept + tl.sum(tl.where(node == last_node, of_node, 0))
        else:
            ahead = before + tl.cumsum(tokens, axis=0) - tokens
            shares = take_turns(tokens, ahead, source, slot, in_slots, 0, size, turn, serves, num_ranks, num_slots)
            before += tl.sum(tokens)
        to_row = (source < num_ranks)[:, None] & in_slots[None, :]
        tl.store(rows + source[:, None] * num_slots + slot[None, :], shares.to(tl.int64), mask=to_row)
        own += tl.sum(tl.where((source == rank)[:, None], shares, 0), axis=0)

    # The tokens of this rank fill the slots in order.
    own_end = tl.cumsum(own, axis=0)
    found = 0
    for start in range(0, num_ids, STEP):
        entry = start + tl.arange(0, STEP)
        named = tl.load(ids + entry, mask=entry < num_ids, other=num_logical).to(tl.int32)
        mine = named == tl.where(is_expert, expert, -1)
        ordinal = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        index = tl.sum((in_slots[None, :] & (own_end[None, :] <= ordinal[:, None])).to(tl.int32), axis=1)
        has_slot = mine & (index < tl.where(is_expert, end - first, 0))
        chosen = tl.load(by_expert + first + index, mask=has_slot, other=-1)
        tl.store(physical + entry, chosen, mask=mine)
        found += tl.sum(mine.to(tl.int32))


@triton.jit
def take_turns(tokens, ahead, source, slot, in_slots, reach: tl.constexpr, size, turn, serves, num_ranks, num_slots):
    """Returns what each slot takes of the tokens of each source rank, [sources, slots], when slots take turns.

    ahead: [sources], tokens that lower ranks of the group have given these slots before
    """
    slots = tl.load(size + reach * num_slots + slot, mask=in_slots, other=1).to(tl.int32)[None, :]
    turns = tl.load(turn + reach * num_slots + slot, mask=in_slots, other=0).to(tl.int32)[None, :]
    inside = (source < num_ranks)[:, None] & in_slots[None, :]
    at = (reach * num_ranks + source)[:, None] * num_slots + slot[None, :]
    serving = tl.load(serves + at, mask=inside, other=0) != 0
    turns = ((turns - ahead[:, None]) % slots + slots) % slots  # a remainder has the sign of what is divided
    share = tokens[:, None] // slots + (turns < tokens[:, None] % slots).to(tl.int32)
    return tl.where(serving, share, 0)


@triton.jit
def share_exactly(
    counts, fixed_slot, experts, replica_slot, expert, num_logical, num_replicated, num_ranks, slots_per_rank, sweeps,
    max_pushes, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Returns the tokens of one expert by rank, [RANKS] int32, and how the split of the layer ended.

    An expert on one rank is not split, and its program leaves the loops at once.
    """
    rank = tl.arange(0, RANKS)
    row = tl.arange(0, ROWS)
    replicated = tl.load(experts + row, mask=row < num_replicated, other=-1).to(tl.int32)
    mine = replicated == expert
    solves = (tl.max(mine.to(tl.int32)) > 0) | (expert == num_logical)
    load, used, tokens, fixed = sum_loads(
        counts, fixed_slot, replicated, expert, solves, num_logical, num_ranks, slots_per_rank, rank, ROWS, RANKS
    )
    at = row[:, None] * num_ranks + rank[None, :]
    inside = (row[:, None] < num_replicated) & (rank[None, :] < num_ranks)
    held = tl.load(replica_slot + at, mask=inside, other=-1) >= 0
    live = tl.sum((tl.maximum(used, tl.max(held.to(tl.int32), axis=0)) > 0).to(tl.int32))
    # Position of each expert when sorted by tokens, most first, ties by id.
    ahead = (tokens[None, :] > tokens[:, None]) | ((tokens[None, :] == tokens[:, None]) & (row[None, :] < row[:, None]))
    order = tl.sum(ahead.to(tl.int32), axis=1)

    given = tl.zeros((ROWS, RANKS), dtype=tl.int32)
    for step in range(tl.where(solves, sweeps * num_replicated, 0)):
        is_it = order == step % num_replicated
        of_it = is_it[:, None]
        old = tl.sum(tl.where(of_it, given, 0), axis=0)
        load -= old
        new = water_fill(tl.sum(tl.where(is_it, tokens, 0)), tl.sum((of_it & held).to(tl.int32), axis=0) > 0, load)
        load += new
        given = tl.where(of_it, new[None, :], given)

    total = tl.sum(load)
    bound = (total + tl.maximum(live, 1) - 1) // tl.maximum(live, 1)
    load = tl.where(rank < num_ranks, load, -1)  # a rank that does not exist is never the heaviest
    pushes = 0
    stopped = tl.where(solves, 0, 1)
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
    return tl.sum(tl.where(mine[:, None], given, 0), axis=0) + fixed, outcome


@triton.jit
def sum_loads(
    counts, fixed_slot, replicated, expert, solves, num_logical, num_ranks, slots_per_rank, rank,
    ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Returns (load of the experts that live on one rank, [RANKS]; 1 where a rank has any, [RANKS]; tokens of the
    replicated ones, [ROWS]; tokens of `expert` by rank where it lives on one, [RANKS])."""
    SOURCES: tl.constexpr = 16
    EXPERTS: tl.constexpr = 64
    load = tl.zeros((RANKS,), dtype=tl.int32)
    used = tl.zeros((RANKS,), dtype=tl.int32)
    tokens = tl.zeros((ROWS,), dtype=tl.int32)
    own = 0
    for first in range(0, num_ranks, SOURCES):
        source = first + tl.arange(0, SOURCES)
        at = counts + source * num_logical
        of_expert = source < tl.where(expert < num_logical, num_ranks, 0)
        own += tl.sum(tl.load(at + expert, mask=of_expert, other=0).to(tl.int32))
        of_row = (source < tl.where(solves, num_ranks, 0))[:, None] & (replicated >= 0)[None, :]
        tokens += tl.sum(tl.load(at[:, None] + replicated[None, :], mask=of_row, other=0).to(tl.int32), axis=0)
    for start in range(0, tl.where(solves, num_logical, 0), EXPERTS):
        each = start + tl.arange(0, EXPERTS)
        slot = tl.load(fixed_slot + each, mask=each < num_logical, other=-1).to(tl.int32)
        sums = tl.zeros((EXPERTS,), dtype=tl.int32)
        for first in range(0, num_ranks, SOURCES):
            source = first + tl.arange(0, SOURCES)
            inside = (source < num_ranks)[:, None] & (slot >= 0)[None, :]
            at = counts + source[:, None] * num_logical + each[None, :]
            sums += tl.sum(tl.load(at, mask=inside, other=0).to(tl.int32), axis=0)
        here = (slot >= 0)[:, None] & ((slot // slots_per_rank)[:, None] == rank[None, :])
        load += tl.sum(tl.where(here, sums[:, None], 0), axis=0)
        used = tl.maximum(used, tl.max(here.to(tl.int32), axis=0))
    my_slot = tl.load(fixed_slot + tl.minimum(expert, num_logical - 1)).to(tl.int32)
    fixed = tl.where((my_slot >= 0) & (rank == my_slot // slots_per_rank), own, 0)
    return load, used, tokens, fixed


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
