"""The transport over torch.distributed: gloo on CPU, NCCL on GPU; rows travel as bytes in sized all-to-alls.

A row is sent once to each rank that needs it, however many of its slots do. Each rank gets one message: its entries
(int32 slot within the rank, + FIRST where the next row begins), their weights where results are summed before they are
sent back, and the rows. A sized receive needs host numbers, so a small round of sizes goes first. A step whose bytes
cost less than such a round sends a row for each entry instead, if all ranks know its sizes already.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Deferred, Dispatched, EpGroup, PackedRows, Pending, Ready
from moe_serve.dispatch.capabilities import TRANSPORTS, Combine
from moe_serve.dispatch.layout import FIRST, by_slot, count_slots, rank_order, row_begins, sent_index
from moe_serve.dispatch.peer_calls import lost_connection
from moe_serve.dispatch.rank_sum import add_rank_sums, index_by_row, rank_index
from moe_serve.dispatch.wire import Fp8Codec, Wire
from moe_serve.kernels.rows import weighted_sum

SMALL_BYTES = 1 << 16  # rows of one rank, one for each entry: below it, the latency of a round costs more
_ALIGNMENT = 16


@dataclass(frozen=True)
class CollectiveHandle:
    order: Tensor  # [N] flat index of each entry sent
    shape: tuple[int, int]  # T, K
    sent: "Sizes"
    received: "Sizes"
    to_arrival: Tensor  # [M] placed row of each entry that arrived
    rows: Tensor  # [N] row that each entry sent belongs to, over all ranks
    arrived_rows: Tensor  # [M] row of each entry that arrived
    arrived_weights: Tensor  # [M] float32 its weight, with rank_sum


@dataclass(frozen=True)
class Sizes:
    """The amounts that go to, or come from, each rank: host numbers."""

    entries: list[int]
    rows: list[int]

    def message_bytes(self, entry_bytes: int, row_bytes: int) -> list[int]:
        return [
            _aligned(entries * entry_bytes) + rows * row_bytes
            for entries, rows in zip(self.entries, self.rows, strict=True)
        ]


class CollectiveAllToAll(AllToAll[CollectiveHandle]):
    """AllToAll over a process group."""

    def __init__(
        self,
        group: EpGroup,
        slots_per_rank: int,
        wire: Wire,
        combine: Combine = "ordered",
        keep_fp8: bool = False,
    ):
        """keep_fp8: hand rows of an FP8 wire on as they are"""
        assert group.process_group is not None, "collective needs a process group"
        self._group = group.process_group
        self._rank = group.rank
        self._num_ranks = group.num_ranks
        self._slots_per_rank = slots_per_rank
        self._num_slots = group.num_ranks * slots_per_rank
        self._wire = wire
        self._kept = wire.dispatch if keep_fp8 and isinstance(wire.dispatch, Fp8Codec) else None
        self._rank_sum = combine == "rank_sum"
        self._entry_bytes = 8 if self._rank_sum else 4
        self.capabilities = replace(TRANSPORTS["collective"], bitwise=not self._rank_sum)

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        # As an all-to-all of equal rows, which takes gloo 0.4 to 0.7 of the time of an all-gather.
        return self._exchange(counts.expand(self._num_ranks, -1).contiguous())

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[CollectiveHandle]]:
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        (num_tokens, topk), width = physical_ids.shape, hidden.shape[1]
        order, per_rank = rank_order(physical_ids, self._num_slots, self._num_ranks)
        row_bytes = self._wire.dispatch.row_bytes(width)
        sizes: Pending[Tensor]
        if slot_counts is not None and not self._rank_sum and self._is_small(slot_counts, row_bytes):
            by_rank = slot_counts.view(self._num_ranks, self._num_ranks, -1).sum(2)
            entries, arriving = by_rank[self._rank].tolist(), by_rank[:, self._rank].tolist()
            order = order[: sum(entries)]
            begins = torch.ones_like(order, dtype=torch.bool)
            sent, sizes = Sizes(entries, entries), Ready(torch.tensor([arriving, arriving]).t())
        else:
            begins = row_begins(order, per_rank, topk)
            rows_before = torch.nn.functional.pad(begins.cumsum(0), (1, 0))
            ends = torch.nn.functional.pad(per_rank.cumsum(0), (1, 0))
            own = torch.stack([per_rank, rows_before[ends].diff()], dim=1)
            sizes = self._exchange(own)
            sent = self._on_host(own)
            order, begins = order[: sum(sent.entries)], begins[: sum(sent.entries)]
        sent_rows = begins.cumsum(0) - 1
        message = self._pack(hidden, physical_ids, order, sent_rows, begins, sent, weights)  # while sizes are exchanged
        received = self._on_host(sizes.wait())
        pending = self._send_bytes(
            message,
            sent.message_bytes(self._entry_bytes, row_bytes),
            received.message_bytes(self._entry_bytes, row_bytes),
        )

        def receive() -> Dispatched[CollectiveHandle]:
            entries, entry_weights, data = self._unpack(pending.wait(), received, row_bytes)
            slots = (entries & (FIRST - 1)).to(torch.int64)
            arrived_rows = (entries >= FIRST).cumsum(0) - 1
            to_placed, to_arrival = by_slot(slots)
            placed, scale = arrived_rows[to_placed], None
            if self._kept is not None:
                x, scale = self._kept.take(data, width, placed)
            else:
                x = self._wire.dispatch.decode(data, width).index_select(0, placed)
            handle = CollectiveHandle(
                order, (num_tokens, topk), sent, received, to_arrival, sent_rows, arrived_rows, entry_weights
            )
            return Dispatched(PackedRows(x, count_slots(slots[:, None], self._slots_per_rank), scale), handle)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: CollectiveHandle) -> Pending[Tensor]:
        if self._rank_sum:
            return self._combine_sums(expert_out, handle)
        data = self._wire.combine.encode(expert_out.index_select(0, handle.to_arrival))
        pending_rows = self._send(data, handle.received.entries, handle.sent.entries)
        num_tokens, topk = handle.shape
        index, complete = sent_index(handle.order, num_tokens, topk), handle.order.shape[0] == num_tokens * topk
        width = expert_out.shape[1]

        def receive() -> Tensor:
            rows = self._wire.combine.decode(pending_rows.wait(), width)
            return weighted_sum(rows, index, weights, complete)

        return Deferred(receive)

    def _combine_sums(self, expert_out: Tensor, handle: CollectiveHandle) -> Pending[Tensor]:
        num_tokens, topk = handle.shape
        num_rows = sum(handle.received.rows)
        index, scale = index_by_row(handle.arrived_rows, handle.to_arrival, handle.arrived_weights, num_rows, topk)
        sums = weighted_sum(expert_out, index, scale)
        pending_rows = self._send(self._wire.combine.encode(sums), handle.received.rows, handle.sent.rows)
        token_of_entry = handle.order.div(max(topk, 1), rounding_mode="floor")
        per_rank = rank_index(token_of_entry, handle.rows, handle.sent.entries, num_tokens)
        width = expert_out.shape[1]

        def receive() -> Tensor:
            return add_rank_sums(self._wire.combine.decode(pending_rows.wait(), width), per_rank)

        return Deferred(receive)

    def _is_small(self, slot_counts: Tensor, row_bytes: int) -> bool:
        """Returns whether a round of sizes would cost more than sending some rows twice; the same on all ranks."""
        return int(slot_counts.sum()) * row_bytes <= SMALL_BYTES * self._num_ranks

    def _pack(
        self,
        hidden: Tensor,
        physical_ids: Tensor,
        order: Tensor,
        sent_rows: Tensor,
        begins: Tensor,
        sent: Sizes,
        weights: Tensor | None,
    ) -> Tensor:
        """Returns the messages to all ranks, concatenated: [bytes] uint8."""
        topk = max(physical_ids.shape[1], 1)
        token_of_entry = order.div(topk, rounding_mode="floor")
        # Not by the mask `begins`, whose count the host would wait for; entries of a row name the same token.
        tokens = order.new_empty(sum(sent.rows)).scatter_(0, sent_rows, token_of_entry)
        row_bytes = self._wire.dispatch.row_bytes(hidden.shape[1])
        encoded = self._wire.dispatch.encode(hidden)  # each token once, also where several ranks need it
        slots = physical_ids.reshape(-1)[order] % self._slots_per_rank
        entries = (slots + begins.to(torch.int64) * FIRST).to(torch.int32)
        flat_weights = weights.reshape(-1)[order].to(torch.float32) if self._rank_sum and weights is not None else None
        message = hidden.new_empty(sum(sent.message_bytes(self._entry_bytes, row_bytes)), dtype=torch.uint8)
        at = first_entry = first_row = 0
        for num_entries, num_rows in zip(sent.entries, sent.rows, strict=True):
            heads = [entries] if flat_weights is None else [entries, flat_weights]
            for part, head in enumerate(heads):
                there = message[at + 4 * part * num_entries :][: 4 * num_entries]
                there.copy_(head[first_entry : first_entry + num_entries].view(torch.uint8))
            at += _aligned(num_entries * self._entry_bytes)
            rows = message[at : at + num_rows * row_bytes].view(num_rows, row_bytes)
            torch.index_select(encoded, 0, tokens[first_row : first_row + num_rows], out=rows)
            at += num_rows * row_bytes
            first_entry, first_row = first_entry + num_entries, first_row + num_rows
        return message

    def _unpack(self, message: Tensor, received: Sizes, row_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns entries [M] int32, their weights [M] float32 (none without rank_sum), rows [U, row_bytes] uint8."""
        entries, weights, rows = [], [], []
        at = 0
        for num_entries, num_rows in zip(received.entries, received.rows, strict=True):
            entries.append(message[at : at + 4 * num_entries])
            weights.append(message[at + 4 * num_entries : at + self._entry_bytes * num_entries])
            at += _aligned(num_entries * self._entry_bytes)
            rows.append(message[at : at + num_rows * row_bytes].view(num_rows, row_bytes))
            at += num_rows * row_bytes
        # torch.cat copies, so the bytes are aligned for their new type, which a piece of the message need not be.
        return torch.cat(entries).view(torch.int32), torch.cat(weights).view(torch.float32), torch.cat(rows)

    def _on_host(self, sizes: Tensor) -> Sizes:
        """Returns the amounts of each rank, [R, 2] entries and rows. Waits for the device."""
        return Sizes(*sizes.t().tolist())

    def _exchange(self, rows: Tensor) -> Pending[Tensor]:
        """Sends row r of rows [R, n] to rank r, and receives one row from each."""
        out = torch.empty_like(rows)
        return self._all_to_all("the round of sizes or counts", out, rows)

    def _send(self, data: Tensor, sent: list[int], received: list[int]) -> Pending[Tensor]:
        """Sends data [N, row_bytes], its first sent[0] rows to rank 0 and so on."""
        out = torch.empty(sum(received), data.shape[1], dtype=torch.uint8, device=data.device)
        return self._all_to_all("combine", out, data, received, sent)

    def _send_bytes(self, message: Tensor, sent: list[int], received: list[int]) -> Pending[Tensor]:
        out = message.new_empty(sum(received))
        return self._all_to_all("dispatch", out, message, received, sent)

    def _all_to_all(
        self, phase: str, out: Tensor, data: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Pending[Tensor]:
        try:
            work = dist.all_to_all_single(out, data, received, sent, group=self._group, async_op=True)
        except RuntimeError as error:
            raise lost_connection(error, phase) from error
        return _Receive(work, out, data, phase)


class _Receive:
    """The receive half of one all-to-all. Holds the bytes that are sent until it is done."""

    def __init__(self, work: dist.Work, out: Tensor, sent: Tensor, phase: str):
        self._work: dist.Work | None = work
        self._out, self._phase = out, phase
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise lost_connection(error, self._phase) from error
            self._work = self._sent = None
        return self._out


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
