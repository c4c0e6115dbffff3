"""The transport over torch.distributed: gloo on CPU, NCCL on GPU; rows travel as bytes in sized all-to-alls.

A sized receive needs host numbers. They come from slot_counts where the caller has them, else from one small
all-to-all of this transport's own. Rows of one source rank arrive ordered by slot; a gather puts them in the placed
layout.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import Deferred, Dispatched, EpGroup, PackedRows, Pending, Ready
from moe_serve.dispatch.layout import count_slots, home_index, placed_order, send_order
from moe_serve.dispatch.wire import Wire
from moe_serve.kernels.weighted_sum import weighted_sum


@dataclass(frozen=True)
class _Handle:
    home: Tensor  # [T, K] which sent row each entry became, -1 = none
    complete: bool  # no entry is -1
    to_arrival: Tensor  # [M] placed row of each arrival
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


class CollectiveAllToAll:
    """AllToAll over a process group."""

    is_bitwise = True
    note = ""

    def __init__(self, group: EpGroup, slots_per_rank: int, wire: Wire):
        assert group.process_group is not None, "collective needs a process group"
        self._group = group.process_group
        self._rank = group.rank
        self._num_ranks = group.num_ranks
        self._slots_per_rank = slots_per_rank
        self._num_slots = group.num_ranks * slots_per_rank
        self._wire = wire

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        # An all-to-all of equal rows: gloo takes 0.4 to 0.7 of an all-gather's time for it.
        return self._exchange(counts.expand(self._num_ranks, -1).contiguous())

    def dispatch(self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None) -> Pending[Dispatched]:
        (num_tokens, topk), width = physical_ids.shape, hidden.shape[1]
        if slot_counts is None:
            own = count_slots(physical_ids, self._num_slots)
            arriving = self._exchange(own.view(self._num_ranks, -1))
        else:
            own = slot_counts[self._rank]
            first = self._rank * self._slots_per_rank
            arriving = Ready(slot_counts[:, first : first + self._slots_per_rank])
        sent: list[int] = own.view(self._num_ranks, -1).sum(dim=1).tolist()
        # Rows are gathered and encoded while counts travel, and the rest of the index arithmetic runs while rows do.
        order = send_order(physical_ids, self._num_slots, sum(sent))
        data = self._wire.dispatch.encode(hidden.index_select(0, order.div(topk, rounding_mode="floor")))
        counts = arriving.wait()  # [R, S] rows from each rank for each slot here
        received: list[int] = counts.sum(dim=1).tolist()
        rows_on_their_way = self._send(data, sent, received)
        to_placed, to_arrival = placed_order(counts, sum(received))
        home, complete = home_index(order, num_tokens, topk), sum(sent) == num_tokens * topk
        handle = _Handle(home, complete, to_arrival, sent, received)
        rows_per_slot = counts.sum(dim=0).cpu()

        def receive() -> Dispatched:
            arrived = self._wire.dispatch.decode(rows_on_their_way.wait(), width)
            return Dispatched(PackedRows(arrived.index_select(0, to_placed), rows_per_slot), handle)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        assert isinstance(handle, _Handle), "the handle belongs to another transport"
        data = self._wire.combine.encode(expert_out.index_select(0, handle.to_arrival))
        rows_on_their_way = self._send(data, handle.received, handle.sent)
        width = expert_out.shape[1]

        def receive() -> Tensor:
            rows = self._wire.combine.decode(rows_on_their_way.wait(), width)
            return weighted_sum(rows, handle.home, weights, handle.complete)

        return Deferred(receive)

    def _exchange(self, rows: Tensor) -> Pending[Tensor]:
        """Sends row r of rows [R, n] to rank r, and receives one row from each."""
        out = torch.empty_like(rows)
        return _Receive(dist.all_to_all_single(out, rows, group=self._group, async_op=True), out, rows)

    def _send(self, data: Tensor, sent: list[int], received: list[int]) -> Pending[Tensor]:
        """Sends data [N, row_bytes], its first sent[0] rows to rank 0 and so on."""
        out = torch.empty(sum(received), data.shape[1], dtype=torch.uint8, device=data.device)
        work = dist.all_to_all_single(out, data, received, sent, group=self._group, async_op=True)
        return _Receive(work, out, data)


class _Receive:
    """The receive half of one all-to-all. Holds the bytes that are sent until it is done."""

    def __init__(self, work: dist.Work, out: Tensor, sent: Tensor):
        self._work: dist.Work | None = work
        self._out = out
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._out
