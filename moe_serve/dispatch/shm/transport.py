"""ShmAllToAll: expert parallelism among CPU ranks of one host, over shared memory that every rank has mapped.

    dispatch send     plan, copy rows into the own slice of each peer's receive buffer, raise a flag there
    dispatch receive  wait for the flags of all peers, put rows in the placed layout
    combine send      leave results in the own send buffer, tell each peer where its results begin, raise a flag
    combine receive   wait for the flags, read results from the peers' send buffers and add them in top-k order

So rows are pushed and results are pulled. (The GPU transport, gpu/transport.py, pushes both.)

Why a reader sees whole rows: data are written first and the flag second, as one aligned 8-byte store, and x86-64 makes
stores visible in program order (the C helper fences its streaming stores). A flag holds the sequence number of its
call and the epoch, so nobody has to clear it and a flag of a voided epoch is never taken for a new one. Every buffer
exists twice, so two calls of a kind may be in flight; call n is written once the peers have read call n - 2. A rank
that was lost while it read results may have read newer ones, so after reading it checks that its epoch still stands.

Why it cannot deadlock: the send of call n waits for reads of call n - 2, its receive for sends of call n. Every wait is
for an earlier event in the one order of calls that all ranks share. A peer that does not come runs into the deadline.
docs/communication.md explains this at length.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AllToAll,
    Deferred,
    Dispatched,
    EpGroup,
    MaskedRows,
    PackedRows,
    Pending,
    TransportRequest,
)
from moe_serve.dispatch.buffer_sizes import check_capacity
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.hosts.other_hosts import OtherHosts
from moe_serve.dispatch.membership import Membership
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.dispatch.shm.channel import Channel, FlagWait, Peers, check_epoch
from moe_serve.dispatch.shm.counts import CountsExchange, NativeCounts, PlainCounts
from moe_serve.dispatch.shm.memory import SegmentUse, ShmMemory, open_regions, share_regions
from moe_serve.dispatch.shm.region import (
    COUNTS,
    COUNTS_READ,
    RESULTS,
    RESULTS_READ,
    ROWS,
    ROWS_READ,
    ReceiveSlice,
    SendBuffer,
    all_flags,
    most_tokens,
    owner_words,
    region_shape,
)
from moe_serve.dispatch.shm.remote import RemotePeers
from moe_serve.dispatch.shm.row_copy import RowBuffers, RowCopier, StagingBuffer, StagingBuffers
from moe_serve.dispatch.shm.row_copy_native import NativeRowCopier, native_row_copier
from moe_serve.dispatch.shm.row_copy_plain import PlainRowCopier
from moe_serve.dispatch.shm.shared_cores import SharedCores, are_shared
from moe_serve.dispatch.wire import Codec, make_wire
from moe_serve.errors import CapacityError, ConfigError, PeerError

LEAST_BYTES = 1 << 16  # below it, a copy costs less than keeping track of who writes where
_LONGEST_QUEUE = 8  # handles that nobody combines are dropped once the queue is longer
HandleRef = Callable[[], object | None]  # the handle, as long as somebody holds it
_NOBODY: HandleRef = lambda: None  # noqa: E731


@dataclass(frozen=True, eq=False)
class ShmHandle:
    """placed: rows of a dispatch and where they came from, made by the copier;  staging: the memory that holds them"""

    placed: Any
    staging: StagingBuffer
    epoch: int


class ShmAllToAll(AllToAll[ShmHandle]):
    """AllToAll among the ranks of one host, on CPU tensors.

    Rows that `dispatch` gives are valid until their combine was waited for, or until the receive of the second dispatch
    after theirs. What is given to `dispatch` and `combine` must not change before the result was waited for, since own
    rows are not copied. After a PeerError every remaining rank calls `membership.regroup` and runs the step again.
    """

    def __init__(self, memory: ShmMemory, request: TransportRequest):
        """memory: of all ranks, with regions of `region_shape`'s size"""
        limits = request.limits
        self._memory = memory
        link = memory.space.link if memory.space else None
        self._rank, self._num_ranks = memory.rank, memory.num_ranks
        self._wire = make_wire(request.wire_dtype, request.dtype)
        self._shape = region_shape(self._num_ranks, limits, self._wire)
        self._hidden, self._dtype = limits.hidden, request.dtype
        self._rank_sum = request.combine == "rank_sum"
        self._slab_rows = self._num_ranks * limits.max_tokens_per_rank if request.rows == "masked" else 0
        self._received = [ReceiveSlice(memory.region(self._rank), self._shape, r) for r in range(self._num_ranks)]
        pages = [owner_words(memory.region(rank)) for rank in range(self._num_ranks)]
        lives = memory.lives if memory.watches_processes else None
        hosts = None
        if memory.space is not None:
            hosts = OtherHosts(self._rank, memory.space, pages[self._rank], memory.decisions)
        self._members = Membership(self._rank, pages, memory.decisions, lives, request.deadline_s, hosts)
        self.membership = self._members
        shares = request.cpu_kernels and are_shared(self._num_ranks, request.threads) and memory.watches_processes
        shares = shares and link is None
        self._cores = SharedCores(self._rank, pages) if shares else None
        self._members.lend_core = None if self._cores is None else self._cores.lent
        self._peers = self._make_peers(request.deadline_s)
        self._members.on_epoch(self._peers.begin_epoch)
        self._counts = Channel(self._peers, "counts", COUNTS, COUNTS_READ)
        self._rows = Channel(self._peers, "dispatch", ROWS, ROWS_READ)
        self._results = Channel(self._peers, "combine", RESULTS, RESULTS_READ)

        send_buffers = [SendBuffer(memory.region(rank), self._shape) for rank in range(self._num_ranks)]
        send_buffers[self._rank].set_canaries()
        self._buffers = buffers = RowBuffers(
            self._rank, self._shape, self._hidden, self._dtype, self._wire, self._peers.slices, self._received,
            send_buffers, self._slab_rows, self._rank_sum, -1 if link is None else link.local_mask,
        )  # fmt: skip
        native, how = native_row_copier(buffers) if request.compiled else (None, "dispatch.compiled is off")
        if native is not None:
            self._peers.wait.use(native.library, self._rank, link)
        self._copier: RowCopier[Any, Any] = native or PlainRowCopier(buffers)
        counts = self._peers, self._counts, self._received
        self._exchange: CountsExchange = NativeCounts(*counts, native.library) if native else PlainCounts(*counts)
        self._staging = StagingBuffers(buffers)
        self.note = f"rows are moved by a C helper ({how})" if native else f"rows are moved by numpy: {how}"
        self._result_buffers: ResultBuffers | None = None
        adds_rows = self._wire.combine.is_identity and not (self._slab_rows or self._rank_sum)
        if adds_rows and self._copier.writes_in_place:
            self._result_buffers = ResultBuffers(send_buffers[self._rank], self._results, self._dtype)
        if link is not None and native is None:
            raise ConfigError(f"rows go between hosts by a C helper only ({how}); set dispatch.backend: collective")
        self._facts_at = native.facts_at if native else 0
        fuses = bool(native) and adds_rows and self._wire.dispatch.is_identity and self._dtype == torch.float32
        can = TRANSPORTS["shm" if link is None else "hosts"]
        self.capabilities = replace(can, bitwise=not self._rank_sum, fuses=fuses)

    def compiled_rows(self) -> "CompiledRows":
        """Returns what compiled code needs to carry rows itself, where `capabilities.fuses`."""
        assert isinstance(self._copier, NativeRowCopier), "only the C helper carries rows for others"
        staging = self._staging.rows(StagingBuffer(0))
        return CompiledRows(
            self._buffers, self._copier, self._peers, self._rows, self._results, staging, self._members, self._check
        )

    def _make_peers(self, deadline_s: float) -> Peers:
        memory, shape = self._memory, self._shape
        slices = [ReceiveSlice(memory.region(rank), shape, self._rank) for rank in range(self._num_ranks)]
        for each in slices:
            each.set_canaries()
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        check = self._members.check
        remote = None if memory.space is None else RemotePeers(memory.space, slices, others, deadline_s, check)
        wait = FlagWait(self._num_ranks, deadline_s, check, self._cores)
        if remote is not None:
            wait.poll, wait.spins = remote.poll, 1
        return Peers(
            rank=self._rank,
            others=others,
            epoch=0,
            slices=slices,
            flags=all_flags(memory.region(self._rank), shape),
            wait=wait,
            cores=self._cores,
            remote=remote,
        )

    @property
    def waited_s(self) -> list[float]:
        return [float(waited) for waited in 1e-9 * self._peers.wait.waited_ns]

    def end_step(self) -> None:
        """Keeps what was waited in this step; a voided step leaves nothing in the wait matrix."""
        self._peers.wait.keep()

    def close(self) -> None:
        if self._cores is not None:
            self._cores.close()

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        num_counts = counts.shape[0]
        if num_counts > self._shape.max_counts:
            raise CapacityError(f"{num_counts} counts in one exchange, buffers hold {self._shape.max_counts}")
        return self._exchange(counts)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[ShmHandle]]:
        self._check(hidden, physical_ids)
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        own = _encode(self._wire.dispatch, hidden)
        call, epoch = self._rows.begin(), self._peers.epoch
        sent_weights = weights if self._rank_sum else None
        sent = self._copier.send_rows(physical_ids, own, sent_weights, call % 2, self._peers.others)
        self._rows.signal(call)
        posted = 0
        if (remote := self._peers.remote) is not None:
            at = self._facts_at, call % 2, sent.num_tokens, sent.topk, own.data_ptr(), sent.at
            posted = remote.rows(*at, self._rows.flag(call))
            remote.borrowed = *remote.borrowed[-1:], own

        def receive() -> Dispatched[ShmHandle]:
            check_epoch(self._peers, epoch, "dispatch receive")
            self._rows.wait(call)
            if (remote := self._peers.remote) is not None:
                remote.finish_sending(posted, "dispatch receive", call)
            staging = self._staging.take()
            placed = self._copier.place_rows(sent, own, self._staging.rows(staging), call % 2, self._peers.others)
            self._rows.acknowledge(call)
            return self._dispatched(ShmHandle(placed, staging, epoch))

        return Deferred(receive)

    def _dispatched(self, handle: ShmHandle) -> Dispatched[ShmHandle]:
        x, rows_per_slot = handle.placed.x, handle.placed.rows_per_slot
        if self._slab_rows:
            return Dispatched(MaskedRows(x.view(-1, self._slab_rows, self._hidden), rows_per_slot), handle)
        out = None
        if self._result_buffers is not None:
            out = self._result_buffers.reserve(handle, x.shape[0], handle.epoch)
        return Dispatched(PackedRows(x, rows_per_slot), handle, out)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: ShmHandle) -> Pending[Tensor]:
        check_epoch(self._peers, handle.epoch, "combine send")
        results = expert_out.reshape(-1, self._hidden) if self._slab_rows else expert_out
        placed = handle.placed
        assert (results.shape, results.dtype) == (placed.x.shape, placed.x.dtype), "results are like the rows that came"
        results = results.contiguous()
        call, epoch = self._results.begin(), self._peers.epoch
        if self._result_buffers is not None:
            results = self._result_buffers.release(handle, results, call % 2)
        own = self._copier.send_results(placed, results, call % 2, self._peers.others)
        self._results.signal(call)
        if (remote := self._peers.remote) is not None:
            at = self._facts_at, call % 2, placed.num_tokens, placed.topk, placed.at
            remote.results(*at, self._results.flag(call))

        def receive() -> Tensor:
            check_epoch(self._peers, epoch, "combine receive")
            self._results.wait(call)
            combined = self._copier.add_results(placed, own, weights, call % 2, self._peers.others)
            self._members.check_epoch_stands("combine receive", call)
            self._results.acknowledge(call)
            self._staging.give_back(handle.staging)
            return combined

        return Deferred(receive)

    def _check(self, hidden: Tensor, physical_ids: Tensor) -> None:
        """Raises CapacityError for more than the buffers hold, PeerError for tokens to experts of a masked rank."""
        shape = self._shape
        # The C helper gets addresses only, so dtypes and shapes are checked here.
        assert (hidden.dtype, physical_ids.dtype) == (self._dtype, torch.int64), "rows or ids of another dtype"
        assert hidden.shape[0] == physical_ids.shape[0], "ids are one row for each token"
        check_capacity(hidden.shape[0], shape.max_tokens)
        if physical_ids.shape[1] > shape.topk or hidden.shape[1] != self._hidden:
            raise CapacityError(
                f"rows of {hidden.shape[1]} channels to {physical_ids.shape[1]} experts, buffers are made for "
                f"{self._hidden} channels and {shape.topk} experts; build the transport for this model"
            )
        if len(self._peers.others) + 1 == self._num_ranks:
            return
        named = physical_ids.div(self._shape.slots_per_rank, rounding_mode="floor")
        lost = [rank for rank in self._members.masked if bool((named == rank).any())]
        if lost:
            raise PeerError(
                f"tokens are sent to experts of rank {lost[0]}, which is masked; use a placement without it",
                lost[0],
                "dispatch send",
                self._peers.epoch,
            )


