"""Sorts token rows by the slot of their expert, as grouped GEMMs take them."""

import torch
from torch import Tensor


def pack_rows(x: Tensor, ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (rows, counts, index): one row of x for each id, ordered by slot, then by token and k.

    x:      [T, width]
    ids:    [T, topk] int64, 0 <= id < num_slots; -1 = no row. Raises IndexError for other ids.
    rows:   [num_rows, width]
    counts: [num_slots] int64, rows of each slot
    index:  [T, topk] int64, the row that each id became; -1 for id -1
    """
    flat = ids.reshape(-1)
    if flat.numel() and not -1 <= int(flat.min()) <= int(flat.max()) < num_slots:
        raise IndexError(f"an id is below -1 or not below {num_slots}")
    order = torch.sort(torch.where(flat < 0, num_slots, flat), stable=True).indices
    order = order[: int((flat >= 0).sum())]
    index = torch.full_like(flat, -1)
    index[order] = torch.arange(len(order))
    counts = torch.bincount(flat[order], minlength=num_slots)
    return x[order.div(ids.shape[1], rounding_mode="floor")], counts, index.view(ids.shape)
