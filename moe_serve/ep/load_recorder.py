"""Counts which experts the tokens of this rank ask for, on the device, and reduces over ranks once per window."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.dispatch.base import EpGroup, Pending
from moe_serve.dispatch.peer_calls import all_gather

GATHERED_AT_ONCE = 4096  # counts in one call; transports size their buffers for so many

# Counts [n] int64 of this rank -> [R, n] of all, zeros for a masked one; as AllToAll.exchange_counts.
Gather = Callable[[Tensor], Pending[Tensor]]


class LoadRecorder:
    """Expert counts since the start, and how much of them is in records so far.

    Exact: every real token counts topk times per layer, nothing else counts. A record holds the growth of the totals
    since the record before. A voided step resets both to the last `step_done` and `confirm`.
    """

    def __init__(self, num_layers: int, num_logical: int, group: EpGroup, gather: Gather | None = None):
        """gather: reaches all ranks but the masked ones; None: a call of the process group, which needs all ranks"""
        self._group = group
        self._gather = gather
        self._counts = torch.zeros(num_layers, num_logical, dtype=torch.int64, device=group.device)
        self._kept = self._counts.clone()  # as of the last step that was done
        self._has_rejoined = False
        # Totals of each rank as of the last record; of this rank alone where the process group gathers.
        self._reported = torch.zeros(
            group.num_ranks if gather else 1, num_layers * num_logical, dtype=torch.int64, device=group.device
        )
        self._confirmed = (self._reported, self._has_rejoined)

    def row(self, layer_row: int) -> Tensor:
        """Returns the counts of a layer, [E] int64, for a gate that adds the tokens of this rank in every step."""
        return self._counts[layer_row]

    def step_done(self) -> None:
        """Keeps the counts since the last call: their step is done."""
        self._kept.copy_(self._counts)

    def void_step(self) -> None:
        """Drops the counts since the last `step_done`, and the records since the last `confirm`."""
        self._counts.copy_(self._kept)
        self._reported, self._has_rejoined = self._confirmed

    def confirm(self) -> None:
        """Makes the records taken so far final: all ranks have them."""
        self._confirmed = (self._reported, self._has_rejoined)

    def rejoin(self) -> None:
        """Prepares a masked rank to take part again: the other ranks have recorded their own counts meanwhile."""
        self._has_rejoined = True
        self.confirm()

    def begin_anew(self, rank: int) -> None:
        """Expects counts from 0 on of a rank that is a new process. Needs `gather`."""
        for reported in (self._reported, self._confirmed[0]):
            reported[rank] = 0

    def take(self, begins_anew: bool = True) -> NDArray[np.int64]:
        """Returns the load of each rank since the last take, [L, R, E] int64. All ranks call it between two steps.

        begins_anew: this rank closes a record; False where it only takes part, since its own has just begun

        Counts that a lost rank had not yet reported are in no record. Counts of a late rank from before it was masked
        are in the first record after it rejoins.
        """
        self._kept.copy_(self._counts)
        own = self._counts.flatten()
        if self._gather is None:
            new = (own - self._reported[0])[None]
            self._reported = own.clone()[None]
            if self._group.process_group is not None and self._group.num_ranks > 1:
                rows = new.new_empty(self._group.num_ranks, own.shape[0])
                all_gather(list(rows), new[0], self._group.process_group)
                new = rows
        else:
            starts = range(0, own.shape[0], GATHERED_AT_ONCE)
            parts = [self._gather(own[start : start + GATHERED_AT_ONCE]).wait() for start in starts]
            # A masked rank's zeros are not its total.
            totals = torch.maximum(torch.cat(parts, dim=1), self._reported)
            if self._has_rejoined:
                own_reported = self._reported[self._group.rank].clone()
                self._reported = totals.clone()
                self._reported[self._group.rank] = own_reported
                self._has_rejoined = False
            new = totals - self._reported
            if begins_anew:
                self._reported = totals
        num_layers = self._counts.shape[0]
        by_rank: NDArray[np.int64] = new.view(new.shape[0], num_layers, -1).cpu().numpy()
        return by_rank.transpose(1, 0, 2)
