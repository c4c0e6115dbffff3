"""Counts which experts the tokens of this rank ask for, on the device, and reduces over ranks once per window."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import EpGroup, Pending
from moe_serve.eplb.load import LoadRecord

GATHERED_AT_ONCE = 4096  # counts in one call; what buffers of transports have room for

# Counts [n] int64 of this rank -> [R, n] of all, zeros for one that is out; as AllToAll.exchange_counts.
Gather = Callable[[Tensor], Pending[Tensor]]


class LoadRecorder:
    """Counts since the start, and what of them the records so far have told.

    Exact: every real token counts topk times per layer, nothing else counts. Totals grow, a record is what they have
    grown by, and a step that is voided takes both back to the last `step_done` and `confirm`.
    """

    def __init__(self, num_layers: int, num_logical: int, group: EpGroup, gather: Gather | None = None):
        """gather: reduces without ranks that are out; None: a reduction of the process group, which needs all ranks"""
        self._group = group
        self._gather = gather
        self._on_host = group.device.type == "cpu"
        self._new_counts: list[tuple[int, Tensor]] = []  # by layer row; not yet added
        # Column 0 takes the -1 of tokens that have no expert.
        self._counts = torch.zeros(num_layers, num_logical + 1, dtype=torch.int64, device=group.device)
        self._kept = self._counts.clone()
        self._has_come_back = False
        # Totals of each rank as of the last record; of this rank only where the process group adds up.
        self._told = torch.zeros(
            group.num_ranks if gather else 1, num_layers * num_logical, dtype=torch.int64, device=group.device
        )
        self._confirmed = (self._told, self._has_come_back)

    def add(self, layer_row: int, topk_ids: Tensor, num_tokens: int) -> None:
        """Counts the first num_tokens rows of topk_ids [T, K] int64 (-1 = none). Nothing is read back."""
        columns = topk_ids[:num_tokens].reshape(-1) + 1
        self._counts[layer_row].scatter_add_(0, columns, torch.ones_like(columns))

    def add_counts(self, layer_row: int, counts: Tensor) -> None:
        """Adds what was counted elsewhere: counts [E] int64, tokens of this rank for each expert."""
        if self._on_host:
            self._new_counts.append((layer_row, counts))
        else:
            self._counts[layer_row, 1:] += counts

    def _add_up(self) -> None:
        """Adds what layers have left to be added: once a step, since between two layers a small sum costs as much as
        the sums of all."""
        if self._new_counts:
            layer_rows = torch.tensor([layer_row for layer_row, _ in self._new_counts])
            self._counts[:, 1:].index_add_(0, layer_rows, torch.stack([counts for _, counts in self._new_counts]))
            self._new_counts.clear()

    def step_done(self) -> None:
        """Keeps what was counted since the last call: its step is done."""
        self._add_up()
        self._kept.copy_(self._counts)

    def void_step(self) -> None:
        """Forgets what was counted since the last `step_done`, and records since the last `confirm`."""
        self._new_counts.clear()
        self._counts.copy_(self._kept)
        self._told, self._has_come_back = self._confirmed

    def confirm(self) -> None:
        """Says that all ranks have the records taken so far: what is in them will be in no other."""
        self._confirmed = (self._told, self._has_come_back)

    def come_back(self) -> None:
        """This rank was out and takes part again: what others counted meanwhile is in records that they have made."""
        self._has_come_back = True
        self.confirm()

    def take(self, first_step: int, num_steps: int, phase: str = "mixed") -> LoadRecord | None:
        """Returns the load of all ranks since the last take, and begins a new window. All ranks call it together.

        A rank whose window has no step (it has just begun, and others close theirs) gets None, and goes on with it.

        What a rank counted before it was lost and had not told is in no record; what it counted before it came late and
        was taken back is in the next.
        """
        self._add_up()
        own = self._counts[:, 1:].reshape(-1)
        if self._gather is None:
            new = own - self._told[0]
            self._told = own.clone()[None]
            if self._group.process_group is not None and self._group.num_ranks > 1:
                dist.all_reduce(new, group=self._group.process_group)
        else:
            starts = range(0, own.shape[0], GATHERED_AT_ONCE)
            parts = [self._gather(own[start : start + GATHERED_AT_ONCE]).wait() for start in starts]
            # The zeros of a rank that is out are not its total.
            totals = torch.maximum(torch.cat(parts, dim=1), self._told)
            if self._has_come_back:
                own_told = self._told[self._group.rank].clone()
                self._told = totals.clone()
                self._told[self._group.rank] = own_told
                self._has_come_back = False
            new = (totals - self._told).sum(0)
            if num_steps == 0:
                return None
            self._told = totals
        return LoadRecord(first_step, num_steps, phase, new.view(self._counts.shape[0], -1).cpu().numpy())