@dataclass(frozen=True, eq=False)
class CompiledRows:
    """What compiled code needs to carry rows itself: the calls of a dispatch and its combine without this class.

    Rows and results are float32 on the wire too, packed, and added in order.

    copier:        the C helper, and what it knows of the buffers
    rows, results: whose calls are numbered, announced and waited for
    staging:       [most_rows, H] where rows arrive
    check:         raises for rows [T, H] and ids [T, K] that `dispatch` would refuse
    """

    buffers: RowBuffers
    copier: NativeRowCopier
    peers: Peers
    rows: Channel
    results: Channel
    staging: Tensor
    membership: Membership
    check: Callable[[Tensor, Tensor], None]


class ResultBuffers:
    """Lets experts write results straight into the send buffer, so that `combine` need not copy them.

    Each of the two buffers of this rank's send buffer is reserved for one handle.

    A combine uses the buffer of its number, so a reservation is a guess that handles are combined in the order of their
    dispatches. Where the guess is wrong, results are copied; results that another combine has overwritten are refused.
    A handle that nobody holds any more has no claim.
    """

    def __init__(self, send_buffer: SendBuffer, combines: Channel, dtype: torch.dtype):
        """combines: the channel that counts them;  dtype: of results"""
        self._rows = [rows.view(dtype) for rows in send_buffer.rows]
        self._row_bytes = send_buffer.rows[0].shape[1]
        self._addresses = [rows.data_ptr() for rows in send_buffer.rows]
        self._combines = combines
        self._holders: list[HandleRef] = [_NOBODY, _NOBODY]
        self._queue: list[HandleRef] = []  # received and not combined yet, in order
        self._epoch = -1

    def reserve(self, handle: object, num_rows: int, epoch: int) -> Tensor | None:
        """Returns [num_rows, H] of the send buffer for the results of a handle; None: too few rows, or not free yet."""
        if epoch != self._epoch:
            self._holders, self._queue, self._epoch = [_NOBODY, _NOBODY], [], epoch
        elif len(self._queue) > _LONGEST_QUEUE:
            self._queue = [other for other in self._queue if other() is not None]
        self._queue.append(weakref.ref(handle))
        if num_rows * self._row_bytes < LEAST_BYTES:
            return None
        self._queue = [other for other in self._queue if other() is not None]
        call = self._combines.num_sent + len(self._queue)
        buffer = call % 2
        if self._holders[buffer]() is not None or not self._combines.was_read(call - 2):
            return None
        self._holders[buffer] = weakref.ref(handle)
        return self._rows[buffer][:num_rows]

    def release(self, handle: object, results: Tensor, buffer: int) -> Tensor:
        """Ends the reservation of a handle whose combine uses a buffer; returns the results, to be sent from there.

        Results that lie in the other buffer are copied, since it may be reserved again before peers have read them.
        Raises RuntimeError when another combine has overwritten the results.
        """
        address = results.data_ptr()
        if address in self._addresses and results.shape[0]:
            other = self._addresses.index(address)
            if self._holders[other]() is not handle:
                raise RuntimeError(
                    "results lie in a send buffer that was given to another dispatch; combine handles in the order "
                    "of their dispatches, or write results elsewhere"
                )
            if other != buffer:
                results = results.clone()
        if self._holders[1 - buffer]() is handle:
            self._holders[1 - buffer] = _NOBODY
        self._holders[buffer] = _NOBODY
        self._queue = [other for other in self._queue if other() is not handle]
        return results


