"""The transport over symmetric memory of one host: one-sided writes into the peers' regions, and flags behind them.

    dispatch send     plan, write rows into the own lane of each peer's region, raise its flag
    dispatch receive  wait for the flags of all ranks, put rows in the placed layout
    combine send      see that results are in the own outbox, tell each peer where, raise its flag
    combine receive   wait for the flags, fetch results from the peers' outboxes, adding them weighted in top-k order

Why it is right. Data are written first and the flag second, an aligned 8-byte store, and x86-64 makes stores visible in
program order (also after a string copy, and the C helper fences its streaming stores); so whoever sees the flag sees
the data. A flag holds the stamp of its call, never a yes or no: nobody clears it, and a flag from a voided epoch cannot
be taken for one of this. Lanes and outboxes have two buffers, so two handles may be in flight; before call n writes,
the peers must have said that they have read call n - 2. A rank that was given up while it fetched results may have read
what was written later: so it looks, after it has read, whether its epoch still stands.

Why it cannot deadlock. A send of call n waits for reads of call n - 2, a receive of call n for sends of call n: every
wait is for something earlier in the one order of calls that all ranks share. A peer that does not come is met by the
deadline. docs/communication.md tells this at length.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
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
from moe_serve.dispatch.buffers import inbox_shape, most_tokens
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
    Int64Array,
    Lane,
    Outbox,
    all_flags,
)
from moe_serve.dispatch.lane_work import Lanes, LaneWork, Placed, PlainLaneWork, Room, Rooms, rows_needed
from moe_serve.dispatch.lane_work_native import native_lane_work
from moe_serve.dispatch.membership import Membership
from moe_serve.dispatch.symmetric import SymmetricMemory
from moe_serve.dispatch.symmetric_shm import share_regions
from moe_serve.dispatch.wire import Codec, Wire
from moe_serve.errors import CapacityError, ConfigError, PeerError

SLOT_GROUPS = 8  # in so many steps slots are told by `by_slot`
BySlot = tuple[Dispatched, Iterator[Sequence[int]]]


@dataclass(frozen=True, eq=False)
class _Handle:
    """room: where the rows lie"""

    placed: Placed
    room: Room
    epoch: int


class _ArrivingRows:
    """A dispatch on its way, to be had whole or slot by slot."""

    def __init__(
        self, whole: Callable[[], Dispatched], by_slot: Callable[[], tuple[Dispatched, Iterator[Sequence[int]]]]
    ):
        self._whole, self._by_slot = whole, by_slot
        self._arrived: Dispatched | None = None
        self._slots: Iterator[Sequence[int]] = iter(())
        self._failed: Exception | None = None

    def by_slot(self) -> BySlot:
        if self._arrived is None:
            self._arrived, slots = self._by_slot()
            self._slots = self._draw(slots)
        return self._arrived, self._slots

    def _draw(self, slots: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        try:
            yield from slots
        except Exception as error:
            self._failed = error
            raise

    def wait(self) -> Dispatched:
        if self._arrived is None:
            self._arrived = self._whole()
        for _ in self._slots:
            pass
        if self._failed is not None:  # some slots never came
            raise self._failed
        return self._arrived


def _in_order_of_need(needed: Int64Array) -> list[Int64Array]:
    """Returns slots in a few groups, those first that wait for the fewest rows. needed: [R, S]"""
    order = np.argsort(needed.max(axis=0), kind="stable")
    return np.array_split(order, min(SLOT_GROUPS, len(order)))


class LowLatencyAllToAll:
    """AllToAll among the ranks of one host, on CPU tensors.

    Rows that `dispatch` gives are valid until their combine was waited for, or until the receive of the second dispatch
    after theirs. What is given to `dispatch`
    and `combine` must not change before the result was waited for: own rows are read where they lie. After a PeerError
    every rank that is left calls `membership.regroup`, and runs the step again.
    """

    is_bitwise = True

    def __init__(
        self,
        memory: SymmetricMemory,
        shape: InboxShape,
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
        self._shape, self._hidden = shape, hidden
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
        self._outbox = outboxes[self._rank]
        for lane in self._peers.lanes:
            lane.set_canaries()
        self._outbox.set_canaries()
        lanes = Lanes(
            self._rank, shape, hidden, dtype, wire, self._peers.lanes, self._inbox, outboxes, self._slab_rows,
            combine == "rank_sum",
        )  # fmt: skip
        self._lanes = lanes
        self._no_slots = torch.zeros(shape.slots_per_rank, dtype=torch.bool)
        native, how = native_lane_work(lanes) if compiled else (None, "dispatch.compiled is off")
        self.note = f"rows are moved by a C helper ({how})" if native else f"rows are moved by numpy: {how}"
        self.is_bitwise = combine == "ordered"
        self._rank_sum = combine == "rank_sum"
        self._work: LaneWork = native or PlainLaneWork(lanes)
        self._rooms = Rooms(lanes)
        # Received and not combined, in order; and who may write results into each buffer of the outbox. A handle that
        # nobody holds any more is in no queue, and is no claim.
        self._queue: list[Callable[[], _Handle | None]] = []
        self._offers: list[Callable[[], _Handle | None]] = [lambda: None, lambda: None]
        self._results = [rows.view(dtype) if wire.combine.is_identity else None for rows in self._outbox.rows]
        self._counts = Channel(self._peers, "counts", COUNTS, COUNTS_READ)
        self._rows = Channel(self._peers, "dispatch", ROWS, ROWS_READ)
        self._home = Channel(self._peers, "combine", HOME, HOME_READ)

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
        call, epoch = self._rows.begin(), self._peers.epoch
        sent = self._work.send_rows(
            physical_ids,
            own,
            weights if self._rank_sum else None,
            call % 2,
            self._peers.others,
            self._rows.progress(call),
        )
        self._rows.announce(call)

        def place(room: Room, wanted: Tensor | None = None) -> Placed:
            return self._work.place_rows(sent, own, self._rooms.rows(room), call % 2, self._peers.others, wanted)

        def receive() -> Dispatched:
            check_epoch(self._peers, epoch, "dispatch receive")
            self._rows.arrive(call)
            room = self._rooms.take()
            placed = place(room)
            self._rows.finish(call)
            return self._dispatched(placed, room, epoch)

        def receive_by_slot() -> BySlot:
            if not self._wire.dispatch.is_identity:  # rows of a source are decoded together
                return receive(), iter([range(self._shape.slots_per_rank)])
            check_epoch(self._peers, epoch, "dispatch receive")
            for source in self._peers.others:
                self._rows.await_rows(call, source, 0)
            room = self._rooms.take()
            placed = place(room, self._no_slots)
            needed = rows_needed(self._lanes, call % 2, self._peers.others)

            def slots() -> Iterator[Sequence[int]]:
                for group in _in_order_of_need(needed):
                    check_epoch(self._peers, epoch, "dispatch receive")
                    for source in self._peers.others:
                        self._rows.await_rows(call, source, int(needed[source, group].max()))
                    wanted = self._no_slots.clone()
                    wanted[group] = True
                    place(room, wanted)
                    yield [int(slot) for slot in group]
                self._rows.arrive(call)
                self._rows.finish(call)

            return self._dispatched(placed, room, epoch), slots()

        return _ArrivingRows(receive, receive_by_slot)

    def _dispatched(self, placed: Placed, room: Room, epoch: int) -> Dispatched:
        handle = _Handle(placed, room, epoch)
        return Dispatched(self._rows_of(placed), handle, self._offer(handle))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        trip = cast(_Handle, handle)
        check_epoch(self._peers, trip.epoch, "combine send")
        results = expert_out.view(-1, self._hidden) if self._slab_rows else expert_out
        call, epoch = self._home.begin(), self._peers.epoch
        results = self._take_back_offers(results.contiguous(), trip, call % 2)
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

    def _offer(self, handle: _Handle) -> Tensor | None:
        """Returns where in the outbox the results of a handle may be written, so that nobody need copy them.

        That is the buffer of the combine that will carry them home if handles are combined in the order of their
        dispatches; None where it is not free yet, or where results are not sent as they are.
        """
        if self._slab_rows or self._rank_sum or not self._work.writes_in_place:
            return None
        self._queue = [other for other in self._queue if (held := other()) and held.epoch == handle.epoch]
        self._queue.append(weakref.ref(handle))
        call = self._home.num_sent + len(self._queue)
        results, standing = self._results[call % 2], self._offers[call % 2]()
        if results is None or (standing and standing.epoch == handle.epoch) or not self._home.was_read(call - 2):
            return None
        self._offers[call % 2] = weakref.ref(handle)
        return results[: handle.placed.x.shape[0]]

    def _take_back_offers(self, results: Tensor, handle: _Handle, buffer: int) -> Tensor:
        """Ends the offers of a handle that is combined, and of the buffer of this combine. Returns results, moved where
        they lie in the other buffer, which is offered anew before they are home.

        Refuses results that were written into a buffer of the outbox which another combine has used since.
        """
        for other, rows in enumerate(self._outbox.rows):
            if results.data_ptr() != rows.data_ptr() or not results.shape[0]:
                continue
            if self._offers[other]() is not handle:
                raise RuntimeError(
                    "results lie in an outbox buffer that was given to another dispatch; combine handles in the order "
                    "of their dispatches, or write results elsewhere"
                )
            if other != buffer:
                results = results.clone()
        for other in range(2):
            if other == buffer or self._offers[other]() is handle:
                self._offers[other] = lambda: None
        self._queue = [other for other in self._queue if other() is not handle]
        return results

    def _rows_of(self, placed: Placed) -> PackedRows | MaskedRows:
        if self._slab_rows:
            return MaskedRows(placed.x.view(-1, self._slab_rows, self._hidden), placed.rows_per_slot)
        return PackedRows(placed.x, placed.rows_per_slot)

    def _encode(self, codec: Codec, rows: Tensor) -> Tensor:
        return rows.contiguous() if codec.is_identity else codec.encode(rows)

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


def make_low_latency(
    group: EpGroup,
    limits: BufferLimits,
    dtype: torch.dtype,
    wire: Wire,
    deadline_s: float,
    compiled: bool = True,
    masked: bool = False,
    combine: Combine = "ordered",
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

    def advise(free_bytes: int) -> str:
        return f" to {most_tokens(group.num_ranks, limits, wire, free_bytes)}"

    memory = share_regions(group.process_group, shape.num_bytes, advise)
    transport = LowLatencyAllToAll(memory, shape, limits.hidden, dtype, wire, deadline_s, compiled, masked, combine)
    dist.barrier(group=group.process_group)  # canaries and first flags are in place
    return transport
