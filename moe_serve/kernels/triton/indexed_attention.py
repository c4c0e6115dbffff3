# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/indexed_attention.py: scores of all keys, the best of them, attention over these.

The chosen keys become a list of cache slots for each row, in the order of their positions. Such a list is a block table
with blocks of one token, so that the kernel of attention.py attends them, every row as a sequence of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import AttendShape
from moe_serve.kernels.triton.attention import PagedRows, attend_triton, load_columns, sequence_of
from moe_serve.kernels.triton.mode import dot

SCORE_KEYS = 64  # keys of one block of scores
MOST_SCORE_PROGRAMS = 64  # of a row; each takes every so-many-th block
SELECT_KEYS = 2048  # scores that a program looks at together
MOST_SCORES = 1 << 26  # scores of one pass over rows, 256 MiB


def attend_indexed_triton(
    q: Tensor, cache: Tensor, out: Tensor, shape: AttendShape, index: tuple[Tensor, Tensor, Tensor, int],
    rows: PagedRows,
) -> None:  # fmt: skip
    """Fills the rows of `out` [T, heads, group, value width] with the attention of the keys that an indexer chooses.

    q, cache: as attend_triton takes them
    index:    queries [T, index heads, index width], weights of heads [T, index heads], cached keys [slots, 1, index
              width], and how many keys a row attends
    rows:     with query_starts
    """
    if rows.num_rows == 0:
        return
    slots, counts = choose_triton(*index, rows)
    chosen = PagedRows(None, counts, slots, 1, rows.num_rows, min(index[3], rows.max_keys))
    attend_triton(q, cache, out, shape, chosen)


def choose_triton(index_q: Tensor, weights: Tensor, keys: Tensor, topk: int, rows: PagedRows) -> tuple[Tensor, Tensor]:
    """Returns the slots of the chosen keys, ascending by position, and their number.

    slots: [num_rows, topk] int32, what is behind the chosen ones is not read;  counts: [num_rows] int32
    """
    num_seqs = rows.seq_lens.shape[0]
    slots = torch.empty(rows.num_rows, topk, dtype=torch.int32, device=index_q.device)
    counts = torch.empty(rows.num_rows, dtype=torch.int32, device=index_q.device)
    per_pass = _rows_of_pass(rows.num_rows, rows.max_keys, topk)
    scores = None
    if rows.max_keys > topk:
        scores = torch.empty(per_pass, rows.max_keys, dtype=torch.float32, device=index_q.device)
    for first in range(0, rows.num_rows, per_pass):
        num_rows = min(per_pass, rows.num_rows - first)
        where = rows.query_starts, rows.seq_lens, rows.block_tables, num_seqs, first, topk, rows.max_keys
        table_stride = rows.block_tables.stride(0)
        if scores is not None:
            _, heads, width = index_q.shape
            blocks = min(triton.cdiv(rows.max_keys, SCORE_KEYS), MOST_SCORE_PROGRAMS)
            index_scores_kernel[(num_rows, blocks)](
                index_q, weights, keys, scores, *where, index_q.stride(0), weights.stride(0), keys.stride(0),
                table_stride, HEADS=heads, BLOCK_H=max(triton.next_power_of_2(heads), 16), WIDTH=width,
                BLOCK_D=max(triton.next_power_of_2(width), 16), BLOCK_N=SCORE_KEYS, BLOCK_SIZE=rows.block_size,
                num_warps=4, num_stages=3,
            )  # fmt: skip
        choose_kernel[(num_rows,)](
            scores, slots, counts, *where, table_stride, SCORED=scores is not None, BLOCK_N=SELECT_KEYS,
            BLOCK_SIZE=rows.block_size, num_warps=8,
        )  # fmt: skip
    return slots, counts


def chosen_bytes(num_rows: int, max_keys: int, topk: int) -> int:
    """Returns the bytes of scores and slots for rows that see up to max_keys keys."""
    scored = _rows_of_pass(num_rows, max_keys, topk) * max_keys if max_keys > topk else 0
    return 4 * (scored + num_rows * (topk + 1))


