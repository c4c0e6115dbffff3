"""Sparse attention over the paged cache by plain torch, row by row: a row's bits depend on that row only."""

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.kernels.indexed_attention import attend_row, chosen_keys


def attend_indexed(
    q: Tensor,
    index: tuple[Tensor, Tensor, int],
    batch: ForwardBatch,
    caches: tuple[Tensor, Tensor],
    latent: int,
    scale: float,
) -> Tensor:
    """Returns the attention of the rows over the keys that the indexer chooses, [T, 1, heads, latent].

    Padding rows have zeros.
    q:      [T, 1, heads, width];  latent: the first elements of a row, which are its value
    index:  queries [T, index heads, index width], weights of heads [T, index heads], and how many keys are chosen
    caches: latents and rotated keys [slots, 1, width], and index keys [slots, 1, index width], of one layer
    """
    index_q, weights, topk = index
    out = q.new_zeros(*q.shape[:-1], latent)
    row = 0
    for seq, length in enumerate(batch.host_query_lens):
        keys = torch.arange(batch.host_seq_lens[seq], device=q.device)
        blocks = batch.block_tables[seq].index_select(0, keys // batch.block_size).long()
        slots = blocks * batch.block_size + keys % batch.block_size
        latents, index_keys = (cache[:, 0].index_select(0, slots) for cache in caches)
        for seen in range(len(keys) - length + 1, len(keys) + 1):
            # Copies, since libraries may compute a product otherwise where it begins at another address.
            chosen = chosen_keys(index_q[row].clone(), weights[row].clone(), index_keys[:seen], topk)
            out[row, 0] = attend_row(q[row, 0].clone(), latents.index_select(0, chosen), scale)[:, :latent]
            row += 1
    return out
