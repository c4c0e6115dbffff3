# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The receiving halves of low-latency dispatch and combine. Only these kernels wait.

They are launched after every send that they wait for has been launched, on this GPU or by a peer that makes the same
calls, and every wait ends after max_spins reads: a missing peer is noted in `late` and the step is void. A row is read
only after its own flag holds the number of this round.
"""

import triton
import triton.language as tl

from moe_serve.dispatch.gpu.shmem_triton import values_of, wait_for, wait_for_each
from moe_serve.kernels.triton.mode import as_dtype, multiply_add


@triton.jit
def dispatch_receive_kernel(
    slab, slab_scale, origin, rows_per_slot, late, peers, finished, round_now, first_rank, max_spins,
    hidden, num_ranks, slots_per_rank, max_tokens, counts_at, arrived_at, rows_at, row_bytes, scales_at,
    TOPK: tl.constexpr, HEADER_INTS: tl.constexpr, HEADER: tl.constexpr, GROUPS: tl.constexpr, RANKS: tl.constexpr,
    SPLITS: tl.constexpr, WIRE: tl.constexpr, FP8: tl.constexpr, UNPACK_FP8: tl.constexpr,
):  # fmt: skip
    """Closes the gaps between segments: rows of a slot become its slab's first rows, by source rank, then token.

    Program: ((slot, source, split), rank). slab: [V, S, capacity, hidden] compute dtype, or e4m3 with slab_scale
    [V, S, capacity, hidden / 128] when FP8 rows stay FP8 (UNPACK_FP8 False); origin: [V, S, capacity] int64, source <<
    32 | t * K + k; rows_per_slot: [V, S] int64; late: [V, R] int64, last round that this source missed
    finished: [V] int64, the round before this one;  round_now: [V] int64, becomes this one for combine's kernels
    """
    split = tl.program_id(0) % SPLITS
    source = tl.program_id(0) // SPLITS % num_ranks
    slot = tl.program_id(0) // SPLITS // num_ranks
    local = tl.program_id(1)
    own = tl.load(peers + first_rank + local)
    round = tl.load(finished + local) + 1

    # A count carries its value in the flag itself, below the round.
    ranks = tl.arange(0, RANKS)
    counts_of_slot = counts_at + (slot * num_ranks + ranks).to(tl.int64) * 8
    flags = wait_for_each(own, counts_of_slot, round << 32, ranks < num_ranks, max_spins)
    came = (flags >> 32) == round
    counts = tl.where(came & (ranks < num_ranks), flags & 0xFFFFFFFF, 0)
    first = tl.sum(tl.where(ranks < source, counts, 0))
    count = tl.sum(tl.where(ranks == source, counts, 0)).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(round_now + local, round)
    if (source == 0) & (split == 0):
        tl.store(rows_per_slot + local * slots_per_rank + slot, tl.sum(counts))
        tl.atomic_max(
            late + local * num_ranks + ranks, tl.zeros_like(counts) + round, mask=(ranks < num_ranks) & (came == 0)
        )

    group = tl.arange(0, GROUPS)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    place = tl.arange(0, HEADER)
    capacity = num_ranks * max_tokens
    for i in range(split, count, SPLITS):
        from_row = (slot * num_ranks + source).to(tl.int64) * max_tokens + i
        if wait_for(own, arrived_at + from_row * 8, round, max_spins):
            at = own + rows_at + from_row * row_bytes
            to_row = (local * slots_per_rank + slot).to(tl.int64) * capacity + first + i
            header_at = at.to(tl.pointer_type(tl.int32)) + place
            header = tl.load(header_at, mask=place < HEADER_INTS, other=-1)
            my_slot = (first_rank + local) * slots_per_rank + slot
            mine = (header == my_slot) & (place >= 1) & (place <= TOPK)
            k = tl.min(tl.where(mine, place - 1, TOPK))
            token = tl.sum(tl.where(place == 0, header, 0))
            tl.store(origin + to_row, (source.to(tl.int64) << 32) | (token * TOPK + k).to(tl.int64))
            values = tl.load(values_of(at, HEADER_INTS, WIRE) + channel, mask=channel < hidden, other=0.0)
            if FP8:
                scale_at = (at + scales_at).to(tl.pointer_type(tl.float32))
                scales = tl.load(scale_at + group, mask=group * 128 < hidden, other=0.0)
                if UNPACK_FP8:
                    wide = as_dtype(values.to(tl.float32) * scales[:, None], slab.dtype.element_ty)
                    tl.store(slab + to_row * hidden + channel, wide, mask=channel < hidden)
                else:
                    tl.store(slab + to_row * hidden + channel, values, mask=channel < hidden)
                    tl.store(slab_scale + to_row * tl.cdiv(hidden, 128) + group, scales, mask=group * 128 < hidden)
            else:
                wide = as_dtype(values.to(tl.float32), slab.dtype.element_ty)
                tl.store(slab + to_row * hidden + channel, wide, mask=channel < hidden)
        else:
            tl.atomic_max(late + local * num_ranks + source, round)


@triton.jit(do_not_specialize=["num_tokens"])  # changes from step to step; compiling takes seconds
def combine_receive_kernel(
    out, ids, weights, late, peers, round_now, first_rank, max_spins, num_tokens, hidden, num_ranks, slots_per_rank,
    result_arrived_at, done_at, result_rows_at, result_row_bytes,
    TOPK: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr,
):  # fmt: skip
    """Adds a token's results, weighted, in top-k order in float32: the order is part of the result.

    Program: ((token, split of the row), rank), and one more per rank that waits until all ranks ended the round.
    out: [V, T, hidden], ids: [V, T, TOPK] int64, weights: [V, T, TOPK] float32, round_now: [V] int64
    """
    part = tl.program_id(0)
    local = tl.program_id(1)
    own = tl.load(peers + first_rank + local)
    round = tl.load(round_now + local)
    token = part // SPLITS
    if token < num_tokens:
        column = tl.arange(0, W)
        entry = (local * num_tokens + token) * TOPK
        slots = tl.load(ids + entry + column, mask=column < TOPK, other=-1).to(tl.int32)
        channel = part % SPLITS * BLOCK + tl.arange(0, BLOCK)
        # All flags first, then all rows: the loads of K rows are then in flight together.
        first_k = tl.min(tl.where(slots[:, None] == slots[None, :], column[None, :], W), axis=1)
        places = token * TOPK + first_k
        flags = wait_for_each(own, result_arrived_at + places.to(tl.int64) * 8, round, slots >= 0, max_spins)
        came = (slots >= 0) & (flags == round)
        lost = (slots >= 0) & (came == 0)
        tl.atomic_max(late + local * num_ranks + slots // slots_per_rank, tl.zeros((W,), tl.int64) + round, mask=lost)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in tl.static_range(TOPK):
            adds = tl.max(tl.where(column == k, came.to(tl.int32), 0)) != 0
            place = tl.sum(tl.where(column == k, places, 0)).to(tl.int64)
            values_at = tl.multiple_of((own + result_rows_at + place * result_row_bytes).to(tl.pointer_type(WIRE)), 16)
            values = tl.load(values_at + channel, mask=channel < tl.where(adds, hidden, 0), other=0.0).to(tl.float32)
            added = multiply_add(tl.load(weights + entry + k), values, total)
            total = tl.where(adds, added, total)  # the weight of a -1 entry may be anything
        at_out = out + (local * num_tokens + token).to(tl.int64) * hidden + channel
        tl.store(at_out, as_dtype(total, out.dtype.element_ty), mask=channel < hidden)
    else:
        # From here on every peer has read what this rank sent: the next round of this queue may overwrite it.
        ranks = tl.arange(0, RANKS)
        # A name of its own: Triton takes a variable of both branches to have one shape.
        ended = wait_for_each(own, done_at + ranks.to(tl.int64) * 8, round, ranks < num_ranks, max_spins)
        missing = (ranks < num_ranks) & (ended < round)
        tl.atomic_max(late + local * num_ranks + ranks, tl.zeros_like(ended) + round, mask=missing)
