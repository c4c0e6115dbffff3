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

    def __init__(
        self, num_layers: int, num_logical: int, group: EpGroup, slots_per_rank: int = 0, gather: Gather | None = None
    ):
        """slots_per_rank: > 0 also counts the rows that each slot of this rank receives, in `slot_rows`

        gather: reduces without ranks that are out; None: a reduction of the process group, which needs all of them
        """
        self._group = group
        self._gather = gather
        self._on_host = group.device.type == "cpu"
        self._new_counts: list[tuple[int, Tensor]] = []  # by layer row; not yet added
        self._new_rows: list[tuple[int, Tensor]] = []
        # Column 0 takes the -1 of tokens that have no expert.
        self._counts = torch.zeros(num_layers, num_logical + 1, dtype=torch.int64, device=group.device)
        # Since start, this rank only; on the device, since masked rows are counted there and nobody waits for them.
        self._slot_rows = torch.zeros(num_layers, slots_per_rank, dtype=torch.int64, device=group.device)
        self._kept, self._kept_rows = self._counts.clone(), self._slot_rows.clone()
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

    def add_received(self, layer_row: int, rows_per_slot: Tensor) -> None:
        """Counts rows that arrived at this rank's slots: rows_per_slot [slots_per_rank] int64."""
        if self._on_host:
            # A copy: the transport's tensor may be a piece of all that it kept of its rows.
            self._new_rows.append((layer_row, rows_per_slot.clone()))
        else:
            self._slot_rows[layer_row] += rows_per_slot.to(self._slot_rows.device)

    @property
    def slot_rows(self) -> Tensor:
        """Rows that each slot of this rank received since the start: [L, slots_per_rank] int64."""
        self._add_up()
        return self._slot_rows

    def _add_up(self) -> None:
        """Adds what layers have left to be added: once a step, since between two layers a small sum costs as much as
        the sums of all."""
        for new, total in ((self._new_counts, self._counts[:, 1:]), (self._new_rows, self._slot_rows)):
            if new and total.shape[1]:
                layer_rows = torch.tensor([layer_row for layer_row, _ in new])
                total.index_add_(0, layer_rows, torch.stack([values for _, values in new]))
            new.clear()

    def step_done(self) -> None:
        """Keeps what was counted since the last call: its step is done."""
        self._add_up()
        self._kept.copy_(self._counts)
        self._kept_rows.copy_(self._slot_rows)

    def void_step(self) -> None:
        """Forgets what was counted since the last `step_done`, and records since the last `confirm`."""
        self._new_counts.clear()
        self._new_rows.clear()
        self._counts.copy_(self._kept)
        self._slot_rows.copy_(self._kept_rows)
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
