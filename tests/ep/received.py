"""Counts the rows that each slot of this rank receives, where tests need to see who served what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep import moe_layer
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.kernels.numerics import Numerics


class ReceivedRows:
    """Rows per slot, summed over calls, for each layer in the order in which layers first run."""

    def __init__(self) -> None:
        self._of_layer: dict[int, Tensor] = {}

    def add(self, experts: ExpertStore, rows_per_slot: Tensor) -> None:
        before = self._of_layer.get(id(experts), torch.zeros_like(rows_per_slot))
        self._of_layer[id(experts)] = before + rows_per_slot

    @property
    def slot_rows(self) -> Tensor:
        """[num_layers, slots_per_rank] int64"""
        return torch.stack(list(self._of_layer.values())) if self._of_layer else torch.zeros(0, 0)


@contextmanager
def count_received() -> Iterator[ReceivedRows]:
    """Counts rows of every MoE layer of this process as long as the context is open."""
    received, expert_ffn = ReceivedRows(), moe_layer.expert_ffn

    def count(
        rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics, out: Tensor | None = None
    ) -> Tensor:
        received.add(experts, rows.rows_per_slot)
        return expert_ffn(rows, experts, numerics, out)

    moe_layer.expert_ffn = count
    try:
        yield received
    finally:
        moe_layer.expert_ffn = expert_ffn
