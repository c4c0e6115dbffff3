# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of attention_dp/attention.py: attention over the paged cache, for decodes and chunks of any lengths.

A program takes a tile of query rows, which are some tokens of one sequence times the query heads of one key/value head,
and goes over the keys that they see in blocks that begin at multiples of the block. With a latent cache the tile holds
32 heads of a token; programs of the other heads follow it at once, so that latents come from memory once, and each
serves as key and as value.

Rows that are alone in their sequence (decodes) have their keys cut into parts at fixed positions, which are added up in
order. Where there are few rows each part has a program of its own, and `combine_kernel` adds; where there are many, the
program of the row does, with the same roundings. So a row's bits depend on its own query and keys only: not on other
rows of the batch, nor on the GPU.

Nothing is read back to the host: sizes of grids come from the host's lengths, which may be upper bounds.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import AttendShape, Seen
from moe_serve.kernels.triton.mode import as_dtype, dot, multiply_add, widened

LOG2_E = math.log2(math.e)
# Keys of one part. Where parts have programs of their own, their sums are written and read again: of one key/value head
# with 8 query heads of 128 these are 3 % of the part's keys and values, of a latent cache with 128 heads 44 %.
PART_KEYS, LATENT_PART_KEYS = 512, 1024
ENOUGH_PROGRAMS = 128  # as many as keep a GPU busy without cutting rows; changes no bit
COMBINED = 1024  # values that a program of combine_kernel adds up: 8 for each of 128 threads, 16-byte accesses


@dataclass(frozen=True)
class PagedRows:
    """The rows of consecutive sequences, and where their keys are.

    query_starts: [num_seqs + 1] int32, first row of each sequence, then the end; None: sequence i has row i alone
    seq_lens:     [num_seqs] int64 or int32, keys that the last row of a sequence sees. Rows without keys get zeros
    block_tables: [num_seqs, blocks] int32, of any row stride
    num_rows:     of all sequences
    max_keys:     no sequence has more
    """

    query_starts: Tensor | None
    seq_lens: Tensor
    block_tables: Tensor
    block_size: int
    num_rows: int
    max_keys: int


@dataclass(frozen=True)
class Places:
    """Where the kernel finds the keys and values of a slot, and how wide they are. All tensors have slots as rows.

    keys, values: of the first head; those of the next are head_step elements further. The same ones where shares_row:
                  then a key begins with its value
    tail:         with which keys of all heads end; of no columns: with nothing
    scales:       of a cache in 8 bits (kernels/quantised.py), [slots, heads of a slot, parts]: of every key, then of
                  every value; or of what keys and values share and of the tail
    """

    keys: Tensor
    tail: Tensor
    values: Tensor
    heads: int
    group: int
    key_width: int  # without the tail
    tail_width: int
    value_width: int
    head_step: int
    scale: float
    shares_row: bool = False
    scales: Tensor | None = None

    @classmethod
    def in_cache(cls, cache: Tensor, shape: AttendShape, scales: Tensor | None) -> "Places":
        """cache: [slots, *shape.row_shape]"""
        value, tail = shape.value_width, shape.width - shape.value_width
        widths = value, tail, value, shape.width
        latent = shape.latent is not None
        values = cache if latent else cache[:, shape.heads :]
        return cls(cache, cache[:, :, value:], values, shape.heads, shape.group, *widths, shape.scale, latent, scales)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The widths of the tiles that hold a key: two for what is as wide as a value, one for the tail.

        Two, since widths of tiles are powers of two, and the sums of 512 columns in one tile spill where they are
        stored.
        """
        widest = max(self.key_width, self.value_width)
        first = min(1 << (widest.bit_length() - 1), 256)
        if first < 16 or _padded(widest - first) >= first:
            first = min(_padded(widest), 256)
        return first, _padded(max(widest - first, 0)), _padded(self.tail_width)


@dataclass(frozen=True)
class AttendTile:
    """One program's rows and how it goes over keys.

    keys:    of one block, a power of two
    columns: of queries and keys that are multiplied at a time, read again for every block; None: all, and queries stay
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    columns: int | None = None


