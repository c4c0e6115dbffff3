"""The transport of one rank by the compiled CPU kernels: rows are sorted by slot, and added up at the end.

The same rows, in the same order and with the same bits, as LocalAllToAll.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Dispatched, PackedRows, Pending, Ready
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.wire import Wire
from moe_serve.kernels.cpu.rows import pack_rows, weighted_sum


@dataclass(frozen=True)
class OneRankHandle:
    index: Tensor  # [T, K] which packed row each entry became, -1 = none
    hidden: int


class OneRank(AllToAll[OneRankHandle]):
    """AllToAll over one rank, with float32 rows on CPU."""

    capabilities = TRANSPORTS["local"]

    def __init__(self, num_slots: int, wire: Wire):
        self._num_slots = num_slots
        self._wire = wire
        self.is_local = wire.dispatch.is_identity and wire.combine.is_identity

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return Ready(counts[None])

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[OneRankHandle]]:
        rows, counts, index = pack_rows(hidden, physical_ids, self._num_slots)
        codec = self._wire.dispatch
        if not codec.is_identity:
            rows = codec.decode(codec.encode(rows), hidden.shape[1])
        return Ready(Dispatched(PackedRows(rows, counts), OneRankHandle(index, hidden.shape[1])))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: OneRankHandle) -> Pending[Tensor]:
        codec = self._wire.combine
        if not codec.is_identity:
            expert_out = codec.decode(codec.encode(expert_out), handle.hidden)
        return Ready(weighted_sum(expert_out, handle.index, weights))
