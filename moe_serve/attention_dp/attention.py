"""Attention over the paged cache, by torch: decode rows in padded groups, prefill chunks one by one.

On GPUs the Triton kernels compute (triton_attention.py), for which this is the plain reference.

`fast` leaves the order of a reduction to the library. `batch_invariant` reduces keys in tiles of kv_tile tokens, in
order, starting at multiples of kv_tile. Each of its GEMMs takes the query heads of one token as rows (padded to the row
tile), or those of as many tokens as are proven to give the same bits. Keys beyond a sequence's end add exact zeros.

Shape words: T = rows, heads = key/value heads, group = query heads of one key/value head, D = width of a key,
Dv = width of a value, K = num_keys, C = query rows of one chunk, n = sequences.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.attention_plan import AttentionPlan, Chunk, DecodeGroup, Visible, plan_attention
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.kernels.forms import AttendShape
from moe_serve.kernels.indexed_attention import attend_row, chosen_keys
from moe_serve.kernels.linear import cut, proven_tiles
from moe_serve.kernels.numerics import Numerics


def attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    first_position: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Returns the attention of one sequence, [C, heads, group, Dv] float32.

    q: [C, heads, group, D], keys: [heads, K, D], values: [heads, K, Dv]
    Query i is at position first_position + i and sees the keys up to that position, the last `window` of them, those
    from the last multiple of `chunk` on.
    sinks: [heads * group], scores beside those of the keys, whose weights go nowhere; None: there are none
    """
    scores = torch.einsum("chgd,hkd->chgk", q.float(), keys.float()) * scale
    positions = torch.arange(len(q), device=q.device)[:, None] + first_position
    key_positions = torch.arange(keys.shape[1], device=q.device)
    hidden = key_positions > positions
    if window is not None:
        hidden |= key_positions <= positions - window
    if chunk is not None:
        hidden |= key_positions < positions // chunk * chunk
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, *q.shape[1:3], 1).expand(len(q), -1, -1, -1)
        scores = torch.cat((scores, sink), dim=-1)
    return torch.einsum("chgk,hkd->chgd", scores.softmax(-1)[..., : keys.shape[1]], values.float())


@dataclass(frozen=True)
class AttentionShape:
    """The shape of attention that layers of a model share.

    group:     query heads per key/value head;  scale: factor on the scores
    has_sinks: every query head has a score beside those of the keys (gqa only)
    expand_from: rows of a chunk behind a long prefix from which attend_expanded takes fewer multiplications; behind a
               shorter one it takes fewer from fewer rows on (first_expanded); None: it never does
    """

    layout: KvLayout
    group: int
    scale: float
    has_sinks: bool = False
    expand_from: int | None = None

    @property
    def for_kernels(self) -> AttendShape:
        layout = self.layout
        latent = layout.value_width if layout.kind == "mla" else None
        values = layout.value_width if layout.kind == "gqa" and layout.value_width < layout.width else None
        return AttendShape(layout.num_heads, self.group, layout.width, self.scale, latent, values)


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """What an indexer has computed for the rows of a step, to choose the keys that they attend.

    q:     [T, heads, width];  weights: [T, heads]
    layer: of the cache, that holds its keys, [slots, 1, width];  topk: how many keys a row attends
    """

    q: Tensor
    weights: Tensor
    layer: int
    topk: int


@dataclass(frozen=True, eq=False)
class HeadProjections:
    """What makes keys and values of every head out of cached latents.

    keys:   [heads, nope, latent], keys but their rotated end, which is cached and which all heads share
    values: [heads, latent, Dv]
    """

    keys: Tensor
    values: Tensor


class StepPlan(Protocol):
    """The plan of a step's attention. expanded_rows: those that attend_expanded attends, behind all other rows"""

    @property
    def expanded_rows(self) -> range: ...