def tile_for(places: Places, itemsize: int, one_row: bool) -> AttendTile:
    """Returns the tile for rows that are alone in their sequence, or have company. itemsize: bytes of their numbers

    Chosen by what compiles without spills for sm_80, sm_90 and sm_100; none has been measured on a GPU yet. So tiles of
    latents have 32 rows, and 16 where decodes read them in 8 bits: with 64, which Hopper's matrix instructions for four
    warps take, some values spill, and for Blackwell Triton 3.9 makes a trap. The ordinary units want whole rows of both
    operands in registers, which wide ones do not fit in.
    """
    width, group = sum(places.blocks), max(triton.next_power_of_2(places.group), 16)
    if itemsize == 4:  # by the ordinary units, as torch does
        wide = width > 128
        return AttendTile(16, 32, num_warps=8 if wide else 4, num_stages=1, columns=32 if wide else None)
    if places.shares_row:
        most = 16 if places.scales is not None and one_row else 32
        return AttendTile(min(group, most), 32, num_warps=8, num_stages=3)
    if one_row:
        return AttendTile(min(group, 32), 64, num_warps=4, num_stages=5 if width <= 128 else 3)
    return AttendTile(128, 64 if width <= 128 else 32, num_warps=8, num_stages=2)


def attend_triton(
    q: Tensor, cache: Tensor, out: Tensor, shape: AttendShape, rows: PagedRows, seen: Seen = Seen(),
    invariant: bool = False, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the rows of `out` [T, heads, group, value width].

    q:        [T, heads, group, width]; the stride of rows is free, as in a slice of a fused projection
    cache:    [slots, *shape.row_shape], one layer's keys and values, those of these rows included; of the queries'
              dtype, or int8 or e4m3 with scales (kernels/quantised.py)
    invariant: rows with others in their sequence have the bits that they have alone; for chunks this is slow
    """
    if rows.num_rows:
        attend_places(q, Places.in_cache(cache, shape, scales), out, rows, seen, invariant)


def attend_places(q: Tensor, places: Places, out: Tensor, rows: PagedRows, seen: Seen, invariant: bool = False) -> None:
    """Does the same with keys and values wherever they lie. Strides of rows are free in `out`, too, but for decodes."""
    one_row = rows.query_starts is None
    in_parts = one_row or invariant
    tile = tile_for(places, q.element_size(), in_parts)
    first, second, tail_block = places.blocks
    group_block, num_heads = _blocks_of_heads(places, tile)
    tokens = tile.rows // group_block
    part_keys = LATENT_PART_KEYS if places.shares_row else PART_KEYS
    num_parts = _num_parts(rows.max_keys, seen, part_keys) if in_parts else 1
    num_seqs = rows.seq_lens.shape[0]
    num_tiles = rows.num_rows if one_row else rows.num_rows // tokens + num_seqs
    all_heads, width = places.heads * places.group, places.value_width
    part_out = part_sums = None
    scales = places.scales
    apart = one_row and num_parts > 1 and num_tiles * num_heads < ENOUGH_PROGRAMS
    if apart:
        per_part = rows.num_rows, all_heads, num_parts  # others may be chunks
        part_out = torch.empty(*per_part, width, dtype=torch.float32, device=q.device)
        part_sums = torch.empty(*per_part, 2, dtype=torch.float32, device=q.device)
    limits = seen.window or 0, seen.chunk or 0
    sees = {"WINDOW": seen.window is not None, "CHUNK": seen.chunk is not None, "SINKS": seen.sinks is not None}
    attend_kernel[(num_tiles * num_heads, num_parts if apart else 1)](
        q, places.keys, places.tail if tail_block else places.keys, places.values, out, part_out, part_sums,
        seen.sinks, rows.query_starts, rows.seq_lens, rows.block_tables, num_seqs, num_parts, places.scale * LOG2_E,
        *limits, q.stride(0), out.stride(0), places.keys.stride(0), rows.block_tables.stride(0), scales,
        0 if scales is None else scales.stride(0),
        HEADS=places.heads, GROUP=places.group, GROUP_BLOCK=group_block, TOKENS=tokens,
        HEAD_STEP=places.head_step, KEY=places.key_width, WIDTH=width, FIRST=first, SECOND=second,
        TAIL=places.tail_width, BLOCK_T=tail_block, BLOCK_N=tile.keys,
        BLOCK_SIZE=rows.block_size, LATENT=places.shares_row, ONE_ROW=one_row, PART=part_keys if num_parts > 1 else 0,
        FOLD=not apart, AT_ONCE=tile.columns or first, SCALED=scales is not None, **sees,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if apart:
        block_v = triton.next_power_of_2(width)
        block_h = max(COMBINED // block_v, 1)
        combine_kernel[(rows.num_rows, triton.cdiv(all_heads, block_h))](
            part_out, part_sums, seen.sinks, rows.seq_lens, out, num_parts, *limits,
            HEADS=all_heads, BLOCK_H=block_h, WIDTH=width, BLOCK_V=block_v, PART=part_keys, **sees,
        )  # fmt: skip


def part_bytes(shape: AttendShape, itemsize: int, num_rows: int, max_keys: int, seen: Seen = Seen()) -> int:
    """Returns the most bytes of the sums of parts, of up to num_rows rows that are alone in their sequences.

    itemsize: of a number of the queries;  max_keys: of one row
    """
    places = Places.in_cache(torch.empty(1, *shape.row_shape, device="meta"), shape, None)
    parts = _num_parts(max_keys, seen, LATENT_PART_KEYS if places.shares_row else PART_KEYS)
    _, num_heads = _blocks_of_heads(places, tile_for(places, itemsize, one_row=True))
    rows = min(num_rows, (ENOUGH_PROGRAMS - 1) // num_heads)
    sums = rows * places.heads * places.group * parts * (places.value_width + 2)
    return sums * torch.float32.itemsize if parts > 1 else 0


def _blocks_of_heads(places: Places, tile: AttendTile) -> tuple[int, int]:
    """Returns how many query heads a program takes of a group, and the programs that all heads of a token take."""
    block = min(triton.next_power_of_2(places.group), tile.rows)
    return block, places.heads * triton.cdiv(places.group, block)


def _padded(width: int) -> int:
    return max(triton.next_power_of_2(width), 16) if width else 0


def _num_parts(max_keys: int, seen: Seen, part_keys: int) -> int:
    """Returns how many parts the keys of a row may lie in."""
    most: int = triton.cdiv(max_keys, part_keys)
    limit = seen.window if seen.window is not None else seen.chunk
    return most if limit is None else min(most, triton.cdiv(limit - 1, part_keys) + 1)


@triton.jit
def attend_kernel(
    q, k, tail, v, out, part_out, part_sums, sinks, query_starts, seq_lens, tables, num_seqs, num_parts, scale,
    window, chunk, q_stride, out_stride, slot_stride, table_stride, scales, scale_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_STEP: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, ONE_ROW: tl.constexpr, PART: tl.constexpr, FOLD: tl.constexpr,
    AT_ONCE: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    # Programs of one tile of rows follow each other, so that its keys are read from memory once for all heads.
    HEAD_BLOCKS: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    tile = tl.program_id(0) // (HEADS * HEAD_BLOCKS)
    head = tl.program_id(0) // HEAD_BLOCKS % HEADS
    seq, first_row, end_row = locate_rows(tile, query_starts, num_seqs, TOKENS, ONE_ROW)
    if first_row < end_row:
        length = tl.load(seq_lens + seq).to(tl.int32)
        member = tl.arange(0, TOKENS * GROUP_BLOCK)
        token = member // GROUP_BLOCK
        head_in_group = tl.program_id(0) % HEAD_BLOCKS * GROUP_BLOCK + member % GROUP_BLOCK
        used = (first_row + token < end_row) & (head_in_group < GROUP)
        position = length - end_row + first_row + token
        first_key = first_seen(position, window, chunk, WINDOW, CHUNK)
        all_head = head * GROUP + head_in_group
        # Distances within a tile take 32 bits: addresses of 64 bits would not leave enough registers for the sums.
        q_at = q + first_row.to(tl.int64) * q_stride + (token * q_stride + all_head * (KEY + TAIL))
        query = q_at
        if AT_ONCE >= FIRST:
            query = load_columns(q_at, used, 0, KEY, FIRST)
        query_b, query_tail = query, query
        if SECOND > 0 and AT_ONCE >= FIRST:
            query_b = load_columns(q_at, used, FIRST, KEY, SECOND)
        if BLOCK_T > 0 and AT_ONCE >= FIRST:
            query_tail = load_columns(q_at + KEY, used, 0, TAIL, BLOCK_T)
        begin = first_seen(length - end_row + first_row, window, chunk, WINDOW, CHUNK)
        end = length - tl.maximum(end_row - first_row - TOKENS, 0)
        table = tables + seq.to(tl.int64) * table_stride
        k += head * HEAD_STEP
        v += head * HEAD_STEP
        value_scales = scales
        if SCALED and not LATENT:
            scales += head
            value_scales = scales + HEADS
        before = first_row.to(tl.int64) * (HEADS * GROUP)  # rows of heads in the parts
        at = token * (HEADS * GROUP) + all_head
        if PART == 0:
            total, total_b, weights, most = attend_keys(
                query, query_b, query_tail, used, k, tail, v, table, position, first_key, begin, end, scale,
                slot_stride, scales, value_scales, scale_stride, KEY, WIDTH, FIRST, SECOND, TAIL, BLOCK_T, BLOCK_N,
                BLOCK_SIZE, LATENT, ONE_ROW, WINDOW or CHUNK, AT_ONCE, SCALED, q.dtype.element_ty,
            )  # fmt: skip
        elif FOLD:
            total, total_b, weights, most = no_sums(TOKENS * GROUP_BLOCK, FIRST, SECOND)
            for part in range(begin // PART, tl.cdiv(end, PART)):
                more, more_b, more_weights, more_most = attend_keys(
                    query, query_b, query_tail, used, k, tail, v, table, position, first_key,
                    tl.maximum(begin, part * PART), tl.minimum(end, part * PART + PART), scale, slot_stride, scales,
                    value_scales, scale_stride, KEY, WIDTH, FIRST, SECOND, TAIL, BLOCK_T, BLOCK_N, BLOCK_SIZE, LATENT,
                    ONE_ROW, WINDOW or CHUNK, AT_ONCE, SCALED, q.dtype.element_ty,
                )  # fmt: skip
                keep, add, most = shares(most, more_most)
                total = folded(total, more, keep[:, None], add[:, None])
                if SECOND > 0:
                    total_b = folded(total_b, more_b, keep[:, None], add[:, None])
                weights = folded(weights, more_weights, keep, add)
        else:
            first_part = begin // PART
            part = first_part + tl.program_id(1)
            begin = tl.maximum(begin, part * PART)
            end = tl.minimum(end, part * PART + PART)
            total, total_b, weights, most = attend_keys(
                query, query_b, query_tail, used, k, tail, v, table, position, first_key, begin, end, scale,
                slot_stride, scales, value_scales, scale_stride, KEY, WIDTH, FIRST, SECOND, TAIL, BLOCK_T, BLOCK_N,
                BLOCK_SIZE, LATENT, ONE_ROW, WINDOW or CHUNK, AT_ONCE, SCALED, q.dtype.element_ty,
            )  # fmt: skip
            number = before * num_parts + part - first_part
            store_part(part_out, part_sums, number, at * num_parts, total, total_b, weights, most,
                       used & (begin + member * 0 < end), WIDTH, FIRST, SECOND)  # fmt: skip
        if PART == 0 or FOLD:
            if SINKS:
                weights += sink_weight(tl.load(sinks + all_head, mask=used, other=0.0), most)
            seen = (position >= 0)[:, None]
            out_at = out + first_row.to(tl.int64) * out_stride + (token * out_stride + all_head * WIDTH)
            store_columns(out_at, tl.where(seen, total / weights[:, None], 0.0), used, 0, WIDTH, FIRST)
            if SECOND > 0:
                result = tl.where(seen, total_b / weights[:, None], 0.0)
                store_columns(out_at, result, used, FIRST, WIDTH, SECOND)


@triton.jit
def no_sums(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Returns what attend_keys returns for no keys."""
    total = tl.zeros((ROWS, FIRST), dtype=tl.float32)
    total_b = total
    if SECOND > 0:
        total_b = tl.zeros((ROWS, SECOND), dtype=tl.float32)
    return total, total_b, tl.zeros((ROWS,), dtype=tl.float32), tl.full((ROWS,), -float("inf"), dtype=tl.float32)


@triton.jit
def shares(most, more_most):
    """Returns what the sums so far and those of the next part are multiplied by, and the top score of both."""
    highest = tl.maximum(most, more_most)
    reference = tl.where(highest == -float("inf"), 0.0, highest)
    return tl.exp2(most - reference), tl.exp2(more_most - reference), highest


@triton.jit
def folded(total, more, keep, add):
    """Returns total * keep + more * add, with the same roundings wherever parts are added up."""
    return multiply_add(add, more, total * keep)


@triton.jit
def store_part(
    part_out, part_sums, number, at, total, total_b, weights, most, used, WIDTH: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Writes what combine_kernel adds up to entry `number` + `at`. number: one int64; at: [rows] int32"""
    sums_at = part_sums + number * 2 + at * 2
    tl.store(sums_at, most, mask=used)
    tl.store(sums_at + 1, weights, mask=used)
    total_at = part_out + number * WIDTH + at * WIDTH
    store_columns(total_at, total, used, 0, WIDTH, FIRST)
    if SECOND > 0:
        store_columns(total_at, total_b, used, FIRST, WIDTH, SECOND)


@triton.jit
def attend_keys(
    query, query_b, query_tail, used, k, tail, v, table, position, first_key, begin, end, scale, slot_stride,
    scales, value_scales, scale_stride,
    KEY: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr,
    ONE_ROW: tl.constexpr, LIMITED: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Returns weighted values of keys begin .. end, [rows, FIRST] and [rows, SECOND], sums of weights, and top scores.

    Weights are relative to the top score. position, first_key: [rows], the last and first key that a row sees
    """
    total, total_b, weights, most = no_sums(query.shape[0], FIRST, SECOND)
    # From a multiple of the block on, so that what a row adds together does not depend on the other rows of the tile.
    for first in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        # Others are not read: what freed blocks and the ends of blocks hold may not be a number.
        inside = (key >= begin) & (key < end)
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        at = slot * slot_stride
        if AT_ONCE < FIRST:  # query holds addresses
            scores = tl.zeros((query.shape[0], BLOCK_N), dtype=tl.float32)
            # It depends on the loop, so that Triton does not move the loads out of it, where they fill the registers.
            again = used & (first >= 0)
            for column in tl.static_range(0, FIRST + SECOND, AT_ONCE):
                some = widened(load_columns(k + at, inside, column, KEY, AT_ONCE), KIND)
                scores += dot(load_columns(query, again, column, KEY, AT_ONCE), tl.trans(some))
        keys = widened(load_columns(k + at, inside, 0, KEY, FIRST), KIND)
        keys_b = keys
        if SECOND > 0:
            keys_b = widened(load_columns(k + at, inside, FIRST, KEY, SECOND), KIND)
        if AT_ONCE >= FIRST:
            scores = dot(query, tl.trans(keys))
            if SECOND > 0:
                scores += dot(query_b, tl.trans(keys_b))
        if SCALED:
            key_scales = tl.load(scales + slot * scale_stride, mask=inside, other=0.0)[None, :]
            scores *= key_scales
        if BLOCK_T > 0:
            if AT_ONCE >= FIRST:
                of_tail = dot(query_tail, tl.trans(widened(load_columns(tail + at, inside, 0, TAIL, BLOCK_T), KIND)))
            else:
                of_tail = tl.zeros((query.shape[0], BLOCK_N), dtype=tl.float32)
                for column in tl.static_range(0, BLOCK_T, AT_ONCE):
                    some = widened(load_columns(tail + at, inside, column, TAIL, AT_ONCE), KIND)
                    of_tail += dot(load_columns(query + KEY, again, column, TAIL, AT_ONCE), tl.trans(some))
            if SCALED:
                of_tail *= tl.load(scales + slot * scale_stride + 1, mask=inside, other=0.0)[None, :]
            scores += of_tail
        visible = inside[None, :]
        if not ONE_ROW:
            visible = visible & (key[None, :] <= position[:, None])
            if LIMITED:
                visible = visible & (key[None, :] >= first_key[:, None])
        scores = tl.where(visible, scores * scale, -float("inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        reference = tl.where(highest == -float("inf"), 0.0, highest)  # a row may see no key of this block
        shrink = tl.exp2(most - reference)
        weight = tl.exp2(scores - reference[:, None])
        weights = weights * shrink + tl.sum(weight, 1)
        most = highest
        if SCALED:
            if LATENT:
                weight *= key_scales
            else:
                weight *= tl.load(value_scales + slot * scale_stride, mask=inside, other=0.0)[None, :]
        weight = as_dtype(weight, KIND)
        values = keys if LATENT else widened(load_columns(v + at, inside, 0, WIDTH, FIRST), KIND)
        total = total * shrink[:, None] + dot(weight, values)
        if SECOND > 0:
            values_b = keys_b if LATENT else widened(load_columns(v + at, inside, FIRST, WIDTH, SECOND), KIND)
            total_b = total_b * shrink[:, None] + dot(weight, values_b)
    return total, total_b, weights, most


@triton.jit
def load_columns(at, used, FROM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns elements FROM .. FROM + BLOCK of the rows at these addresses, zeros beyond WIDTH and in unused rows."""
    column = FROM + tl.arange(0, BLOCK)
    mask = used[:, None]
    if FROM + BLOCK > WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_columns(at, values, used, FROM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes float32 values to elements FROM .. FROM + BLOCK of the rows at these addresses, as load_columns reads."""
    column = FROM + tl.arange(0, BLOCK)
    mask = used[:, None]
    if FROM + BLOCK > WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(at[:, None] + column[None, :], as_dtype(values, at.dtype.element_ty), mask=mask)


@triton.jit
def locate_rows(tile, query_starts, num_seqs, TOKENS: tl.constexpr, ONE_ROW: tl.constexpr):
    """Returns (sequence, first row, end of the sequence's rows) of a tile; first row >= end where it has none."""
    if ONE_ROW:
        return tile, tile, tile + 1
    else:
        before = tl.load(query_starts)
        seq = sequence_of(tile, query_starts, num_seqs, TOKENS)
        first, end = tl.load(query_starts + seq), tl.load(query_starts + seq + 1)
        return seq, first + (tile - (first - before) // TOKENS - seq) * TOKENS, end


@triton.jit
def sequence_of(tile, query_starts, num_seqs, TOKENS: tl.constexpr):
    """Returns the sequence of a tile of rows, or of a row where TOKENS is 0.

    Tiles of sequence s are numbered from (rows before it) // TOKENS + s on, which leaves room for all of them.
    """
    before = tl.load(query_starts)
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_starts + middle)
        if TOKENS > 0:
            begins = (begins - before) // TOKENS + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def first_seen(position, window, chunk, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the first key that rows at these positions see."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
    if CHUNK:
        first = tl.maximum(position, 0) // chunk * chunk
    return first


@triton.jit
def sink_weight(sink, most):
    """Returns the weight of a sink beside weights that are relative to the score `most`, which counts powers of two."""
    return tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - tl.where(most == -float("inf"), 0.0, most))


@triton.jit
def combine_kernel(
    part_out, part_sums, sinks, seq_lens, out, num_parts, window, chunk,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, PART: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Adds the parts of some heads of a row, in order: out [T, heads, width] from part_out and part_sums."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_V)
    used = head < HEADS
    inside = used[:, None] & (column < WIDTH)[None, :]
    length = tl.load(seq_lens + row).to(tl.int32)
    first_part = first_seen(length - 1, window, chunk, WINDOW, CHUNK) // PART
    num_used = tl.cdiv(length, PART) - first_part
    at = (row * HEADS + head) * num_parts
    total, _, weights, most = no_sums(BLOCK_H, BLOCK_V, 0)
    for part in range(num_used):
        keep, add, most = shares(most, tl.load(part_sums + (at + part) * 2, mask=used, other=0.0))
        part_at = part_out + (at + part)[:, None] * WIDTH + column[None, :]
        total = folded(total, tl.load(part_at, mask=inside, other=0.0), keep[:, None], add[:, None])
        weights = folded(weights, tl.load(part_sums + (at + part) * 2 + 1, mask=used, other=0.0), keep, add)
    if SINKS:
        weights += sink_weight(tl.load(sinks + head, mask=used, other=0.0), most)
    result = tl.where(length > 0, total / weights[:, None], 0.0)
    tl.store(out + (row * HEADS + head)[:, None] * WIDTH + column[None, :], as_dtype(result, out.dtype.element_ty),
             mask=inside)  # fmt: skip
