"""Sparse attention of DeepSeek-V3.2 (arXiv:2512.02556): an indexer chooses which cached rows a query attends.

The score of a key is the sum over the indexer's heads of weight x max(query . key, 0). A query attends the `topk` best
of the keys that it sees; of equal scores the earlier key is better, and a score that is NaN is the lowest.

Plain form: row by row, so that a row's bits depend on its own query and keys only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.kernels.rope import rotate_


@dataclass(frozen=True)
class IndexerShape:
    """heads: of the index queries;  width: of an index query and key;  topk: keys that a query attends"""

    heads: int
    width: int
    topk: int


def index_write(q: Tensor, k: Tensor, turns: Tensor, slots: Tensor, cache_layer: Tensor) -> None:
    """Rotates the beginnings of index queries and keys in place, and writes the keys into the cache.

    q: [T, heads, width];  k: [T, width];  turns: [T, n / 2] complex64, for the first n elements
    slots: [T] int64, -1 = the spare row;  cache_layer: [slots, 1, width]
    """
    k = k[:, None]
    if q.is_cuda:
        from moe_serve.kernels.triton.rope import rope_write_triton

        return rope_write_triton(q, k, None, 0.0, turns, slots, cache_layer)
    rotate_(q[..., : 2 * turns.shape[1]], turns)
    rotate_(k[..., : 2 * turns.shape[1]], turns)
    cache_layer.index_put_((slots,), k)
    return None


def attend_row(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Returns the attention of one token, [heads, width]. q: [heads, width];  rows: [n, width], keys and values"""
    return (q @ rows.T).mul_(scale).softmax(-1) @ rows


def chosen_keys(index_q: Tensor, weights: Tensor, keys: Tensor, topk: int) -> Tensor:
    """Returns which keys one token attends, ascending, [min(topk, n)] int64.

    index_q: [index heads, index width];  weights: [index heads];  keys: [n, index width], all that it sees
    """
    if keys.shape[0] <= topk:
        return torch.arange(keys.shape[0], device=keys.device)
    scores = weights.float() @ (index_q.float() @ keys.float().T).relu_()
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return scores.sort(descending=True, stable=True).indices[:topk].sort().values
