"""Attention over the paged cache on GPUs, by the Triton kernels: the twin of PagedAttention (attention.py).

A plan needs the host's lengths only, which may be upper bounds, and the tensors of the batch as they are: nothing is
gathered, no mask is built, and no size comes from the device. So a step whose batch lies in static tensors is captured.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, HeadProjections, IndexedRows
from moe_serve.attention_dp.attention_plan import first_expanded
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.kernels.forms import Seen
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.triton.attention import PagedRows, attend_triton
from moe_serve.kernels.triton.expanded_attention import ExpandedRows, attend_expanded_triton
from moe_serve.kernels.triton.indexed_attention import attend_indexed_triton


@dataclass(frozen=True)
class LaunchPlan:
    """The attention of one step: one launch for decodes, one for chunks, and few for all that are expanded.

    decodes:  sequences of one row each, the first rows of the batch
    chunks:   the next sequences
    expanded: those behind them, whose rows attend_expanded attends
    """

    decodes: PagedRows | None
    chunks: PagedRows | None
    expanded: ExpandedRows | None
    num_rows: int
    expanded_rows: range
    window: int | None
    chunk: int | None


class TritonAttention:
    """The attention of all layers that share a cache layout. Stateless between calls.

    A decode's bits depend on its request alone. So do a chunk's in `batch_invariant`; in `fast` they also depend on
    where the chunk was cut.
    """

    def __init__(self, shape: AttentionShape, numerics: Numerics):
        self._shape = shape
        self._kernel_shape = shape.for_kernels
        self._numerics = numerics

    def plan(self, batch: ForwardBatch, window: int | None = None, chunk: int | None = None) -> LaunchPlan:
        """Returns the plan of a step's attention, once for all layers with equal visibility."""
        num_decodes, num_seqs = batch.num_decodes, len(batch.host_query_lens)
        decodes = _rows(batch, 0, num_decodes, alone=True) if num_decodes else None
        first = first_expanded(batch, self._shape.expand_from)
        chunks = _rows(batch, num_decodes, first, alone=False)
        long = _rows(batch, first, num_seqs, alone=False)
        expanded = ExpandedRows.of(long, batch.host_seq_lens[first:num_seqs]) if long.num_rows else None
        num_rows = num_decodes + chunks.num_rows
        rows = range(num_rows, num_rows + long.num_rows)
        return LaunchPlan(decodes, chunks if chunks.num_rows else None, expanded, num_rows, rows, window, chunk)

    def __call__(self, q: Tensor, cache: KvCache, layer: int, plan: LaunchPlan, sinks: Tensor | None = None) -> Tensor:
        """Returns the attention of the rows, as PagedAttention does."""
        assert self._shape.has_sinks == (sinks is not None), "sinks go with AttentionShape.has_sinks"
        seen = Seen(plan.window, plan.chunk, sinks)
        out = self._padded(q, plan.num_rows)
        for rows in (plan.decodes, plan.chunks):
            if rows is not None:
                attend_triton(
                    q, cache.layer(layer), out, self._kernel_shape, rows, seen, self._numerics.invariant,
                    scales=cache.scales(layer),
                )  # fmt: skip
        return out

    def attend_expanded(
        self, q: Tensor, cache: KvCache, layer: int, plan: LaunchPlan, heads: HeadProjections, out: Tensor
    ) -> None:
        """Fills plan.expanded_rows of `out`, as PagedAttention does."""
        if plan.expanded is not None:
            of_heads = heads.keys, heads.values, self._kernel_shape.scale
            attend_expanded_triton(q, cache.layer(layer), out, *of_heads, plan.expanded, cache.scales(layer))

    def attend_indexed(self, q: Tensor, cache: KvCache, layer: int, index: IndexedRows, batch: ForwardBatch) -> Tensor:
        """Returns the attention of the rows over the keys that the indexer chooses, as PagedAttention does."""
        out = self._padded(q, batch.num_tokens)
        rows = _rows(batch, 0, len(batch.host_query_lens), alone=False)
        chosen = index.q, index.weights, cache.layer(index.layer), index.topk
        attend_indexed_triton(q, cache.layer(layer), out, self._kernel_shape, chosen, rows)
        return out

    def _padded(self, q: Tensor, num_rows: int) -> Tensor:
        """Returns memory for the attention of the rows, zeros in padding rows."""
        out = q.new_empty(*q.shape[:-1], self._shape.layout.value_width)
        if num_rows < out.shape[0]:
            out[num_rows:].zero_()
        return out


def _rows(batch: ForwardBatch, first: int, end: int, alone: bool) -> PagedRows:
    """Returns the rows of sequences first .. end of a batch. alone: they have one row each, from row 0 on"""
    return PagedRows(
        query_starts=None if alone else batch.query_starts[first : end + 1],
        seq_lens=batch.seq_lens[first:end],
        block_tables=batch.block_tables[first:end],
        block_size=batch.block_size,
        num_rows=sum(batch.host_query_lens[first:end]),
        max_keys=max(batch.host_seq_lens[first:end], default=0),
    )
