"""Sparse attention by compiled kernels; the contract is that of kernels/indexed_attention.py, in float32."""

import functools

import torch
from torch import Tensor

from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.indexed_attention import IndexerShape


def attend_indexed(
    q: Tensor,
    cache: Tensor,
    rows: AttendRows,
    index_q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    indexer: IndexerShape,
) -> Tensor:
    """Returns the attention of the rows over the keys that the indexer chooses, [T, 1, group, value width].

    q:       [T, 1, group, width] without gaps;  cache: [slots, 1, width];  rows: which sequence and position each has
    index_q: [T, heads, width], weights: [T, heads], index_cache: [slots, 1, width], of the indexer
    Raises MemoryError where there is no memory to work in.
    """
    shape, num_rows = rows.shape, rows.num_rows
    assert dense(q, torch.float32, num_rows, 1, shape.group, shape.width), tuple(q.shape)
    assert dense(cache, torch.float32, len(cache), *shape.row_shape), tuple(cache.shape)
    assert dense(index_q, torch.float32, num_rows, indexer.heads, indexer.width), tuple(index_q.shape)
    assert dense(weights, torch.float32, num_rows, indexer.heads), tuple(weights.shape)
    assert dense(index_cache, torch.float32, len(index_cache), 1, indexer.width), tuple(index_cache.shape)
    out = q.new_empty(num_rows, 1, shape.group, shape.value_width)
    failed = cpu_library().call.attend_indexed(
        rows.address, q.data_ptr(), q.stride(0), cache.data_ptr(), out.data_ptr(), index_q.data_ptr(),
        index_q.stride(0), weights.data_ptr(), weights.stride(0), index_cache.data_ptr(),
        indexer_facts(indexer).data_ptr(),
    )  # fmt: skip
    if failed < 0:
        raise MemoryError("no memory for the indexer's scores, four bytes per key of the longest sequence and thread")
    return out


@functools.lru_cache
def indexer_facts(indexer: IndexerShape) -> Tensor:
    """Returns the block of int64 that indexed.c reads."""
    return torch.tensor([indexer.heads, indexer.width, indexer.topk])