class Attention(Protocol):
    """The attention of all layers that share a cache layout; what each method returns stands at PagedAttention."""

    def plan(self, batch: ForwardBatch, window: int | None = None, chunk: int | None = None) -> StepPlan: ...

    def __call__(self, q: Tensor, cache: KvCache, layer: int, plan: Any, sinks: Tensor | None = None) -> Tensor: ...

    def attend_expanded(
        self, q: Tensor, cache: KvCache, layer: int, plan: Any, heads: HeadProjections, out: Tensor
    ) -> None: ...

    def attend_indexed(
        self, q: Tensor, cache: KvCache, layer: int, index: IndexedRows, batch: ForwardBatch
    ) -> Tensor: ...


class PagedAttention:
    """The attention of all layers that share a cache layout. Stateless between calls."""

    def __init__(self, shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, device: torch.device | str):
        self._shape = shape
        self._layout = shape.layout
        self._group = shape.group
        self._scale = shape.scale
        self._numerics = numerics
        self._dtype = dtype
        self._kv_tile = numerics.kv_tile
        self._token_rows = numerics.padded(shape.group)  # GEMM rows of one token
        self._tiles: tuple[int, ...] | None = None
        if numerics.row_tile is not None:
            like = torch.zeros((), dtype=dtype, device=device)
            self._tiles = self._prove(like)

    def plan(self, batch: ForwardBatch, window: int | None = None, chunk: int | None = None) -> AttentionPlan:
        """Returns the plan of a step's attention, once for all layers with equal visibility. None, None: all keys"""
        visible = Visible(window, self._shape.has_sinks, chunk)
        return plan_attention(batch, self._layout, self._numerics, self._dtype, self._shape.expand_from, visible)

    def __call__(
        self, q: Tensor, cache: KvCache, layer: int, plan: AttentionPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Returns the attention of the rows, [T, heads, group, Dv]; zeros for padding rows and plan.expanded_rows.

        q:     [T, heads, group, D]. The keys and values of these rows are already in the cache.
        sinks: [heads * group], for each query head a score that takes its share of the weights; None: none
        """
        assert self._shape.has_sinks == (sinks is not None), "sinks go with AttentionShape.has_sinks"
        sinks = None if sinks is None else sinks.to(q.dtype).view(-1, self._group)
        if len(plan.decodes) == 1 and plan.num_rows == q.shape[0] == plan.decodes[0].num_seqs:
            return self._decode(q, cache, layer, plan.decodes[0], sinks)
        out = q.new_zeros(*q.shape[:-1], self._layout.value_width)
        for group in plan.decodes:
            if group.tokens is None:
                out[: group.num_seqs] = self._decode(q[: group.num_seqs], cache, layer, group, sinks)
            else:
                found = self._decode(q.index_select(0, group.tokens), cache, layer, group, sinks)
                out.index_copy_(0, group.tokens, found)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._chunk(q[chunk.start : chunk.end], cache, layer, chunk, sinks)
        return out

    def attend_expanded(
        self, q: Tensor, cache: KvCache, layer: int, plan: AttentionPlan, heads: HeadProjections, out: Tensor
    ) -> None:
        """Fills plan.expanded_rows of `out` [T, heads, Dv]: keys and values of all heads first, then their attention.

        q: [T, heads, nope + rope]. The latents of these rows are already in the cache.
        """
        value_width = heads.values.shape[2]
        for chunk in plan.expanded:
            rows = cache.gather(layer, chunk.rows, 1)[0][0]
            latents, rotated = (
                part.expand(q.shape[1], -1, -1) for part in rows.tensor_split((self._layout.value_width,), dim=2)
            )
            keys = torch.cat((torch.bmm(latents, heads.keys.transpose(1, 2)), rotated), dim=-1)
            values = torch.bmm(latents, heads.values)
            # The fused kernel of torch needs keys and values of one width.
            missing = keys.shape[2] - value_width
            if missing > 0:
                values = functional.pad(values, (0, missing))
            attended = attend_chunk(q[chunk.start : chunk.end, :, None], keys, values, chunk, self._scale)
            out[chunk.start : chunk.end] = attended[:, :, 0, :value_width]

    def attend_indexed(self, q: Tensor, cache: KvCache, layer: int, index: IndexedRows, batch: ForwardBatch) -> Tensor:
        """Returns the attention of the rows over the keys that the indexer chooses, [T, 1, heads, latent].

        Rows are computed one by one, so that a row's bits depend on that row only. Padding rows have zeros.
        q: [T, 1, heads, width]. The latents and index keys of these rows are already in the cache.
        """
        out = q.new_zeros(*q.shape[:-1], self._layout.value_width)
        row = 0
        for seq, length in enumerate(batch.host_query_lens):
            keys = torch.arange(batch.host_seq_lens[seq], device=q.device)
            blocks = batch.block_tables[seq].index_select(0, keys // batch.block_size).long()
            slots = blocks * batch.block_size + keys % batch.block_size
            latents, index_keys = (cache.layer(of)[:, 0].index_select(0, slots) for of in (layer, index.layer))
            for seen in range(len(keys) - length + 1, len(keys) + 1):
                # Copies, since libraries may compute a product otherwise where it begins at another address.
                mine = index.q[row].clone(), index.weights[row].clone()
                chosen = chosen_keys(*mine, index_keys[:seen], index.topk)
                rows = latents.index_select(0, chosen)
                out[row, 0] = attend_row(q[row, 0].clone(), rows, self._scale)[:, : self._layout.value_width]
                row += 1
        return out

    def _decode(self, q: Tensor, cache: KvCache, layer: int, group: DecodeGroup, sinks: Tensor | None) -> Tensor:
        """q: [n, heads, group, D], sinks: [heads, group] -> [n, heads, group, Dv]"""
        if self._tiles is not None:
            num_tiles = group.num_keys // self._kv_tile
            keys, values = cache.gather(layer, group.rows, group.num_seqs * num_tiles)
            out = self._attend_tiles(self._pad_heads(q), keys, values, group.mask, self._pad_sinks(sinks))
            return out[:, :, : self._group]
        keys, values = cache.gather(layer, group.rows, group.num_seqs)
        q, keys, values = q.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        weights = torch.baddbmm(group.mask, q, keys.transpose(1, 2), alpha=self._scale)
        if sinks is not None:
            weights = torch.cat((weights, sinks.repeat(group.num_seqs, 1)[..., None]), dim=-1)
        out = torch.bmm(weights.softmax(-1)[..., : group.num_keys], values)
        return out.view(group.num_seqs, -1, *out.shape[1:])

    def _chunk(self, q: Tensor, cache: KvCache, layer: int, chunk: Chunk, sinks: Tensor | None) -> Tensor:
        """q: [C, heads, group, D], sinks: [heads, group] -> [C, heads, group, Dv]"""
        if self._tiles is not None:
            return self._chunk_in_tiles(q, cache, layer, chunk, sinks)
        keys, values = (part[0] for part in cache.gather(layer, chunk.rows, 1))
        # The fused kernel needs one width for keys and values; the excess is cut off below.
        if self._layout.kind == "mla":
            values = keys
        elif values.shape[-1] < keys.shape[-1]:
            values = functional.pad(values, (0, keys.shape[-1] - values.shape[-1]))
        if sinks is not None:
            q, keys, values = with_sink_key(q, keys, values, sinks / self._scale)
        return attend_chunk(q, keys, values, chunk, self._scale)[..., : self._layout.value_width]

    def _chunk_in_tiles(self, q: Tensor, cache: KvCache, layer: int, chunk: Chunk, sinks: Tensor | None) -> Tensor:
        assert chunk.mask is not None
        assert self._tiles is not None
        num_rows, num_tiles, rows = q.shape[0], chunk.mask.shape[1], self._token_rows
        keys, values = cache.gather(layer, chunk.rows, num_tiles)
        q, sinks = self._pad_heads(q), self._pad_sinks(sinks)
        pieces = []
        first_position = chunk.seq_len - num_rows
        for piece in cut(num_rows * rows, self._tiles):
            start, end = piece[0] // rows, piece[1] // rows
            # Tiles behind the last position of the piece add only zeros.
            used = (first_position + end - 1 - chunk.first_key) // self._kv_tile + 1
            mask = chunk.mask[start:end, :used].transpose(0, 1).repeat_interleave(rows, 1)[None, :, None]
            tokens = q[start:end].transpose(0, 1).flatten(1, 2)[None]
            of_rows = None if sinks is None else sinks.repeat(1, end - start)
            out = self._attend_tiles(tokens, keys[:used], values[:used], mask, of_rows)
            pieces.append(out[0].view(-1, end - start, rows, out.shape[-1]).transpose(0, 1))
        return torch.cat(pieces)[:, :, : self._group]

    def _attend_tiles(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns [n, heads, M, Dv] for M GEMM rows of each sequence and key/value head.

        q: [n, heads, M, D], keys: [n * tiles, heads, kv_tile, D], values: [n * tiles, heads, kv_tile, Dv],
        mask: [n, tiles, 1, 1 or M, kv_tile], sinks: [heads, M] or None
        """
        num_seqs, heads, rows, _ = q.shape
        num_tiles = mask.shape[1]
        q = (q * self._scale)[:, None].expand(-1, num_tiles, -1, -1, -1).flatten(0, 2)
        scores = _products(q, keys.flatten(0, 1).transpose(1, 2)).view(num_seqs, num_tiles, heads, rows, -1) + mask
        most = scores.amax((1, 4), keepdim=True)
        if sinks is not None:
            most = torch.maximum(most, sinks[..., None])
        weights = scores.sub_(most).exp_()
        parts = _products(weights.flatten(0, 2), values.flatten(0, 1)).view(num_seqs, num_tiles, heads, rows, -1)
        sums = weights.sum(-1, keepdim=True)
        out, total = parts[:, 0], sums[:, 0]
        for tile in range(1, num_tiles):
            out, total = out + parts[:, tile], total + sums[:, tile]
        if sinks is not None:
            # As wide as a tile, so that no row falls in the ragged end of the loop, which uses other instructions.
            sink = (sinks[..., None] - most[:, 0]).expand(-1, -1, -1, self._kv_tile).contiguous().exp_()
            total = total + sink[..., :1]
        return out / total

    def _pad_heads(self, q: Tensor) -> Tensor:
        """Returns q with the query heads of each key/value head padded to whole row tiles."""
        missing = self._token_rows - self._group
        return functional.pad(q, (0, 0, 0, missing)) if missing else q

    def _pad_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Returns sinks [heads, group] padded as the query heads are."""
        missing = self._token_rows - self._group
        return functional.pad(sinks, (0, missing)) if sinks is not None and missing else sinks

    def _prove(self, like: Tensor) -> tuple[int, ...]:
        """Returns how many rows of query heads may go into one GEMM, whole tokens only."""
        layout, rows = self._layout, self._token_rows
        generator = torch.Generator().manual_seed(1)
        keys = torch.randn(1, self._kv_tile, layout.width, generator=generator).to(like)
        values = keys[..., : layout.value_width]

        def scores(x: Tensor) -> Tensor:
            return _products(x[None], keys.transpose(1, 2))[0]

        def outputs(x: Tensor) -> Tensor:
            return _products(x[None], values)[0]

        first = proven_tiles(scores, layout.width, rows, like)
        second = proven_tiles(outputs, self._kv_tile, rows, like)
        return tuple(size for size in first if size in second)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Returns the batched product. A single GEMM runs as a batch of two, since libraries compute it differently."""
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def with_sink_key(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values with the sinks as one more key in front, whose value is zero.

    The sink is in one more element of each query, which only that key looks at: then all query heads share the keys.
    q: [C, heads, group, D], keys, values: [heads, K, D], sinks: [heads, group]
    """
    q = torch.cat((q, sinks.expand(q.shape[0], -1, -1)[..., None]), dim=-1)
    keys, values = functional.pad(keys, (0, 1, 1, 0)), functional.pad(values, (0, 1, 1, 0))
    keys[:, 0, -1] = 1
    return q, keys, values


def attend_chunk(q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """Returns the attention of one chunk, [C, heads, group, Dv], by torch's fused kernel.

    q: [C, heads, group, D], keys: [heads, K, D], values: [heads, K, Dv]
    """
    group = q.shape[2]
    out = functional.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3)
