"""The destination of every row: pure index arithmetic, the same on all ranks, without communication.

An entry is one (token, k) pair with its flat index t * K + k. A rank sends its entries ordered by slot, then by flat
index, or, where a row is sent once to each rank that needs it, by rank, then by flat index (`rank_order`). Entries
arrive ordered by source rank. The placed layout is ordered by slot, then source rank, then flat index: a pure function
of all ranks' physical ids. No function here reads a tensor back to the host.

Shape words: T tokens, K topk, R ranks, P slots, S = P / R slots of one rank, N entries sent, U rows sent, M entries
received.
"""

import torch
from torch import Tensor

FIRST = 1 << 30  # in an int32 entry of a message: its row begins here


def count_slots(physical_ids: Tensor, num_slots: int) -> Tensor:
    """Returns how many entries name each slot: physical_ids [T, K] int64 (-1 = none) -> [P] int64."""
    flat = physical_ids.reshape(-1) + 1  # -1 is counted in front, and dropped
    if flat.device.type == "cpu":
        return torch.bincount(flat, minlength=num_slots + 1)[1:]
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]


def rank_order(physical_ids: Tensor, num_slots: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Returns flat indices by destination rank, then by flat index, those of -1 last, and how many each rank gets.

    physical_ids: [T, K] int64, -1 = none -> order [T * K] int64, entries_per_rank [R] int64
    """
    flat = physical_ids.reshape(-1)
    ranks = torch.where(flat < 0, num_ranks, flat.div(num_slots // num_ranks, rounding_mode="floor"))
    return torch.sort(ranks, stable=True).indices, count_slots((ranks + 1) % (num_ranks + 1) - 1, num_ranks)


def row_begins(order: Tensor, entries_per_rank: Tensor, topk: int) -> Tensor:
    """Returns which entries begin a row: the first of a token for a rank. order: [N] as above -> [N] bool"""
    token = order.div(topk, rounding_mode="floor")
    begins = torch.ones(token.shape[0] + 1, dtype=torch.bool, device=order.device)
    begins[1:-1] = token[1:] != token[:-1]
    begins[entries_per_rank.cumsum(0) - entries_per_rank] = True  # each rank's list begins anew, also with equal tokens
    return begins[:-1]


def sent_index(order: Tensor, num_tokens: int, topk: int) -> Tensor:
    """Returns which sent row each entry became: order [N] -> [T, K] int64, -1 = was not sent."""
    num_entries = order.shape[0]
    index = torch.empty(num_tokens * topk, dtype=torch.int64, device=order.device)
    if num_entries < num_tokens * topk:
        index.fill_(-1)
    index.scatter_(0, order, torch.arange(num_entries, device=order.device))
    return index.view(num_tokens, topk)


def by_slot(slot_of_entry: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how arrival and placed layout permute: (to_placed, to_arrival), both [M] int64.

    slot_of_entry: [M] int64, the slot of each arrival
    placed = arrived[to_placed] and arrived = placed[to_arrival]
    """
    # Stable: within a slot, entries keep the order of arrival, which is by source rank, then flat index.
    to_placed = torch.sort(slot_of_entry, stable=True).indices
    to_arrival = torch.empty_like(to_placed)
    to_arrival.scatter_(0, to_placed, torch.arange(slot_of_entry.shape[0], device=slot_of_entry.device))
    return to_placed, to_arrival
