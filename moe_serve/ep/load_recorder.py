"""Counts which experts the tokens of this rank ask for, on the device, and reduces over ranks once per window."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.eplb.load import LoadRecord


class LoadRecorder:
    """Counts of one window. Exact: every real token counts topk times per layer, nothing else counts."""

    def __init__(self, num_layers: int, num_logical: int, group: EpGroup, slots_per_rank: int = 0):
        """slots_per_rank: > 0 also counts the rows that each slot of this rank receives, in `slot_rows`"""
        self._group = group
        # Column 0 takes the -1 of tokens that have no expert.
        self._counts = torch.zeros(num_layers, num_logical + 1, dtype=torch.int64, device=group.device)
        self.slot_rows = torch.zeros(num_layers, slots_per_rank, dtype=torch.int64)  # since start, this rank only

    def add(self, layer_row: int, topk_ids: Tensor, num_tokens: int) -> None:
        """Counts the first num_tokens rows of topk_ids [T, K] int64 (-1 = none). Nothing is read back."""
        columns = topk_ids[:num_tokens].reshape(-1) + 1
        self._counts[layer_row].scatter_add_(0, columns, torch.ones_like(columns))

    def add_counts(self, layer_row: int, counts: Tensor) -> None:
        """Adds what was counted elsewhere: counts [E] int64, tokens of this rank for each expert."""
        self._counts[layer_row, 1:] += counts

    def add_received(self, layer_row: int, rows_per_slot: Tensor) -> None:
        """Counts rows that arrived at this rank's slots: rows_per_slot [slots_per_rank] int64."""
        if self.slot_rows.shape[1]:
            self.slot_rows[layer_row] += rows_per_slot.to(self.slot_rows.device)

    def take(self, first_step: int, num_steps: int, phase: str = "mixed") -> LoadRecord:
        """Returns the load of all ranks since the last take, and begins a new window. All ranks call it together."""
        counts = self._counts[:, 1:].clone()  # a copy even where one row is contiguous as it is: zeroed below
        self._counts.zero_()
        if self._group.process_group is not None and self._group.num_ranks > 1:
            dist.all_reduce(counts, group=self._group.process_group)
        return LoadRecord(first_step, num_steps, phase, counts.cpu().numpy())
