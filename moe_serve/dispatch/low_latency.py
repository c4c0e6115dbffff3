"""The transport over symmetric memory of one host: one-sided writes into the peers' regions, and flags behind them.

    dispatch send     plan, write rows into the own lane of each peer's region, raise its flag
    dispatch receive  wait for the flags of all ranks, put rows in the placed layout
    combine send      write results into the own lane of each peer's region, raise its flag
    combine receive   wait for the flags, add weighted in top-k order

Why it is right. Data are written first and the flag second, an aligned 8-byte store, and x86-64 makes stores visible in
program order (also after a string copy, and the C helper fences its streaming stores); so whoever sees the flag sees
the data. A flag holds the stamp of its call, never a yes or no: nobody clears it, and a flag from a voided epoch cannot
be taken for one of this. A lane has two buffers, so two handles may be in flight; before call n writes, the peer must
have said that it has read call n - 2.

Why it cannot deadlock. A send of call n waits for reads of call n - 2, a receive of call n for sends of call n: every
wait is for something earlier in the one order of calls that all ranks share. A peer that does not come is met by the
deadline. docs/communication.md tells this at length.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, Deferred, Dispatched, EpGroup, PackedRows, Pending
from moe_serve.dispatch.channel import Channel, Peers, check_epoch
from moe_serve.dispatch.flag_wait import FlagWait
from moe_serve.dispatch.inbox import (
    COUNTS,
    COUNTS_READ,
    HOME,
    HOME_READ,
    ROWS,
    ROWS_READ,
    InboxShape,
    Int32Array,
    Int64Array,
    Lane,
    all_flags,
)
from moe_serve.dispatch.row_moves import PlainMoves, RowMoves
from moe_serve.dispatch.send_plan import SendPlan, starts
from moe_serve.dispatch.symmetric import SymmetricMemory
from moe_serve.dispatch.symmetric_shm import share_regions
from moe_serve.dispatch.wire import Wire
from moe_serve.errors import CapacityError, ConfigError, PeerError

MIN_COUNTS = 4096  # numbers that one exchange of counts can carry at least: 32 KiB


@dataclass(frozen=True)
class _Handle:
    plan: SendPlan
    first: list[int]  # [R + 1] where the entries of each source begin, in arrival order
    placed: Int64Array  # [M] placed row of each arriving entry


class LowLatencyAllToAll:
    """AllToAll among the ranks of one host, on CPU tensors.

    Rows that `dispatch` gives are valid until the receive of the call after the next one. What is given to `dispatch`
    and `combine` must not change before the result was waited for: own rows are read where they lie.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        shape: InboxShape,
        hidden: int,
        dtype: torch.dtype,
        wire: Wire,
        moves: RowMoves,
        deadline_s: float,
    ):
        """hidden, dtype: of the rows;  shape: of the regions in memory, sized for this wire"""
        self._memory = memory
        self._rank, self._num_ranks = memory.rank, memory.num_ranks
        self._shape, self._hidden, self._dtype = shape, hidden, dtype
        self._wire, self._moves = wire, moves
        self._inbox = [Lane(memory.region(self._rank), shape, source) for source in range(self._num_ranks)]
        self._peers = Peers(
            rank=self._rank,
            others=[rank for rank in range(self._num_ranks) if rank != self._rank],
            epoch=0,
            lanes=[Lane(memory.region(rank), shape, self._rank) for rank in range(self._num_ranks)],
            flags=all_flags(memory.region(self._rank), shape),
            wait=FlagWait(self._num_ranks, deadline_s, self._check_peers),
        )
        for lane in self._peers.lanes:
            lane.set_canaries()
        self._counts = Channel(self._peers, "counts", COUNTS, COUNTS_READ)
        self._rows = Channel(self._peers, "dispatch", ROWS, ROWS_READ)
        self._home = Channel(self._peers, "combine", HOME, HOME_READ)
        self._arrived = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        num_counts = counts.shape[0]
        if num_counts > self._shape.max_counts:
            raise CapacityError(f"{num_counts} counts in one exchange, room for {self._shape.max_counts}")
        gathered = torch.zeros(self._num_ranks, num_counts, dtype=torch.int64)
        rows = gathered.numpy()
        rows[self._rank] = counts.numpy()
        call, epoch = self._counts.begin(), self._peers.epoch
        for peer in self._peers.others:
            self._peers.lanes[peer].counts[call % 2][:num_counts] = rows[self._rank]
        self._counts.announce(call)

        def receive() -> Tensor:
            check_epoch(self._peers, epoch, "counts receive")
            self._counts.arrive(call)
            for peer in self._peers.others:
                rows[peer] = self._inbox[peer].counts[call % 2][:num_counts]
            self._counts.finish(call)
            return gathered

        return Deferred(receive)

    def dispatch(self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None) -> Pending[Dispatched]:
        self._check(hidden, physical_ids)
        plan = self._moves.plan(physical_ids.numpy(), self._num_ranks, self._shape.slots_per_rank)
        self._check_members(plan)
        data = self._wire.dispatch.encode(hidden)
        call, epoch = self._rows.begin(), self._peers.epoch
        for peer in self._peers.others:
            self._push_rows(peer, call % 2, plan, data)
        self._rows.announce(call)

        def receive() -> Dispatched:
            check_epoch(self._peers, epoch, "dispatch receive")
            self._rows.arrive(call)
            arrived = self._place_rows(call % 2, plan, data)
            self._rows.finish(call)
            return arrived

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        assert isinstance(handle, _Handle), "the handle belongs to another transport"
        data = self._wire.combine.encode(expert_out)
        call, epoch = self._home.begin(), self._peers.epoch
        first = handle.first
        for peer in self._peers.others:
            results = handle.placed[first[peer] : first[peer + 1]]
            self._moves.take(data, results, self._peers.lanes[peer].home[call % 2])
        self._home.announce(call)

        def receive() -> Tensor:
            check_epoch(self._peers, epoch, "combine receive")
            self._home.arrive(call)
            combined = self._add_results(call % 2, handle, data, weights)
            self._home.finish(call)
            return combined

        return Deferred(receive)

    def _push_rows(self, peer: int, buffer: int, plan: SendPlan, data: Tensor) -> None:
        """Writes rows, and which of them each slot gets, into the own lane of a peer."""
        lane, slots = self._peers.lanes[peer], self._shape.slots_per_rank
        tokens = plan.tokens[plan.first_token[peer] : plan.first_token[peer + 1]]
        first, end = plan.first_entry[peer], plan.first_entry[peer + 1]
        lane.head[buffer][:slots] = plan.counts[peer * slots : (peer + 1) * slots]
        lane.head[buffer][slots] = tokens.shape[0]
        lane.entries[buffer][: end - first] = plan.row[first:end]
        self._moves.take(data, tokens, lane.rows[buffer])

    def _place_rows(self, buffer: int, plan: SendPlan, data: Tensor) -> Dispatched:
        """Decodes what has arrived and puts a row for each entry in the placed layout."""
        slots, codec = self._shape.slots_per_rank, self._wire.dispatch
        counts = np.zeros((self._num_ranks, slots), dtype=np.int64)
        pieces = [data[:0]] * self._num_ranks
        for peer in self._peers.others:
            head = self._inbox[peer].head[buffer]
            counts[peer] = head[:slots]
            pieces[peer] = self._inbox[peer].rows[buffer][: head[slots]]
        counts[self._rank] = plan.counts[self._rank * slots : (self._rank + 1) * slots]
        pieces[self._rank] = data
        first = starts(counts.sum(1))
        which: list[Int64Array | Int32Array] = [
            self._inbox[source].entries[buffer][: first[source + 1] - first[source]]
            for source in range(self._num_ranks)
        ]
        own_tokens = plan.tokens[plan.first_token[self._rank] : plan.first_token[self._rank + 1]]
        which[self._rank] = own_tokens[plan.row[plan.first_entry[self._rank] : plan.first_entry[self._rank + 1]]]
        placed = self._moves.placed_rows(counts)
        x = self._arrival_buffer(buffer, first[-1])
        decoded = [_bytes(codec.decode(piece, self._hidden)) for piece in pieces]
        self._moves.place(decoded, which, placed, x.view(torch.uint8))
        rows = PackedRows(x, torch.from_numpy(counts.sum(0)))
        return Dispatched(rows, _Handle(plan, first, placed))

    def _add_results(self, buffer: int, handle: _Handle, data: Tensor, weights: Tensor) -> Tensor:
        plan, codec = handle.plan, self._wire.combine
        pieces = []
        which: list[Int64Array | None] = [None] * self._num_ranks
        for source in range(self._num_ranks):
            num_rows = plan.first_entry[source + 1] - plan.first_entry[source]
            pieces.append(self._inbox[source].home[buffer][:num_rows])
        # Own results stay where the experts left them.
        pieces[self._rank] = data
        which[self._rank] = handle.placed[handle.first[self._rank] : handle.first[self._rank + 1]]
        decoded = [codec.decode(piece, self._hidden) for piece in pieces]
        return self._moves.weighted_sum(decoded, which, plan.first_entry, plan.home, weights)

    def _arrival_buffer(self, buffer: int, num_rows: int) -> Tensor:
        """Returns room for rows: [num_rows, H]. Kept, since fresh pages cost as much as the copy into them."""
        num_bytes = num_rows * self._hidden * self._dtype.itemsize
        if self._arrived[buffer].shape[0] < num_bytes:
            self._arrived[buffer] = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
        return self._arrived[buffer][:num_bytes].view(self._dtype).view(num_rows, self._hidden)

    def _check(self, hidden: Tensor, physical_ids: Tensor) -> None:
        shape = self._shape
        if hidden.shape[0] > shape.max_tokens:
            raise CapacityError(
                f"{hidden.shape[0]} tokens in one dispatch, room for {shape.max_tokens}; raise "
                "dispatch.max_tokens_per_rank, or run the step in chunks of it"
            )
        if physical_ids.shape[1] > shape.topk or hidden.shape[1] != self._hidden:
            raise CapacityError(
                f"rows of {hidden.shape[1]} channels to {physical_ids.shape[1]} experts, buffers are made for "
                f"{self._hidden} channels and {shape.topk} experts; build the transport for this model"
            )

    def _check_members(self, plan: SendPlan) -> None:
        if len(self._peers.others) + 1 == self._num_ranks:
            return
        first = plan.first_entry
        named = [rank for rank in range(self._num_ranks) if first[rank + 1] > first[rank]]
        lost = [rank for rank in named if rank != self._rank and rank not in self._peers.others]
        if lost:
            raise PeerError(
                f"tokens are sent to experts of rank {lost[0]}, which is masked; use a placement without it",
                lost[0],
                "dispatch send",
                self._peers.epoch,
            )

    def _check_peers(self, missing: list[int], phase: str, sequence: int) -> None:
        for rank in missing:
            if not self._memory.lives(rank):
                raise PeerError(f"rank {rank} died before {phase} {sequence}", rank, phase, sequence)


