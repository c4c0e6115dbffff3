"""Collects the slots that the tokens of one rank go to in one forward, while a client records passes.

It costs a test per layer while it is off.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of one rank in one forward, on the CPU. L = MoE layers, T = tokens.

    slot_counts: [L, P] int32, tokens of this rank that go to each slot of any rank; None where slots are kept
    slots:       [L, T, K] int32, -1 = none; None where counts are kept
    input_ids, positions: [T] int32
    """

    slot_counts: Tensor | None
    slots: Tensor | None
    input_ids: Tensor
    positions: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if part is not None)


class PassRecorder:
    """The forward that runs. is_on: whether it is collected"""

    def __init__(self, num_layers: int, num_slots: int, per_token: bool, device: torch.device | str = "cpu"):
        """per_token: keeps the slots of every token, not only how many tokens go to each slot"""
        self.is_on = False
        self._per_token = per_token
        # Column 0 takes the -1 of tokens that have no expert.
        self._counts = torch.zeros(num_layers, num_slots + 1, dtype=torch.int64, device=device)
        self._slots: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._input_ids = self._positions = torch.zeros(0, dtype=torch.int32)

    def begin(self, input_ids: Tensor, positions: Tensor) -> None:
        """Begins a forward over these tokens, [T] int64 each; drops one that was not taken, since its step was void."""
        if self.is_on:
            self._input_ids, self._positions = input_ids, positions
            self._counts.zero_()
            for parts in self._slots:
                parts.clear()

    def add(self, layer_row: int, slots: Tensor) -> None:
        """Collects the slots [T, K] int64 of one round in a layer; rounds come in the order of their rows."""
        if self._per_token:
            self._slots[layer_row].append(slots.to(torch.int32))
        else:
            columns = slots.reshape(-1) + 1
            self._counts[layer_row].scatter_add_(0, columns, torch.ones_like(columns))

    def take(self) -> ForwardPass:
        """Returns the forward that has just ended."""
        slots = torch.stack([torch.cat(parts) for parts in self._slots]).cpu() if self._per_token else None
        counts = None if self._per_token else self._counts[:, 1:].to(torch.int32).cpu()
        ids, positions = (values.to(torch.int32).cpu() for values in (self._input_ids, self._positions))
        return ForwardPass(counts, slots, ids, positions)
