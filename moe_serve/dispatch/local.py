"""The transport without a network: one rank, or several virtual ranks (threads) of one process.

LocalAllToAll is the plainest one, and the reference of the others: virtual ranks exchange encoded rows through
mailboxes, and a rank slices out its pieces, in the order that the layout defines. OneRank is the compiled form for one,
OneGpu that for one GPU.
"""

import threading
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Deferred, Dispatched, PackedRows, Pending, Ready
from moe_serve.dispatch.capabilities import TRANSPORTS, Combine
from moe_serve.dispatch.layout import count_slots, send_order, sent_index
from moe_serve.dispatch.rank_sum import add_rank_sums
from moe_serve.dispatch.wire import Wire
from moe_serve.errors import PeerError
from moe_serve.kernels.cpu.rows import pack_rows
from moe_serve.kernels.cpu.rows import weighted_sum as compiled_sum
from moe_serve.kernels.rows import pack_all_rows, weighted_sum

V = TypeVar("V")


class LocalFabric:
    """The mailboxes between the virtual ranks of one process."""

    def __init__(self, num_ranks: int, deadline_s: float = 60.0):
        self.num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._posts: dict[int, dict[int, object]] = {}  # by sequence number, then rank
        self._collected: dict[int, int] = {}

    def post(self, rank: int, sequence: int, value: object) -> None:
        """Leaves what this rank sends in call number `sequence`; every rank makes the same calls."""
        with self._condition:
            self._posts.setdefault(sequence, {})[rank] = value
            self._condition.notify_all()

    def collect(self, rank: int, sequence: int) -> list[object]:
        """Returns what all ranks sent, in rank order, once it is here. Raises PeerError after the deadline."""
        with self._condition:
            posts = self._posts.setdefault(sequence, {})
            if not self._condition.wait_for(lambda: len(posts) == self.num_ranks, self._deadline_s):
                late = min(set(range(self.num_ranks)) - posts.keys())
                raise PeerError(f"virtual rank {late} sent nothing in call {sequence}", late, "receive", sequence)
            values = [posts[r] for r in range(self.num_ranks)]
            self._collected[sequence] = self._collected.get(sequence, 0) + 1
            if self._collected[sequence] == self.num_ranks:
                del self._posts[sequence], self._collected[sequence]
            return values


@dataclass(frozen=True)
class _Sent:
    """The message that one rank posts in a dispatch, or posts back in a combine."""

    data: Tensor  # [rows, row_bytes] uint8
    counts: Tensor  # dispatch: [P] rows for each slot; combine: [S, R] rows from each slot to each rank


@dataclass(frozen=True)
class LocalHandle:
    hidden: int
    index: Tensor  # [T, K] which sent row each entry became, -1 = none
    complete: bool  # no entry is -1
    ranks: Tensor  # [T, K] rank of each entry, -1 = none
    received: Tensor  # [R, S] rows that came from each rank for each slot here


