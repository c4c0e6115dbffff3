"""Which slot serves each token of a rank, once its rows of every slot are known: one rule for every split."""

import numpy as np

from moe_serve.eplb.split.layer_slots import Int64s, LayerSlots


def assign_tokens(layer: LayerSlots, topk_ids: Int64s, own_rows: Int64s) -> Int64s:
    """Returns physical ids: an expert's tokens of one rank, in order, fill its slots in slot order, each to its share.

    topk_ids: [T, K] int64, logical experts of this rank's tokens, -1 = none
    own_rows: [P] int64, the rows of this rank for every slot, which sum to those of topk_ids for every expert
    returns:  [T, K] int64; -1 stays -1
    """
    flat = topk_ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, layer.num_logical, flat), kind="stable")
    slots = np.repeat(layer.by_expert, own_rows[layer.by_expert])
    physical = np.full(flat.shape, -1, dtype=np.int64)
    physical[order[: len(slots)]] = slots
    return physical.reshape(topk_ids.shape)
