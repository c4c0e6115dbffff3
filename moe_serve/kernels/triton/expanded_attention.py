# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Latent attention of long chunks in Triton: keys and values of every head first, then ordinary attention over them.

For all sequences together, and for as many heads at a time as keep the expanded keys and values small. A query and a
key then cost nope + rope + value multiplications instead of the 2 latent + rope of the absorbed form (320 and 1,088 for
DeepSeek-V3), but each key costs latent * (nope + value) once; attention_dp/attention.py weighs one against the other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import Seen
from moe_serve.kernels.triton.attention import PagedRows, Places, attend_places, load_columns, sequence_of
from moe_serve.kernels.triton.mode import as_dtype, dot, widened

TILE = 128  # keys of a program; every sequence begins with a tile of its own
# Columns that a program makes, and of latents at a time; few of float32, which the ordinary units multiply.
COLUMNS, COLUMNS_FLOAT32 = (128, 64), (32, 16)
MOST_BYTES = 1 << 28  # of expanded keys and values, unless those of one head take more


@dataclass(frozen=True)
class ExpandedRows:
    """The rows of sequences whose keys are expanded, and where these are.

    rows:        with query_starts, over the cache
    first_tiles: [num_seqs + 1] int32, the first tile of each sequence's keys, then the number of tiles
    tables:      [num_seqs, tiles of the longest] int32, the tiles of each sequence
    num_tiles:   of all sequences
    """

    rows: PagedRows
    first_tiles: Tensor
    tables: Tensor
    num_tiles: int

    @classmethod
    def of(cls, rows: PagedRows, host_seq_lens: tuple[int, ...]) -> "ExpandedRows":
        """host_seq_lens: of these sequences, exact"""
        tiles = torch.div(rows.seq_lens + (TILE - 1), TILE, rounding_mode="floor")
        first_tiles = torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).int()
        longest = torch.arange(triton.cdiv(rows.max_keys, TILE), dtype=torch.int32, device=tiles.device)
        tables = first_tiles[:-1, None] + longest
        return cls(rows, first_tiles, tables, sum(triton.cdiv(length, TILE) for length in host_seq_lens))


