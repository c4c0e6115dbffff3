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
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.dispatch.shm.channel import Channel, Peers, check_epoch
from moe_serve.dispatch.shm.counts import CountsExchange, NativeCounts, PlainCounts
from moe_serve.dispatch.shm.flag_wait import FlagWait
from moe_serve.dispatch.shm.membership import Membership
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
)
from moe_serve.dispatch.shm.result_buffers import ResultBuffers
from moe_serve.dispatch.shm.row_copy import Placed, RowBuffers, RowCopier, StagingBuffer, StagingBuffers
from moe_serve.dispatch.shm.row_copy_native import native_row_copier
from moe_serve.dispatch.shm.row_copy_plain import PlainRowCopier
from moe_serve.dispatch.shm.shared_cores import SharedCores, are_shared
from moe_serve.dispatch.shm.sizes import most_tokens, region_shape
from moe_serve.dispatch.shm.travel import NativeTravel
from moe_serve.dispatch.wire import Codec, make_wire
from moe_serve.errors import CapacityError, PeerError
from moe_serve.kernels.cpu.experts import PackedExperts


@dataclass(frozen=True, eq=False)
class ShmHandle:
    """placed: the rows of a dispatch and where they came from;  staging: the memory that holds them"""

    placed: Placed
    staging: StagingBuffer
    epoch: int


