# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The sending halves of low-latency dispatch and combine.

Grid axis 1 is the rank: 1 in a process with its own GPU, V for V virtual ranks on one. No program here ever waits, so
a launch always ends: that, and launching all sends before any wait, is why nothing can deadlock.

Offsets and sizes come from low_latency_region.Region. Ids blocks are [tokens, W], W the power of two above topk.
"""

import triton
import triton.language as tl

from moe_serve.dispatch.gpu.shmem_triton import put_and_signal, signal, signal_each, values_of
from moe_serve.kernels.triton.mode import as_dtype
from moe_serve.kernels.triton.quantize import quantize_groups

TOKENS_BLOCK = tl.constexpr(128)  # tokens whose ids are looked through at a time
# Tokens of one row of `before`. A program looks through the tokens of its own row alone, so that the work grows with
# the tokens and not with their square.
TOKENS_COUNTED = tl.constexpr(512)


@triton.jit(do_not_specialize=["num_tokens"])  # changes from step to step; compiling takes seconds
def count_before_kernel(ids, before, num_tokens, num_slots, TOPK: tl.constexpr, SLOTS: tl.constexpr):
    """Counts the rows of SLOTS slots. ids: [V, T, TOPK] int64

    before: [V, ceil(T / TOKENS_COUNTED) + 1, P] int32, row i counts the tokens before i * TOKENS_COUNTED; the last all
    """
    ids += tl.program_id(1).to(tl.int64) * num_tokens * TOPK
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < num_slots
    named = tl.where(inside, slot, -1)
    num_rows = tl.cdiv(num_tokens, TOKENS_COUNTED)
    before += tl.program_id(1).to(tl.int64) * (num_rows + 1) * num_slots
    total = tl.zeros((SLOTS,), dtype=tl.int32)
    for row in range(num_rows):
        tl.store(before + row * num_slots + slot, total, mask=inside)
        first = row * TOKENS_COUNTED
        total += count_rows(ids, named, first, tl.minimum(first + TOKENS_COUNTED, num_tokens), TOPK)
    tl.store(before + num_rows * num_slots + slot, total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])  # changes from step to step; compiling takes seconds
def dispatch_send_kernel(
    x, ids, before, peers, finished, first_rank, num_tokens, hidden, num_ranks, slots_per_rank, max_tokens,
    counts_at, arrived_at, rows_at, staged_at, row_bytes, scales_at,
    TOPK: tl.constexpr, W: tl.constexpr, HEADER_INTS: tl.constexpr, HEADER: tl.constexpr, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, WIRE: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. num_tokens-1 send one token each; the others announce the counts of SLOTS slots each.

    x: [V, T, hidden], ids: [V, T, TOPK] int64, finished: [V] int64, the round before this one
    before: as of count_before_kernel; None where T <= TOKENS_COUNTED
    HEADER: HEADER_INTS rounded up to a power of two;  GROUPS: power of two >= hidden / 128
    """
    part = tl.program_id(0)
    rank = first_rank + tl.program_id(1)
    round = tl.load(finished + tl.program_id(1)) + 1
    x += tl.program_id(1).to(tl.int64) * num_tokens * hidden
    ids += tl.program_id(1).to(tl.int64) * num_tokens * TOPK
    num_slots = num_ranks * slots_per_rank
    if before is not None:
        before += tl.program_id(1).to(tl.int64) * (tl.cdiv(num_tokens, TOKENS_COUNTED) + 1) * num_slots
    column = tl.arange(0, W)
    if part < num_tokens:
        group = tl.arange(0, GROUPS)
        channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        values = tl.load(x + part.to(tl.int64) * hidden + channel, mask=channel < hidden, other=0.0).to(tl.float32)
        if FP8:
            wire, scales = quantize_groups(values)
        else:
            wire = as_dtype(values, WIRE)
            scales = tl.zeros((GROUPS,), dtype=tl.float32)
        slots = tl.load(ids + part * TOPK + column, mask=column < TOPK, other=-1).to(tl.int32)
        # Of two entries that name one slot the first sends; both find the result under the first.
        repeats = (slots[:, None] == slots[None, :]) & (column[None, :] < column[:, None])
        sends = (slots >= 0) & (tl.max(repeats.to(tl.int32), axis=1) == 0)
        first = part // TOKENS_COUNTED * TOKENS_COUNTED
        rows = count_rows(ids, slots, first, part, TOPK)
        if before is not None:
            rows += tl.load(before + part // TOKENS_COUNTED * num_slots + slots, mask=sends, other=0)
        slots = tl.where(sends, slots, 0)
        pe = slots // slots_per_rank
        to_row = (slots % slots_per_rank * num_ranks + rank).to(tl.int64) * max_tokens + rows
        from_at = staged_at + part.to(tl.int64) * row_bytes
        if STAGES:
            at = tl.load(peers + rank) + from_at
            write_header(at, ids, part, TOPK, HEADER_INTS, HEADER)
            write_values(at, wire, scales, channel, group, hidden, scales_at, HEADER_INTS, FP8)
            tl.debug_barrier()
        for k in tl.static_range(TOPK):
            if pick(sends.to(tl.int32), k, column) != 0:
                to = pick(to_row, k, column)
                to_pe = pick(pe, k, column)
                if STAGES:
                    put_and_signal(
                        peers, rank, to_pe, rows_at + to * row_bytes, from_at, row_bytes, arrived_at + to * 8, round,
                        NVSHMEM, 1024,
                    )  # fmt: skip
                else:
                    at = tl.load(peers + to_pe) + rows_at + to * row_bytes
                    write_header(at, ids, part, TOPK, HEADER_INTS, HEADER)
                    write_values(at, wire, scales, channel, group, hidden, scales_at, HEADER_INTS, FP8)
        if not STAGES:
            tl.debug_barrier()  # one for all rows of this token, then all their signals
            signal_each(peers, pe, arrived_at + to_row * 8, tl.zeros_like(to_row) + round, sends)
    else:
        slot = (part - num_tokens) * SLOTS + tl.arange(0, SLOTS)
        inside = slot < num_slots
        if before is not None:
            counts = tl.load(before + tl.cdiv(num_tokens, TOKENS_COUNTED) * num_slots + slot, mask=inside, other=0)
        else:
            counts = count_rows(ids, tl.where(inside, slot, -1), 0, num_tokens, TOPK)
        flag_at = counts_at + (slot % slots_per_rank * num_ranks + rank) * 8
        announced = (round << 32) | counts.to(tl.int64)
        if NVSHMEM:
            for i in tl.static_range(SLOTS):
                to_slot = (part - num_tokens) * SLOTS + i
                if to_slot < num_slots:
                    at = pick(flag_at, i, tl.arange(0, SLOTS))
                    signal(peers, rank, to_slot // slots_per_rank, at, pick(announced, i, tl.arange(0, SLOTS)), NVSHMEM)
        else:
            signal_each(peers, tl.where(inside, slot // slots_per_rank, 0), flag_at, announced, inside)


@triton.jit
def combine_send_kernel(
    results, origin, rows_per_slot, peers, round_now, finished, first_rank, hidden, num_ranks, slots_per_rank,
    max_tokens, result_arrived_at, result_rows_at, result_staged_at, result_row_bytes, done_at,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, WIRE: tl.constexpr, STAGES: tl.constexpr,
    COPIES: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Sends every result to its place on the source rank. Program: (slot, split); splits take rows of the slot in turn.

    One more program per rank ends the round: it tells all peers that this rank has read their rows, as the launches
    before this one have.
    results: [V, S, capacity, hidden], origin: [V, S, capacity] int64, source rank << 32 | t * K + k
    round_now: [V] int64, which dispatch_receive_kernel has written;  finished: [V] int64, becomes the same; nothing in
    this launch reads it
    """
    slot = tl.program_id(0) // SPLITS
    rank = first_rank + tl.program_id(1)
    round = tl.load(round_now + tl.program_id(1))
    if slot < slots_per_rank:
        capacity = num_ranks * max_tokens
        slab = (tl.program_id(1) * slots_per_rank + slot).to(tl.int64) * capacity
        num_rows = tl.load(rows_per_slot + tl.program_id(1) * slots_per_rank + slot)
        channel = tl.arange(0, BLOCK)
        for row in range(tl.program_id(0) % SPLITS, num_rows, SPLITS):
            row_origin = tl.load(origin + slab + row)
            source = (row_origin >> 32).to(tl.int32)
            entry = row_origin & 0xFFFFFFFF
            from_at = result_staged_at + (slot.to(tl.int64) * capacity + row) * result_row_bytes
            if COPIES:  # else experts have written them where they are sent from
                if STAGES:
                    at = tl.load(peers + rank) + from_at
                else:
                    at = tl.load(peers + source) + result_rows_at + entry * result_row_bytes
                target = tl.multiple_of(at.to(tl.pointer_type(WIRE)), 16)
                values = tl.load(results + (slab + row) * hidden + channel, mask=channel < hidden)
                tl.store(target + channel, as_dtype(values.to(tl.float32), WIRE), mask=channel < hidden)
                tl.debug_barrier()
            if STAGES:
                put_and_signal(
                    peers, rank, source, result_rows_at + entry * result_row_bytes, from_at, result_row_bytes,
                    result_arrived_at + entry * 8, round, NVSHMEM, 1024,
                )  # fmt: skip
            else:
                signal(peers, rank, source, result_arrived_at + entry * 8, round, NVSHMEM)
    else:
        tl.store(finished + tl.program_id(1), round)
        if NVSHMEM:
            for pe in range(num_ranks):
                signal(peers, rank, pe, done_at + rank * 8, round, NVSHMEM)
        else:
            tl.debug_barrier()
            pe = tl.arange(0, RANKS)
            flag_at = done_at + rank * 8 + tl.zeros((RANKS,), dtype=tl.int64)
            signal_each(peers, pe, flag_at, tl.zeros_like(flag_at) + round, pe < num_ranks)


@triton.jit
def count_rows(ids, slots, first, end, TOPK: tl.constexpr):
    """Returns how many of the tokens from `first` up to `end` name each slot: slots [N] -> [N] int32.

    A pure function of the ids: the same ids put the same rows in the same places, with no counter to race for.
    """
    found = tl.zeros_like(slots)
    for start in range(first, end, TOKENS_BLOCK):
        token = start + tl.arange(0, TOKENS_BLOCK)
        names = (token[:, None] < 0) & (slots[None, :] < 0)  # nothing yet
        for k in tl.static_range(TOPK):
            named = tl.load(ids + token * TOPK + k, mask=token < end, other=-2).to(tl.int32)
            names = names | (named[:, None] == slots[None, :])
        found += tl.sum(names.to(tl.int32), axis=0)
    return found


@triton.jit
def pick(vector, k: tl.constexpr, index):
    """Returns element k of a vector as a scalar."""
    return tl.sum(tl.where(index == k, vector, 0))


@triton.jit
def write_header(at, ids, token, TOPK: tl.constexpr, HEADER_INTS: tl.constexpr, HEADER: tl.constexpr):
    """Writes token number and ids; `at` is an address that is a multiple of 16."""
    place = tl.arange(0, HEADER)
    named = tl.load(ids + token * TOPK + place - 1, mask=(place >= 1) & (place <= TOPK), other=-1).to(tl.int32)
    header = tl.where(place == 0, token, named)
    tl.store(at.to(tl.pointer_type(tl.int32)) + place, header, mask=place < HEADER_INTS)


@triton.jit
def write_values(at, wire, scales, channel, group, hidden, scales_at, HEADER_INTS: tl.constexpr, FP8: tl.constexpr):
    """Writes the values behind the header, and with FP8 the scales behind the values."""
    tl.store(values_of(at, HEADER_INTS, wire.dtype) + channel, wire, mask=channel < hidden)
    if FP8:
        scale_at = (at + scales_at).to(tl.pointer_type(tl.float32))
        tl.store(scale_at + group, scales, mask=group * 128 < hidden)