def _rows_of_pass(num_rows: int, max_keys: int, topk: int) -> int:
    """Returns of how many rows keys are scored together."""
    return num_rows if max_keys <= topk else min(max(MOST_SCORES // max_keys, 1), num_rows)


@triton.jit
def index_scores_kernel(
    index_q, weights, keys, scores, query_starts, seq_lens, tables, num_seqs, first_row, topk, max_keys,
    q_stride, weight_stride, slot_stride, table_stride,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Fills scores [rows, max_keys] float32 for the keys that a row sees, if these are more than topk."""
    row = first_row + tl.program_id(0)
    seq, position = place_of(row, query_starts, seq_lens, num_seqs)
    if position >= topk:
        head = tl.arange(0, BLOCK_H)
        used = head < HEADS
        query = load_columns(index_q + row.to(tl.int64) * q_stride + head * WIDTH, used, 0, WIDTH, BLOCK_D)
        weight = tl.load(weights + row.to(tl.int64) * weight_stride + head, mask=used, other=0.0).to(tl.float32)
        table = tables + seq.to(tl.int64) * table_stride
        scores += tl.program_id(0).to(tl.int64) * max_keys
        for first in range(tl.program_id(1) * BLOCK_N, position + 1, tl.num_programs(1) * BLOCK_N):
            key = first + tl.arange(0, BLOCK_N)
            inside = key <= position
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
            at = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * slot_stride
            products = dot(query, tl.trans(load_columns(keys + at, inside, 0, WIDTH, BLOCK_D)))
            products = tl.where(products > 0, products, tl.where(products == products, 0.0, products))
            tl.store(scores + key, tl.sum(products * weight[:, None], 0), mask=inside)


@triton.jit
def choose_kernel(
    scores, slots, counts, query_starts, seq_lens, tables, num_seqs, first_row, topk, max_keys, table_stride,
    SCORED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Fills slots [all rows, topk] and counts [all rows] for some rows: of equal scores the earlier keys are chosen."""
    row = first_row + tl.program_id(0)
    seq, position = place_of(row, query_starts, seq_lens, num_seqs)
    num_keys = position + 1
    tl.store(counts + row, tl.maximum(tl.minimum(num_keys, topk), 0))
    table = tables + seq.to(tl.int64) * table_stride
    slots += row.to(tl.int64) * topk
    # The lowest chosen score, as a number whose order is that of scores, and how many keys with it are chosen: digit
    # by digit from the highest, each by counting the scores that share the digits found so far.
    lowest, wanted = tl.full((), 0, tl.uint32), topk + position * 0
    if SCORED:
        scores += tl.program_id(0).to(tl.int64) * max_keys
        if num_keys > topk:
            for digit in tl.static_range(4):
                found = tl.zeros((256,), dtype=tl.int32)
                for first in range(0, num_keys, BLOCK_N):
                    key = first + tl.arange(0, BLOCK_N)
                    number = ordered(tl.load(scores + key, mask=key < num_keys, other=0.0))
                    counted = key < num_keys
                    if digit > 0:
                        counted = counted & ((number >> (32 - 8 * digit)) == lowest)
                    found += tl.histogram(((number >> (24 - 8 * digit)) & 255).to(tl.int32), 256, mask=counted)
                at_least = tl.sum(found) - tl.cumsum(found) + found  # keys with this digit or a higher one
                value = tl.sum((at_least >= wanted).to(tl.int32)) - 1
                mine = tl.arange(0, 256) == value
                wanted -= tl.sum(tl.where(mine, at_least - found, 0))
                lowest = lowest * 256 + value.to(tl.uint32)
    num_chosen, num_equal = position * 0, position * 0
    for first in range(0, num_keys, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < num_keys
        chosen = inside
        if SCORED:  # noqa: SIM102 - decided when it is compiled
            if num_keys > topk:
                number = ordered(tl.load(scores + key, mask=inside, other=0.0))
                equal = (inside & (number == lowest)).to(tl.int32)
                before = num_equal + tl.cumsum(equal) - equal
                chosen = inside & ((number > lowest) | ((equal > 0) & (before < wanted)))
                num_equal += tl.sum(equal)
        one = chosen.to(tl.int32)
        place = num_chosen + tl.cumsum(one) - one
        block = tl.load(table + key // BLOCK_SIZE, mask=chosen, other=0)
        tl.store(slots + place, block * BLOCK_SIZE + key % BLOCK_SIZE, mask=chosen)
        num_chosen += tl.sum(one)


@triton.jit
def place_of(row, query_starts, seq_lens, num_seqs):
    """Returns the sequence of a row and its position, -1 where the row sees no key."""
    seq = sequence_of(row, query_starts, num_seqs, 0)
    length = tl.load(seq_lens + seq).to(tl.int32)
    return seq, length - tl.load(query_starts + seq + 1) + row


@triton.jit
def ordered(score):
    """Returns numbers whose order is that of scores, where NaN is as low as -inf and both zeros are equal."""
    score = tl.where(score == score, score, -float("inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)
