"""The segmented layout: which row of which slab a token takes when no counts were exchanged.

Source rank r owns rows [r * T_max, (r + 1) * T_max) of every slot's slab, so a row's place depends on its own rank's
ids alone: the n-th token of r that names slot s lies at row r * T_max + n of slab s. A token takes a row of a slot
once, also where its ids name the slot twice (both entries share the row and its result): T_max rows always suffice.

Shape words: T tokens, K topk, R ranks, P slots, S = P / R slots of one rank.
"""

import torch
from torch import Tensor


def segment_rows(physical_ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Returns (row [T, K] int64: place within its rank's segment, -1 = not sent; counts [P] int64: rows of each slot).

    physical_ids: [T, K] int64, -1 = none
    """
    names = torch.zeros(physical_ids.shape[0], num_slots + 1, dtype=torch.int64, device=physical_ids.device)
    names.scatter_(1, physical_ids + 1, 1)  # column 0 takes the -1
    before = names.cumsum(0) - names
    row = before.gather(1, physical_ids + 1)
    return torch.where(physical_ids < 0, -1, row), names.sum(0)[1:]


def slab_reference(hidden: list[Tensor], physical_ids: list[Tensor], num_slots: int) -> list[list[Tensor]]:
    """Returns the rows of every rank's slots as they must arrive: [R][S] of [rows, H], by source rank, then token.

    hidden: [T_r, H] of each rank;  physical_ids: [T_r, K] of each rank
    """
    num_ranks = len(hidden)
    slots_per_rank = num_slots // num_ranks
    return [
        [
            torch.cat([x[(ids == slot).any(1)] for x, ids in zip(hidden, physical_ids, strict=True)])
            for slot in range(rank * slots_per_rank, (rank + 1) * slots_per_rank)
        ]
        for rank in range(num_ranks)
    ]
