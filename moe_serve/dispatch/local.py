"""The transport without a network: rows stay on their rank, which sorts them by slot and adds them up at the end.

LocalAllToAll does it by torch, OneRank by the compiled kernels for CPUs, OneGpu by Triton.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Dispatched, PackedRows, Pending, Ready
from moe_serve.dispatch.capabilities import TRANSPORTS, Combine
from moe_serve.dispatch.rank_sum import add_rank_sums
from moe_serve.dispatch.wire import Codec, Wire
from moe_serve.kernels.cpu import rows as compiled
from moe_serve.kernels.rows import pack_all_rows, pack_rows, weighted_sum


@dataclass(frozen=True)
class LocalHandle:
    index: Tensor  # [T, K] which packed row each entry became, -1 = none


class LocalAllToAll(AllToAll[LocalHandle]):
    """AllToAll over one rank, in its plain form."""

    def __init__(self, num_slots: int, wire: Wire, combine: Combine = "ordered"):
        self._num_slots = num_slots
        self._wire = wire
        self._rank_sum = combine == "rank_sum"
        self.capabilities = replace(TRANSPORTS["local"], bitwise=not self._rank_sum)

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return Ready(counts[None])

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[LocalHandle]]:
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        rows, counts, index = self._pack(hidden, physical_ids)
        rows = _carried(rows, self._wire.dispatch)
        return Ready(Dispatched(PackedRows(rows, counts), LocalHandle(index)))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: LocalHandle) -> Pending[Tensor]:
        if not self._rank_sum:
            return Ready(self._add(_carried(expert_out, self._wire.combine), handle.index, weights))
        sums = _carried(weighted_sum(expert_out, handle.index, weights), self._wire.combine)
        rows = torch.arange(len(sums), device=sums.device)
        return Ready(add_rank_sums(sums, torch.where((handle.index >= 0).any(1), rows, -1)[:, None]))

    def _pack(self, hidden: Tensor, physical_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, counts, index = pack_rows(hidden, physical_ids, self._num_slots)
        return rows, counts.cpu(), index

    def _add(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(rows, index, weights, complete=rows.shape[0] == index.numel())


class OneRank(LocalAllToAll):
    """The same by the compiled CPU kernels, in float32: the same rows, in the same order and with the same bits."""

    def __init__(self, num_slots: int, wire: Wire):
        super().__init__(num_slots, wire)
        keeps_rows = wire.dispatch.is_identity and wire.combine.is_identity
        self.capabilities = replace(TRANSPORTS["local"], keeps_rows=keeps_rows)

    def _pack(self, hidden: Tensor, physical_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return compiled.pack_rows(hidden, physical_ids, self._num_slots)

    def _add(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return compiled.weighted_sum(rows, index, weights)


class OneGpu(LocalAllToAll):
    """The same on a GPU: rows are sorted in two launches whose sizes no id changes, and added up in one.

    The host reads nothing, so a step can be captured.
    """

    def __init__(self, num_slots: int, wire: Wire, fp8_rows: bool = False):
        """fp8_rows: hand rows on in e4m3 with scales, quantised as they are sorted, whatever the wire"""
        super().__init__(num_slots, wire)
        self._fp8_rows = fp8_rows

    @property
    def captures(self) -> bool:
        return True

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[LocalHandle]]:
        carried = hidden if self._fp8_rows else _carried(hidden, self._wire.dispatch)
        rows, scale, counts, index = pack_all_rows(carried, physical_ids, self._num_slots, self._fp8_rows)
        return Ready(Dispatched(PackedRows(rows, counts, scale), LocalHandle(index)))

    def _add(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(rows, index, weights)


def _carried(rows: Tensor, codec: Codec) -> Tensor:
    """Returns rows as they would come from another rank."""
    return rows if codec.is_identity else codec.decode(codec.encode(rows), rows.shape[1])
