"""The transport over symmetric memory of one host: one-sided writes into the peers' regions, and flags behind them.

    dispatch send     plan, write rows into the own lane of each peer's region, raise its flag
    dispatch receive  wait for the flags of all ranks, put rows in the placed layout
    combine send      see that results are in the own outbox, tell each peer where, raise its flag
    combine receive   wait for the flags, fetch results from the peers' outboxes, adding them weighted in top-k order

Why it is right. Data are written first and the flag second, an aligned 8-byte store, and x86-64 makes stores visible in
program order (also after a string copy, and the C helper fences its streaming stores); so whoever sees the flag sees
the data. A flag holds the stamp of its call, never a yes or no: nobody clears it, and a flag from a voided epoch cannot
be taken for one of this. Lanes and outboxes have two buffers, so two calls of a kind may be in flight; before call n
writes, the peers must have said that they have read call n - 2. A rank that was given up while it fetched results may
have read what was written later: so it looks, after it has read, whether its epoch still stands.

Why it cannot deadlock. A send of call n waits for reads of call n - 2, a receive of call n for sends of call n: every
wait is for something earlier in the one order of calls that all ranks share. A peer that does not come is met by the
deadline. docs/communication.md tells this at length.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import (
    BufferLimits,
    Combine,
    Deferred,
    Dispatched,
    EpGroup,
    MaskedRows,
    PackedRows,
    Pending,
)
from moe_serve.dispatch.shm.channel import Channel, Peers, check_epoch
from moe_serve.dispatch.shm.flag_wait import FlagWait
from moe_serve.dispatch.shm.membership import Membership
from moe_serve.dispatch.shm.memory import ShmMemory, share_regions
from moe_serve.dispatch.shm.region import (
    COUNTS,
    COUNTS_READ,
    HOME,
    HOME_READ,
    ROWS,
    ROWS_READ,
    Lane,
    Outbox,
    RegionShape,
    all_flags,
)
from moe_serve.dispatch.shm.result_buffers import ResultBuffers
from moe_serve.dispatch.shm.row_copy import Lanes, LaneWork, Placed, Room, Rooms
from moe_serve.dispatch.shm.row_copy_native import native_lane_work
from moe_serve.dispatch.shm.row_copy_plain import PlainLaneWork
from moe_serve.dispatch.shm.sizes import most_tokens, region_shape
from moe_serve.dispatch.wire import Codec, Wire
from moe_serve.errors import CapacityError, ConfigError, PeerError


@dataclass(frozen=True, eq=False)
class _Handle:
    """room: where the rows lie"""

    placed: Placed
    room: Room
    epoch: int


class ShmAllToAll:
    """AllToAll among the ranks of one host, on CPU tensors.

    Rows that `dispatch` gives are valid until their combine was waited for, or until the receive of the second dispatch
    after theirs. What is given to `dispatch` and `combine` must not change before the result was waited for: own rows
    are read where they lie. After a PeerError every rank that is left calls `membership.regroup`, and runs the step
    again.
    """

    def __init__(
        self,
        memory: ShmMemory,
        shape: RegionShape,
        hidden: int,
        dtype: torch.dtype,
        wire: Wire,
        deadline_s: float,
        compiled: bool = True,
        masked: bool = False,
        combine: Combine = "ordered",
    ):
        """hidden, dtype: of the rows;  shape: of the regions in memory, sized for this wire

        compiled: do the copying and adding in C where a compiler can be found; the bits are the same
        masked:   give rows as MaskedRows, slabs of num_ranks x max_tokens rows
        combine:  see base.py
        """
        self._memory = memory
        self._rank, self._num_ranks = memory.rank, memory.num_ranks
        self._shape, self._hidden, self._dtype = shape, hidden, dtype
        self._wire = wire
        self._slab_rows = self._num_ranks * shape.max_tokens if masked else 0
        self._inbox = [Lane(memory.region(self._rank), shape, source) for source in range(self._num_ranks)]
        self.membership = Membership(memory, deadline_s)
        self._peers = Peers(
            rank=self._rank,
            others=[rank for rank in range(self._num_ranks) if rank != self._rank],
            epoch=0,
            lanes=[Lane(memory.region(rank), shape, self._rank) for rank in range(self._num_ranks)],
            flags=all_flags(memory.region(self._rank), shape),
            wait=FlagWait(self._num_ranks, deadline_s, self.membership.check),
        )
        self.membership.peers = self._peers
        outboxes = [Outbox(memory.region(rank), shape) for rank in range(self._num_ranks)]
        for lane in self._peers.lanes:
            lane.set_canaries()
        outboxes[self._rank].set_canaries()
        lanes = Lanes(
            self._rank, shape, hidden, dtype, wire, self._peers.lanes, self._inbox, outboxes, self._slab_rows,
            combine == "rank_sum",
        )  # fmt: skip
        native, how = native_lane_work(lanes) if compiled else (None, "dispatch.compiled is off")
        self.note = f"rows are moved by a C helper ({how})" if native else f"rows are moved by numpy: {how}"
        self.is_bitwise = combine == "ordered"
        self._rank_sum = combine == "rank_sum"
        self._work: LaneWork = native or PlainLaneWork(lanes)
        self._rooms = Rooms(lanes)
        self._counts = Channel(self._peers, "counts", COUNTS, COUNTS_READ)
        self._rows = Channel(self._peers, "dispatch", ROWS, ROWS_READ)
        self._home = Channel(self._peers, "combine", HOME, HOME_READ)
        self._offers: ResultBuffers | None = None
        if wire.combine.is_identity and self._work.writes_in_place and not (masked or self._rank_sum):
            self._offers = ResultBuffers(outboxes[self._rank], self._home, dtype)

    @property
    def waited_s(self) -> list[float]:
        """Seconds that this rank has waited for each other one: its row of the wait matrix."""
        return list(self._peers.wait.waited_s)

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

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched]:
        self._check(hidden, physical_ids)
        self._check_members(physical_ids)
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        own = self._encode(self._wire.dispatch, hidden)
        call = self._rows.begin()
        call_weights = weights if self._rank_sum else None
        sent = self._work.send_rows(physical_ids, own, call_weights, call % 2, self._peers.others)
        self._rows.announce(call)
        epoch = self._peers.epoch

        def receive() -> Dispatched:
            check_epoch(self._peers, epoch, "dispatch receive")
            self._rows.arrive(call)
            room = self._rooms.take()
            placed = self._work.place_rows(sent, own, self._rooms.rows(room), call % 2, self._peers.others)
            self._rows.finish(call)
            return self._dispatched(placed, room, epoch)

        return Deferred(receive)

    def _dispatched(self, placed: Placed, room: Room, epoch: int) -> Dispatched:
        handle = _Handle(placed, room, epoch)
        if self._slab_rows:
            slabs = placed.x.view(-1, self._slab_rows, self._hidden)
            return Dispatched(MaskedRows(slabs, placed.rows_per_slot), handle)
        x = placed.x
        out = None if self._offers is None else self._offers.offer(handle, x.shape[0], epoch)
        return Dispatched(PackedRows(x, placed.rows_per_slot), handle, out)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        trip = cast(_Handle, handle)
        check_epoch(self._peers, trip.epoch, "combine send")
        results = expert_out.reshape(-1, self._hidden) if self._slab_rows else expert_out
        placed = trip.placed.x
        assert (results.shape, results.dtype) == (placed.shape, placed.dtype), "results are like the rows that came"
        results = results.contiguous()
        call, epoch = self._home.begin(), self._peers.epoch
        if self._offers is not None:
            results = self._offers.settle(trip, results, call % 2)
        own = self._work.send_results(trip.placed, results, call % 2, self._peers.others)
        self._home.announce(call)

        def receive() -> Tensor:
            check_epoch(self._peers, epoch, "combine receive")
            self._home.arrive(call)
            combined = self._work.add_results(trip.placed, own, weights, call % 2, self._peers.others)
            self.membership.check_epoch_stands("combine receive", call)
            self._home.finish(call)
            self._rooms.leave(trip.room)
            return combined

        return Deferred(receive)

    def _encode(self, codec: Codec, rows: Tensor) -> Tensor:
        return rows.contiguous() if codec.is_identity else codec.encode(rows)

    def _check(self, hidden: Tensor, physical_ids: Tensor) -> None:
        shape = self._shape
        # C knows addresses only.
        assert (hidden.dtype, physical_ids.dtype) == (self._dtype, torch.int64), "rows or ids of another dtype"
        assert hidden.shape[0] == physical_ids.shape[0], "ids are one row for each token"
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

    def _check_members(self, physical_ids: Tensor) -> None:
        """Refuses tokens for ranks that take no part."""
        if len(self._peers.others) + 1 == self._num_ranks:
            return
        named = physical_ids.div(self._shape.slots_per_rank, rounding_mode="floor")
        masked = set(range(self._num_ranks)) - {self._rank, *self._peers.others}
        lost = [rank for rank in sorted(masked) if bool((named == rank).any())]
        if lost:
            raise PeerError(
                f"tokens are sent to experts of rank {lost[0]}, which is masked; use a placement without it",
                lost[0],
                "dispatch send",
                self._peers.epoch,
            )


def make_shm(
    group: EpGroup,
    limits: BufferLimits,
    dtype: torch.dtype,
    wire: Wire,
    deadline_s: float,
    compiled: bool = True,
    masked: bool = False,
    combine: Combine = "ordered",
) -> ShmAllToAll:
    """Maps the regions of a group and returns this rank's end; a collective call.

    Raises ConfigError off the CPU, off x86-64 and on several hosts, CapacityError when shared memory is too small.
    """
    if group.device.type != "cpu":
        raise ConfigError(
            f"dispatch.backend low_latency carries rows of CPU ranks and this rank computes on {group.device}; "
            "set dispatch.backend: collective"
        )
    assert group.process_group is not None, "low_latency maps memory over a process group"
    shape = region_shape(group.num_ranks, limits, wire)

    def advise(free_bytes: int) -> str:
        return f" to {most_tokens(group.num_ranks, limits, wire, free_bytes)}"

    memory = share_regions(group.process_group, shape.num_bytes, advise)
    transport = ShmAllToAll(memory, shape, limits.hidden, dtype, wire, deadline_s, compiled, masked, combine)
    dist.barrier(group=group.process_group)  # canaries and first flags are in place
    return transport
