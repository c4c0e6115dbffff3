"""Counts which experts the tokens of this rank ask for, on the device, and reduces over ranks once per window."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.dispatch.base import EpGroup, Pending
from moe_serve.dispatch.peer_calls import all_gather

GATHERED_AT_ONCE = 4096  # counts in one call; transports size their buffers for so many

# Counts [n] int64 of this rank -> [R, n] of all, zeros for a masked one; as AllToAll.exchange_counts.
Gather = Callable[[Tensor], Pending[Tensor]]


class Taken(NamedTuple):
    """What a record holds. by_source: [L, R, E] int64, load of each rank;  beside: [R, n] int64, its other totals"""

    by_source: NDArray[np.int64]
    beside: NDArray[np.int64]


class LoadRecorder:
    """Expert counts since the start, and how much of them is in records so far.

    Exact: every real token counts topk times per layer, less the experts that give back what they take; nothing else
    counts. A record holds the growth of the totals
    since the record before. A voided step resets both to the last `step_done` and `confirm`.
    """

    def __init__(
        self, num_layers: int, num_logical: int, group: EpGroup, gather: Gather | None = None, num_beside: int = 0
    ):
        """gather: reaches all ranks but the masked ones; None: a call of the process group, which needs all ranks

        num_beside: other totals of a rank that go into records
        """
        self._group = group
        self._gather = gather
        self._counts = torch.zeros(num_layers, num_logical, dtype=torch.int64, device=group.device)
        self._kept = self._counts.clone()  # as of the last step that was done
        on_host = group.device.type == "cpu"
        self._on_host = (self._counts.numpy(), self._kept.numpy()) if on_host else None
        self._has_rejoined = False
        self._num_beside = num_beside
        # Totals of each rank as of the last record; of this rank alone where the process group gathers.
        self._reported = torch.zeros(
            group.num_ranks if gather else 1, num_layers * num_logical + num_beside,
            dtype=torch.int64, device=group.device,
        )  # fmt: skip
        self._confirmed = (self._reported, self._has_rejoined)

    def row(self, layer_row: int) -> Tensor:
        """Returns the counts of a layer, [E] int64, for a gate that adds the tokens of this rank in every step."""
        return self._counts[layer_row]

    def step_done(self) -> int:
        """Keeps the counts since the last call: their step is done.

        Returns how many experts its rows asked for, each once for a layer; 0 on a GPU, which the host does not wait for
        """
        if self._on_host is None:
            self._kept.copy_(self._counts)
            return 0
        counts, kept = self._on_host
        num_experts = int(np.count_nonzero(counts != kept))
        np.copyto(kept, counts)
        return num_experts

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

    def take(self, begins_anew: bool = True, beside: Sequence[int] = ()) -> Taken:
        """Returns the load of each rank since the last take. All ranks call it between two steps.

        begins_anew: this rank closes a record; False where it only takes part, since its own has just begun
        beside:      num_beside totals of this rank since its start, of which the growth is returned likewise

        Counts that a lost rank had not yet reported are in no record. Counts of a late rank from before it was masked
        are in the first record after it rejoins.
        """
        assert len(beside) == self._num_beside, f"{len(beside)} totals beside the load, of {self._num_beside}"
        self._kept.copy_(self._counts)
        own = torch.cat((self._counts.flatten(), self._counts.new_tensor(beside)))
        if self._gather is None:
            new = (own - self._reported[0])[None]
            self._reported = own[None]
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
        num_layers, num_logical = self._counts.shape
        taken: NDArray[np.int64] = new.cpu().numpy()
        by_rank = taken[:, : num_layers * num_logical].reshape(len(taken), num_layers, num_logical)
        return Taken(by_rank.transpose(1, 0, 2), taken[:, num_layers * num_logical :])