class LocalAllToAll(AllToAll[LocalHandle]):
    """AllToAll over one rank, or over one of the virtual ranks of a fabric."""

    def __init__(
        self,
        slots_per_rank: int,
        wire: Wire,
        rank: int = 0,
        fabric: LocalFabric | None = None,
        combine: Combine = "ordered",
    ):
        self._fabric = fabric or LocalFabric(1)
        self._rank = rank
        self._num_ranks = self._fabric.num_ranks
        self._slots_per_rank = slots_per_rank
        self._num_slots = self._num_ranks * slots_per_rank
        self._wire = wire
        self._rank_sum = combine == "rank_sum"
        self.capabilities = replace(TRANSPORTS["local"], bitwise=not self._rank_sum)
        self._sequence = 0

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        if self._num_ranks == 1:
            return Ready(counts[None])
        call = self._post(counts)
        return Deferred(lambda: torch.stack(self._collect(call, Tensor)))

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[LocalHandle]]:
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        num_tokens, topk = physical_ids.shape
        # From the ids, not from slot_counts: the reference must notice when the two differ.
        counts = count_slots(physical_ids, self._num_slots)
        num_rows = int(counts.sum())
        order = send_order(physical_ids, self._num_slots, num_rows)
        rows = hidden.index_select(0, order.div(topk, rounding_mode="floor"))
        index, complete = sent_index(order, num_tokens, topk), num_rows == num_tokens * topk
        ranks = physical_ids.div(self._slots_per_rank, rounding_mode="floor")
        data = self._wire.dispatch.encode(rows)
        if self._num_ranks == 1:
            received = self._wire.dispatch.decode(data, hidden.shape[1])
            return Ready(
                Dispatched(
                    PackedRows(received, counts.cpu()),
                    LocalHandle(hidden.shape[1], index, complete, ranks, counts[None]),
                )
            )
        call = self._post(_Sent(data, counts))

        def receive() -> Dispatched[LocalHandle]:
            sent = self._collect(call, _Sent)
            if slot_counts is not None:
                counted = torch.stack([s.counts for s in sent])
                assert torch.equal(slot_counts, counted), "slot_counts differ from the ids"
            here = range(self._rank * self._slots_per_rank, (self._rank + 1) * self._slots_per_rank)
            pieces = [torch.split(s.data, s.counts.tolist()) for s in sent]
            data = torch.cat([pieces[source][slot] for slot in here for source in range(self._num_ranks)])
            received = torch.stack([s.counts[here.start : here.stop] for s in sent])
            placed = PackedRows(self._wire.dispatch.decode(data, hidden.shape[1]), received.sum(dim=0).cpu())
            return Dispatched(placed, LocalHandle(hidden.shape[1], index, complete, ranks, received))

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: LocalHandle) -> Pending[Tensor]:
        # Sums are made by the receiver, of the numbers that each rank would have summed: the plainest form.
        data = expert_out if self._rank_sum else self._wire.combine.encode(expert_out)
        if self._num_ranks == 1:
            return Ready(self._add(data, weights, handle))
        call = self._post(_Sent(data, handle.received.t().contiguous()))

        def receive() -> Tensor:
            returned = self._collect(call, _Sent)
            pieces = [iter(torch.split(r.data, r.counts.reshape(-1).tolist())) for r in returned]
            by_source = [[next(piece) for _ in range(self._slots_per_rank * self._num_ranks)] for piece in pieces]
            mine = [by_rank[self._rank :: self._num_ranks] for by_rank in by_source]  # slots of each rank, in order
            return self._add(torch.cat([piece for by_slot in mine for piece in by_slot]), weights, handle)

        return Deferred(receive)

    def _add(self, data: Tensor, weights: Tensor, handle: LocalHandle) -> Tensor:
        """Returns the sum of each token's results. data: one row for each entry, in the order of sending"""
        if not self._rank_sum:
            return weighted_sum(self._wire.combine.decode(data, handle.hidden), handle.index, weights, handle.complete)
        sums, index = [], []
        num_tokens, codec = handle.index.shape[0], self._wire.combine
        for rank in range(self._num_ranks):
            here = torch.where(handle.ranks == rank, handle.index, -1)
            sums.append(codec.decode(codec.encode(weighted_sum(data, here, weights)), data.shape[1]))
            rows = rank * num_tokens + torch.arange(num_tokens, device=data.device)
            index.append(torch.where((here >= 0).any(1), rows, -1))
        return add_rank_sums(torch.cat(sums), torch.stack(index, dim=1))

    def _post(self, value: object) -> int:
        self._sequence += 1
        self._fabric.post(self._rank, self._sequence, value)
        return self._sequence

    def _collect(self, sequence: int, kind: type[V]) -> list[V]:
        values = self._fabric.collect(self._rank, sequence)
        assert all(isinstance(value, kind) for value in values), "virtual ranks make different calls"
        return values  # type: ignore[return-value]


@dataclass(frozen=True)
class OneRankHandle:
    index: Tensor  # [T, K] which packed row each entry became, -1 = none
    hidden: int


class OneRank(AllToAll[OneRankHandle]):
    """AllToAll over one rank by the compiled CPU kernels, which sort float32 rows by slot and add them up at the end.

    The same rows, in the same order and with the same bits, as LocalAllToAll.
    """

    def __init__(self, num_slots: int, wire: Wire):
        self._num_slots = num_slots
        self._wire = wire
        keeps_rows = wire.dispatch.is_identity and wire.combine.is_identity
        self.capabilities = replace(TRANSPORTS["local"], keeps_rows=keeps_rows)

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
        return Ready(compiled_sum(expert_out, handle.index, weights))


class OneGpu(AllToAll[OneRankHandle]):
    """AllToAll over one GPU: rows are sorted by slot in two launches whose sizes no id changes, and added up in one.

    The host reads nothing, so a step can be captured. Rows come in the order of LocalAllToAll, with the same bits.
    """

    def __init__(self, num_slots: int, wire: Wire, fp8_rows: bool = False):
        """fp8_rows: hand rows on in e4m3 with scales, quantised as they are sorted, whatever the wire"""
        self._num_slots = num_slots
        self._wire = wire
        self._fp8_rows = fp8_rows
        self.capabilities = TRANSPORTS["local"]

    @property
    def captures(self) -> bool:
        return True

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return Ready(counts[None])

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[OneRankHandle]]:
        codec = self._wire.dispatch
        if not self._fp8_rows and not codec.is_identity:
            hidden = codec.decode(codec.encode(hidden), hidden.shape[1])
        rows, scale, counts, index = pack_all_rows(hidden, physical_ids, self._num_slots, self._fp8_rows)
        return Ready(Dispatched(PackedRows(rows, counts, scale), OneRankHandle(index, hidden.shape[1])))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: OneRankHandle) -> Pending[Tensor]:
        codec = self._wire.combine
        if not codec.is_identity:
            expert_out = codec.decode(codec.encode(expert_out), handle.hidden)
        return Ready(weighted_sum(expert_out, handle.index, weights))
