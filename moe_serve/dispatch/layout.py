"""Where every row goes: pure index arithmetic, the same on all ranks, without communication.

An entry is one (token, k) pair with its flat index t * K + k. A rank sends its entries ordered by slot, then by flat
index. Rows arrive ordered by source rank, then slot. The placed layout is ordered by slot, then source rank, then flat
index: a pure function of all ranks' physical ids. No function here reads a tensor back to the host.

Shape words: T tokens, K topk, R ranks, P slots, S = P / R slots of one rank, N entries sent, M rows received.
"""

import torch
from torch import Tensor


def count_slots(physical_ids: Tensor, num_slots: int) -> Tensor:
    """Returns how many entries name each slot: physical_ids [T, K] int64 (-1 = none) -> [P] int64."""
    flat = physical_ids.reshape(-1) + 1  # -1 is counted in front, and dropped
    if flat.device.type == "cpu":
        return torch.bincount(flat, minlength=num_slots + 1)[1:]
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]


def send_order(physical_ids: Tensor, num_slots: int, num_entries: int) -> Tensor:
    """Returns the flat indices of the entries that are sent, by slot, then by flat index: [N] int64.

    num_entries: N, how many ids are not -1
    """
    flat = physical_ids.reshape(-1)
    if num_entries < flat.numel():
        flat = torch.where(flat < 0, num_slots, flat)
    return torch.sort(flat, stable=True).indices[:num_entries]


def home_index(order: Tensor, num_tokens: int, topk: int) -> Tensor:
    """Returns which sent row each entry became: order [N] -> [T, K] int64, -1 = was not sent."""
    num_entries = order.shape[0]
    index = torch.empty(num_tokens * topk, dtype=torch.int64, device=order.device)
    if num_entries < num_tokens * topk:
        index.fill_(-1)
    index.scatter_(0, order, torch.arange(num_entries, device=order.device))
    return index.view(num_tokens, topk)


def placed_order(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns how arrival and placed layout permute: (to_placed, to_arrival), both [M] int64.

    counts: [R, S] int64, rows that arrive from each rank for each slot of this one;  num_rows: M, their sum
    placed = arrived[to_placed] and arrived = placed[to_arrival]
    """
    num_ranks, slots_per_rank = counts.shape
    slots = torch.arange(slots_per_rank, device=counts.device).repeat(num_ranks)
    slot_of_row = slots.repeat_interleave(counts.reshape(-1), output_size=num_rows)
    # Stable: within a slot, rows keep the order of arrival, which is by source rank, then flat index.
    to_placed = torch.sort(slot_of_row, stable=True).indices
    to_arrival = torch.empty_like(to_placed)
    to_arrival.scatter_(0, to_placed, torch.arange(num_rows, device=counts.device))
    return to_placed, to_arrival