class ShmAllToAll(AllToAll[ShmHandle]):
    """AllToAll among the ranks of one host, on CPU tensors.

    Rows that `dispatch` gives are valid until their combine was waited for, or until the receive of the second dispatch
    after theirs. What is given to `dispatch` and `combine` must not change before the result was waited for, since own
    rows are not copied. After a PeerError every remaining rank calls `membership.regroup` and runs the step again.
    """

    membership: Membership

    def __init__(self, memory: ShmMemory, request: TransportRequest):
        """memory: of all ranks, with regions of `region_shape`'s size"""
        limits = request.limits
        self._memory = memory
        self._rank, self._num_ranks = memory.rank, memory.num_ranks
        self._wire = make_wire(request.wire_dtype, request.dtype)
        self._shape = region_shape(self._num_ranks, limits, self._wire)
        self._hidden, self._dtype = limits.hidden, request.dtype
        self._rank_sum = request.combine == "rank_sum"
        self._slab_rows = self._num_ranks * limits.max_tokens_per_rank if request.rows == "masked" else 0
        self._received = [ReceiveSlice(memory.region(self._rank), self._shape, r) for r in range(self._num_ranks)]
        self.membership = Membership(memory, request.deadline_s)
        shares = request.cpu_kernels and are_shared(self._num_ranks, request.threads) and memory.watches_processes
        self._cores = SharedCores(self._rank, self.membership.pages) if shares else None
        self._peers = self._make_peers(request.deadline_s)
        self.membership.peers = self._peers
        self._counts = Channel(self._peers, "counts", COUNTS, COUNTS_READ)
        self._rows = Channel(self._peers, "dispatch", ROWS, ROWS_READ)
        self._results = Channel(self._peers, "combine", RESULTS, RESULTS_READ)

        send_buffers = [SendBuffer(memory.region(rank), self._shape) for rank in range(self._num_ranks)]
        send_buffers[self._rank].set_canaries()
        buffers = RowBuffers(
            self._rank, self._shape, self._hidden, self._dtype, self._wire, self._peers.slices, self._received,
            send_buffers, self._slab_rows, self._rank_sum,
        )  # fmt: skip
        native, how = native_row_copier(buffers) if request.compiled else (None, "dispatch.compiled is off")
        self._copier: RowCopier[Any, Any] = native or PlainRowCopier(buffers)
        counts = self._peers, self._counts, self._received
        self._exchange: CountsExchange = NativeCounts(*counts, native.library) if native else PlainCounts(*counts)
        self._staging = StagingBuffers(buffers)
        self.note = f"rows are moved by a C helper ({how})" if native else f"rows are moved by numpy: {how}"
        self.capabilities = replace(TRANSPORTS["shm"], bitwise=not self._rank_sum)
        self._result_buffers: ResultBuffers | None = None
        self._travel: NativeTravel | None = None
        one_call = request.cpu_kernels and self._wire.dispatch.is_identity and self._wire.combine.is_identity
        if native and one_call and request.dtype == torch.float32 and not (self._slab_rows or self._rank_sum):
            staging = self._staging.rows(StagingBuffer(0))
            self._travel = NativeTravel(
                buffers, native, self._peers, (self._rows, self._results), staging, request.clock
            )
        if self._wire.combine.is_identity and self._copier.writes_in_place and not (self._slab_rows or self._rank_sum):
            self._result_buffers = ResultBuffers(send_buffers[self._rank], self._results, self._dtype)

    def _make_peers(self, deadline_s: float) -> Peers:
        memory, shape = self._memory, self._shape
        slices = [ReceiveSlice(memory.region(rank), shape, self._rank) for rank in range(self._num_ranks)]
        for each in slices:
            each.set_canaries()
        return Peers(
            rank=self._rank,
            others=[rank for rank in range(self._num_ranks) if rank != self._rank],
            epoch=0,
            slices=slices,
            flags=all_flags(memory.region(self._rank), shape),
            wait=FlagWait(self._num_ranks, deadline_s, self.membership.check, self._cores),
            cores=self._cores,
        )

    @property
    def waited_s(self) -> list[float]:
        return list(self._peers.wait.waited_s)

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
        self._check_members(physical_ids)
        if self._rank_sum and weights is None:
            raise TypeError("with combine rank_sum, dispatch needs the weights")
        own = _encode(self._wire.dispatch, hidden)
        call, epoch = self._rows.begin(), self._peers.epoch
        sent_weights = weights if self._rank_sum else None
        sent = self._copier.send_rows(physical_ids, own, sent_weights, call % 2, self._peers.others)
        self._rows.signal(call)

        def receive() -> Dispatched[ShmHandle]:
            check_epoch(self._peers, epoch, "dispatch receive")
            self._rows.wait(call)
            staging = self._staging.take()
            placed = self._copier.place_rows(sent, own, self._staging.rows(staging), call % 2, self._peers.others)
            self._rows.acknowledge(call)
            return self._dispatched(ShmHandle(placed, staging, epoch))

        return Deferred(receive)

    def travel(self, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor) -> bool:
        if self._travel is None:
            return False
        self._check(x, slots)
        self._check_members(slots)
        self._travel(x, slots, weights, experts, out)
        self.membership.check_epoch_stands("combine receive", self._results.num_sent)
        self._results.acknowledge(self._results.num_sent)
        return True

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

        def receive() -> Tensor:
            check_epoch(self._peers, epoch, "combine receive")
            self._results.wait(call)
            combined = self._copier.add_results(placed, own, weights, call % 2, self._peers.others)
            self.membership.check_epoch_stands("combine receive", call)
            self._results.acknowledge(call)
            self._staging.give_back(handle.staging)
            return combined

        return Deferred(receive)

    def _check(self, hidden: Tensor, physical_ids: Tensor) -> None:
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

    def _check_members(self, physical_ids: Tensor) -> None:
        """Raises PeerError for tokens to experts of a masked rank."""
        if len(self._peers.others) + 1 == self._num_ranks:
            return
        named = physical_ids.div(self._shape.slots_per_rank, rounding_mode="floor")
        lost = [rank for rank in self.membership.masked if bool((named == rank).any())]
        if lost:
            raise PeerError(
                f"tokens are sent to experts of rank {lost[0]}, which is masked; use a placement without it",
                lost[0],
                "dispatch send",
                self._peers.epoch,
            )


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
    if group.files is not None and group.files.is_newcomer:
        transport = ShmAllToAll(open_regions(group.files, group.rank, group.num_ranks, shape.num_bytes, use), request)
        transport.membership.begin_masked()
        return transport
    assert group.process_group is not None, "shared memory is mapped over a process group"
    transport = ShmAllToAll(share_regions(group.process_group, shape.num_bytes, use, group.files), request)
    barrier(group.process_group)  # canaries and first flags are in place
    return transport