def _encode(codec: Codec, rows: Tensor) -> Tensor:
    return rows.contiguous() if codec.is_identity else codec.encode(rows)


def make_shm(group: EpGroup, request: TransportRequest) -> ShmAllToAll:
    """Maps the regions of a group and returns this rank's transport; a collective call, unless it joins later.

    Raises ConfigError off x86-64 and on several hosts, CapacityError when shared memory is too small.
    """
    limits, wire = request.limits, make_wire(request.wire_dtype, request.dtype)

    def advise(free_bytes: int) -> str:
        return f"lower dispatch.max_tokens_per_rank to {most_tokens(group.num_ranks, limits, wire, free_bytes)}"

    shape = region_shape(group.num_ranks, limits, wire)
    use = SegmentUse(advise=advise)
    if group.files is not None and group.files.is_replacement:
        memory = open_regions(group.files, group.rank, group.num_ranks, shape.num_bytes, use, group.link)
        transport = ShmAllToAll(memory, request)
        transport._members.begin_masked()
        return transport
    assert group.process_group is not None, "shared memory is mapped over a process group"
    memory = share_regions(group.process_group, shape.num_bytes, use, group.files, group.link)
    transport = ShmAllToAll(memory, request)
    barrier(group.process_group)  # canaries and first flags are in place
    return transport