def attend_expanded_triton(
    q: Tensor, cache: Tensor, out: Tensor, keys: Tensor, values: Tensor, scale: float, expanded: ExpandedRows,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the rows of `out` [T, heads, value width].

    q:      [T, heads, nope + rope]
    cache:  [slots, 1, latent + rope], those of these rows included; in 8 bits with scales [slots, 1, 1 or 2] float32
    keys:   [heads, nope, latent], makes keys but their last `rope` elements, which all heads share, out of latents
    values: [heads, latent, value width], makes values
    """
    rows, cached = expanded.rows, (cache, scales)
    num_heads, nope, latent = keys.shape
    value, rope = values.shape[2], cache.shape[2] - latent
    num_keys, per_head = expanded.num_tiles * TILE, nope + value
    most_heads = max(MOST_BYTES // (num_keys * per_head * q.element_size()), 1)
    some_heads = triton.cdiv(num_heads, triton.cdiv(num_heads, most_heads))
    # A key: what all heads share, then of each head its own part and the value.
    made = q.new_empty(num_keys, rope + some_heads * per_head)
    per_tile = PagedRows(rows.query_starts, rows.seq_lens, expanded.tables, TILE, rows.num_rows, rows.max_keys)
    for first in range(0, num_heads, some_heads):
        heads = slice(first, min(first + some_heads, num_heads))
        own = made[:, rope:]
        _expand(cached, keys[heads].transpose(1, 2), own, made if first == 0 else None, per_head, expanded)
        _expand(cached, values[heads], own[:, nope:], None, per_head, expanded)
        places = Places(
            own, made, own[:, nope:], heads.stop - heads.start, 1, nope, rope, value, head_step=per_head, scale=scale
        )
        attend_places(q[:, heads], places, out[:, heads], per_tile, Seen())


def _expand(
    cached: tuple[Tensor, Tensor | None], weight: Tensor, made: Tensor, tail: Tensor | None, head_step: int,
    expanded: ExpandedRows,
) -> None:  # fmt: skip
    """Writes latents times weight [heads, latent, n] to `made`, and the rest of cached rows to `tail`, if given."""
    (cache, scales), (num_heads, latent, width) = cached, weight.shape
    most, some_latents = COLUMNS_FLOAT32 if weight.dtype == torch.float32 else COLUMNS
    rows, block = expanded.rows, min(max(triton.next_power_of_2(width), 16), most)
    column_blocks, rope = triton.cdiv(width, block), cache.shape[2] - latent
    expand_kernel[(expanded.num_tiles * num_heads * column_blocks,)](
        cache, cache[:, :, latent:], scales, weight, made, tail, expanded.first_tiles, rows.seq_lens,
        rows.block_tables, rows.seq_lens.shape[0], cache.stride(0), 0 if scales is None else scales.stride(0),
        *weight.stride(), made.stride(0), rows.block_tables.stride(0),
        HEADS=num_heads, COLUMN_BLOCKS=column_blocks, WIDTH=width, BLOCK_N=block, HEAD_STEP=head_step, LATENT=latent,
        BLOCK_K=some_latents, TAIL=rope, BLOCK_T=max(triton.next_power_of_2(rope), 16),
        WRITES_TAIL=tail is not None and rope > 0, SCALED=scales is not None, TILE_KEYS=TILE,
        BLOCK_SIZE=rows.block_size,
        num_warps=8, num_stages=3,
    )  # fmt: skip


@triton.jit
def expand_kernel(
    latents, cached_tail, scales, weight, made, tail, first_tiles, seq_lens, tables, num_seqs, slot_stride,
    scale_stride, head_stride, in_stride, out_stride, made_stride, table_stride,
    HEADS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_STEP: tl.constexpr, LATENT: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    WRITES_TAIL: tl.constexpr, SCALED: tl.constexpr, TILE_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Some columns of one head, for one tile of keys. Programs of one tile follow each other, as in attend_kernel."""
    tile = tl.program_id(0) // (HEADS * COLUMN_BLOCKS)
    head = tl.program_id(0) // COLUMN_BLOCKS % HEADS
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    seq = sequence_of(tile, first_tiles, num_seqs, 0)
    key = (tile - tl.load(first_tiles + seq)) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    inside = key < tl.load(seq_lens + seq).to(tl.int32)
    block = tl.load(tables + seq.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    at = slot * slot_stride
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_at = weight + head.to(tl.int64) * head_stride + column[None, :] * out_stride
    total = tl.zeros((TILE_KEYS, BLOCK_N), dtype=tl.float32)
    for first in range(0, LATENT, BLOCK_K):
        of_latent = first + tl.arange(0, BLOCK_K)
        used = of_latent < LATENT
        some = tl.load(latents + at[:, None] + of_latent[None, :], mask=inside[:, None] & used[None, :], other=0.0)
        factors = tl.load(weight_at + of_latent[:, None] * in_stride,
                          mask=used[:, None] & (column < WIDTH)[None, :], other=0.0)  # fmt: skip
        total += dot(widened(some, weight.dtype.element_ty), factors)
    if SCALED:
        total *= tl.load(scales + slot * scale_stride, mask=inside, other=0.0)[:, None]
    made_key = tile.to(tl.int64) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    made_at = made + made_key[:, None] * made_stride + (head * HEAD_STEP + column)[None, :]
    tl.store(made_at, as_dtype(total, made.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])
    if WRITES_TAIL:  # noqa: SIM102 - the first is decided when it is compiled
        if (head == 0) & (column_block == 0):
            of_tail = tl.arange(0, BLOCK_T)
            rest = load_columns(cached_tail + at, inside, 0, TAIL, BLOCK_T)
            if SCALED:
                by = tl.load(scales + slot * scale_stride + 1, mask=inside, other=0.0)
                rest = as_dtype(rest.to(tl.float32) * by[:, None], tail.dtype.element_ty)
            tl.store(tail + made_key[:, None] * made_stride + of_tail[None, :], rest,
                     mask=inside[:, None] & (of_tail < TAIL)[None, :])  # fmt: skip