def _bytes(rows: Tensor) -> Tensor:
    """Returns contiguous rows as bytes, a view: [n, width x itemsize] uint8."""
    return (
        rows.view(torch.uint8)
        if rows.stride(1) == 1
        else rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
    )


def inbox_shape(num_ranks: int, limits: BufferLimits, wire: Wire) -> InboxShape:
    """Returns how the regions are divided for these limits."""
    return InboxShape(
        num_ranks=num_ranks,
        slots_per_rank=limits.slots_per_rank,
        topk=limits.topk,
        max_tokens=limits.max_tokens_per_rank,
        row_bytes=wire.dispatch.row_bytes(limits.hidden),
        home_row_bytes=wire.combine.row_bytes(limits.hidden),
        max_counts=max(MIN_COUNTS, num_ranks * limits.slots_per_rank),
    )


def make_low_latency(
    group: EpGroup, limits: BufferLimits, dtype: torch.dtype, wire: Wire, deadline_s: float
) -> LowLatencyAllToAll:
    """Maps the regions of a group and returns this rank's end; a collective call.

    Raises ConfigError off the CPU, off x86-64 and on several hosts, CapacityError when shared memory is too small.
    """
    if group.device.type != "cpu":
        raise ConfigError(
            f"dispatch.backend low_latency carries rows of CPU ranks and this rank computes on {group.device}; "
            "set dispatch.backend: collective"
        )
    assert group.process_group is not None, "low_latency maps memory over a process group"
    shape = inbox_shape(group.num_ranks, limits, wire)
    memory = share_regions(group.process_group, shape.num_bytes)
    transport = LowLatencyAllToAll(memory, shape, limits.hidden, dtype, wire, PlainMoves(), deadline_s)
    dist.barrier(group=group.process_group)  # canaries and first flags are in place
    return transport
