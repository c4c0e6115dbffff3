"""The transport over torch.distributed: gloo on CPU, NCCL on GPU; rows travel as bytes in sized all-to-alls.

A sized receive needs host numbers. They come from slot_counts where the caller has them, else from one small
all-to-all of this transport's own. Rows of one source rank arrive ordered by slot; a gather puts them in the placed
layout.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import Deferred, Dispatched, EpGroup, PackedRows, Pending
from moe_serve.dispatch.layout import arrival_from_placed, count_slots, home_index, placed_from_arrival, send_order
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

    def __init__(self, group: EpGroup, slots_per_rank: int, wire: Wire):
        assert group.process_group is not None, "collective needs a process group"
        self._group = group.process_group
        self._rank = group.rank
        self._num_ranks = group.num_ranks
        self._slots_per_rank = slots_per_rank
        self._num_slots = group.num_ranks * slots_per_rank
        self._wire = wire

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        # An all-to-all of equal rows: on gloo it takes half the time of an all-gather, and more ranks less than that.
        out = torch.empty(self._num_ranks, counts.shape[0], dtype=counts.dtype, device=counts.device)
        sent = counts.expand(self._num_ranks, -1).contiguous()
        return Deferred(_Receive(dist.all_to_all_single(out, sent, group=self._group, async_op=True), out, sent))

    def dispatch(self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None) -> Pending[Dispatched]:
        (num_tokens, topk), width = physical_ids.shape, hidden.shape[1]
        first = self._rank * self._slots_per_rank
        if slot_counts is None:
            own = count_slots(physical_ids, self._num_slots)
            arriving = torch.empty(self._num_ranks, self._slots_per_rank, dtype=torch.int64, device=own.device)
            dist.all_to_all_single(arriving, own, group=self._group)
        else:
            own = slot_counts[self._rank]
            arriving = slot_counts[:, first : first + self._slots_per_rank]
        per_rank = torch.stack([own.view(self._num_ranks, -1).sum(dim=1), arriving.sum(dim=1)])
        sent_sizes, received_sizes = per_rank.tolist()  # one synchronisation on an accelerator
        num_sent, num_received = sum(sent_sizes), sum(received_sizes)

        order = send_order(physical_ids, self._num_slots, num_sent)
        rows = hidden.index_select(0, order.div(topk, rounding_mode="floor"))
        receive_rows = self._send(self._wire.dispatch.encode(rows), sent_sizes, received_sizes)
        # Index arithmetic runs while rows travel.
        home = home_index(order, num_tokens, topk)
        to_placed = placed_from_arrival(arriving, num_received)
        handle = _Handle(
            home=home,
            complete=num_sent == num_tokens * topk,
            to_arrival=arrival_from_placed(arriving, num_received),
            sent=sent_sizes,
            received=received_sizes,
        )
        rows_per_slot = arriving.sum(dim=0).cpu()

        def receive() -> Dispatched:
            arrived = self._wire.dispatch.decode(receive_rows(), width)
            return Dispatched(PackedRows(arrived.index_select(0, to_placed), rows_per_slot), handle)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        assert isinstance(handle, _Handle), "the handle belongs to another transport"
        in_arrival_order = expert_out.index_select(0, handle.to_arrival)
        receive_rows = self._send(self._wire.combine.encode(in_arrival_order), handle.received, handle.sent)
        width = expert_out.shape[1]

        def receive() -> Tensor:
            return weighted_sum(self._wire.combine.decode(receive_rows(), width), handle.home, weights, handle.complete)

        return Deferred(receive)

    def _send(self, data: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> "_Receive":
        out = torch.empty(sum(received_sizes), data.shape[1], dtype=torch.uint8, device=data.device)
        work = dist.all_to_all_single(out, data, received_sizes, sent_sizes, group=self._group, async_op=True)
        return _Receive(work, out, data)


class _Receive:
    """The receive half of one all-to-all. Holds the bytes that are sent until it is done."""

    def __init__(self, work: dist.Work, out: Tensor, sent: Tensor):
        self._work, self._out, self._sent = work, out, sent

    def __call__(self) -> Tensor:
        self._work.wait()
        return self._out
