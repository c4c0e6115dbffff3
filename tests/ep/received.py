"""Counts the rows that each slot of this rank receives, where tests need to see who served what."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep import moe_layer
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.fused import FusedMoe
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.numerics import Numerics


class ReceivedRows:
    """Rows per slot, summed over calls, for each layer in the order in which layers first run."""

    def __init__(self) -> None:
        self._of_layer: dict[int, Tensor] = {}

    def add(self, experts: ExpertStore | PackedExperts, rows_per_slot: Tensor) -> None:
        layer = id(experts.packed if isinstance(experts, ExpertStore) and experts.is_packed else experts)
        before = self._of_layer.get(layer, torch.zeros_like(rows_per_slot))
        self._of_layer[layer] = before + rows_per_slot

    @property
    def slot_rows(self) -> Tensor:
        """[num_layers, slots_per_rank] int64"""
        return torch.stack(list(self._of_layer.values())) if self._of_layer else torch.zeros(0, 0)


@contextmanager
def count_received() -> Iterator[ReceivedRows]:
    """Counts rows of every MoE layer of this process as long as the context is open."""
    received, expert_ffn, bind = ReceivedRows(), moe_layer.expert_ffn, FusedMoe.bind

    def count(
        rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics, out: Tensor | None = None
    ) -> Tensor:
        received.add(experts, rows.rows_per_slot)
        return expert_ffn(rows, experts, numerics, out)

    def bind_counted(
        fused: FusedMoe, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor
    ) -> Callable[[int], None]:
        call = bind(fused, x, slots, weights, experts, out)

        def counted(num_rows: int) -> None:
            call(num_rows)
            received.add(experts, fused._block[: fused._carried.buffers.shape.slots_per_rank])

        return counted

    moe_layer.expert_ffn = count
    with patch.object(FusedMoe, "bind", bind_counted):
        try:
            yield received
        finally:
            moe_layer.expert_ffn = expert_ffn
