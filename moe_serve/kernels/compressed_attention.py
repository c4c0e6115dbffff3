"""Attention of DeepSeek-V4 to the last tokens and to entries that stand for groups of tokens.

A token has one key, normed and rotated at its end, which is its value, too. A query attends the keys of a window, and
one entry of every group of `every` tokens that is complete at its own position; where an indexer chooses, the `topk`
best entries by its score (kernels/indexed_attention.py), over entries and queries of its own.

An entry is made of what each token of its group gives, a vector v and a vector z of the same width:

    entry = rotated at the group's first position(norm(sum over tokens of v * softmax over tokens(z + bias)))

each column by itself, with a bias for each place in a group. Where groups overlap, a token gives two of each, and the
first ones of the group before take part, too. All is kept in the cache: a token's row holds its key, v and z, and the
entry takes the place of v in the row of its group's last token, where nobody needs it any longer. So an entry follows
from the rows of its own tokens, however they came: chunks, shared prefixes and tokens that are computed again change
nothing.

What is attended is rotated back at its end, by the position of the query, since values were rotated as keys.

Plain form: row by row, so that a row's bits depend on its own query and the rows that it sees only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import CompressedShape
from moe_serve.kernels.indexed_attention import chosen_keys


@dataclass(frozen=True, eq=False)
class EntryWeights:
    """What makes entries. norm: [width];  bias: [every, parts * width], float32"""

    norm: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class CompressedWeights:
    """What a layer has beside its projections, float32.

    norm: of keys, [width];  sinks: [heads], scores whose weights go nowhere
    entries, index: None: there are none;  turns: of every position, [positions, rotated / 2] complex64
    """

    shape: CompressedShape
    norm: Tensor
    sinks: Tensor
    entries: EntryWeights | None
    index: EntryWeights | None
    turns: Tensor


@dataclass(frozen=True, eq=False)
class CompressedRows:
    """What a layer has projected of a step's rows; q, rows and index_q are changed in place.

    q: [T, heads, width];  rows: [T, row_width], may be a slice of wider rows
    index_q: [T, index heads, index width], and weights [T, index heads]; None without an indexer
    """

    q: Tensor
    rows: Tensor
    index_q: Tensor | None
    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class PagedRows:
    """Where a step's rows are. positions, slots: [T] int64;  tables: [seqs, blocks] int32

    query_lens: rows of each sequence; what lies behind them is padding
    """

    positions: Tensor
    slots: Tensor
    query_lens: Sequence[int]
    tables: Tensor
    block_size: int


def compressed_attention_reference(
    rows: CompressedRows, weights: CompressedWeights, cache_layer: Tensor, paged: PagedRows
) -> Tensor:
    """Writes rows and entries into the cache, [slots, 1, row_width], and returns what the rows attend,
    [T, heads, width]; zeros for padding rows."""
    shape, dtype = weights.shape, rows.q.dtype
    out, cache = torch.zeros_like(rows.q), cache_layer[:, 0]
    sequences = [seq for seq, length in enumerate(paged.query_lens) for _ in range(length)]
    for row in range(len(sequences)):
        turn = weights.turns[paged.positions[row]]
        rows.q[row] = _turned(_normed(rows.q[row], None, shape.eps), turn)
        if rows.index_q is not None:
            rows.index_q[row] = _turned(rows.index_q[row].float(), turn)
        key = rows.rows[row, : shape.width]
        key.copy_(_turned(_normed(key, weights.norm, shape.eps), turn))
        cache[paged.slots[row]] = rows.rows[row]
    for row, seq in enumerate(sequences):
        end = int(paged.positions[row]) + 1
        slots = _slots(paged, seq, end)
        if shape.every and end % shape.every == 0:
            _make_entries(weights, cache, slots)
    for row, seq in enumerate(sequences):
        end = int(paged.positions[row]) + 1
        slots = _slots(paged, seq, end)
        keys = cache[slots[-shape.window :], : shape.width]
        if shape.every:
            last = slots[shape.every - 1 :: shape.every]
            if rows.index_q is not None and rows.weights is not None:
                at = shape.index_at + shape.index_width
                index_keys = cache[last, at : at + shape.index_width]
                last = last[chosen_keys(rows.index_q[row].clone(), rows.weights[row].clone(), index_keys, shape.topk)]
            keys = torch.cat((keys, cache[last, shape.parts * shape.width : (shape.parts + 1) * shape.width]))
        attended = _attend(rows.q[row].float(), keys.float(), weights)
        out[row] = _turned(attended, weights.turns[end - 1].conj()).to(dtype)
    return out


def _slots(paged: PagedRows, seq: int, end: int) -> Tensor:
    """Returns the slots of the first `end` tokens of a sequence."""
    positions = torch.arange(end)
    return paged.tables[seq, positions // paged.block_size].long() * paged.block_size + positions % paged.block_size


def _make_entries(weights: CompressedWeights, cache: Tensor, slots: Tensor) -> None:
    """Writes the entries of the group that the last of these slots ends."""
    shape = weights.shape
    every, turn = shape.every, weights.turns[len(slots) - shape.every]
    mine = slots[-every * (1 + shape.overlaps) :]
    of_keys = weights.entries, shape.width, shape.width
    of_indexer = weights.index, shape.index_at, shape.index_width
    for entries, at, width in (of_keys, of_indexer):
        if entries is None:
            continue
        found = cache[mine, at : at + 2 * shape.parts * width].float()
        values, gates = found.chunk(2, 1)
        gates = gates + entries.bias.repeat(len(mine) // every, 1)
        if shape.overlaps:  # groups before the last give their first part
            values, gates = (
                torch.cat((each[:-every, :width], each[-every:, width:])).contiguous() for each in (values, gates)
            )
        entry = _turned(_normed((values * gates.softmax(0)).sum(0), entries.norm, shape.eps), turn)
        first = at + (shape.parts - 1) * width
        cache[mine[-1], first : first + width] = entry.to(cache.dtype)


def _attend(q: Tensor, keys: Tensor, weights: CompressedWeights) -> Tensor:
    """q: [heads, width], keys: [n, width] -> [heads, width]"""
    scores = torch.cat(((q @ keys.T) * weights.shape.scale, weights.sinks[:, None]), 1).softmax(-1)
    return scores[:, :-1] @ keys


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS norm of the last dimension, float32."""
    return functional.rms_norm(x.float().clone(), x.shape[-1:], weight, eps)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Returns x [.., width] float32 with adjacent pairs at its end rotated. turn: [rotated / 2] complex64"""
    rotated, own = 2 * len(turn), torch.contiguous_format
    pairs = x[..., -rotated:].clone(memory_format=own).view(*x.shape[:-1], len(turn), 2)
    pairs = torch.view_as_complex(pairs) * turn
    return torch.cat((x[..., :-rotated], torch.view_as_real(pairs).flatten(-2)), -1)
