"""GpuSlabAllToAll: expert parallelism among GPU ranks, over memory that their kernels write into directly.

    dispatch send     a kernel writes each row into its source's segment of the slot's slab on the peer, then a flag
    dispatch receive  a kernel waits for the flags and closes the gaps between segments
    combine send      a kernel writes each result to its place on the source rank, then a flag
    combine receive   a kernel waits for the flags and adds results in top-k order

So slabs are pushed both ways. (The CPU transport, shm/transport.py, pushes rows and pulls results.) The memory is
NVSHMEM's heap or, on one host, what the processes map by CUDA IPC.

Results arrive as MaskedRows in the order of all transports (slot, source rank, token), except that a token that names
one slot twice sends one row, whose result both entries use. Two handles may be in flight, each with a queue of buffers;
queues are used in turn, from the first one in every step. So a handle's combine must be received before the second
dispatch after its own is sent, and none may be in flight at the ends of a captured graph. Nothing is read back to
the host in a step; `end_step` queues a copy of which peers were late, and `check_step` looks at it once the host has
waited for the tokens.

The kernels run in the interpreter and compile for sm_80 to sm_100; nothing here was run on a GPU yet.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AllToAll,
    BufferLimits,
    Deferred,
    Dispatched,
    EpGroup,
    MaskedRows,
    Pending,
    Ready,
    TransportRequest,
)
from moe_serve.dispatch.by_batch import ByBatchAllToAll, small_limits
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.collective import CollectiveAllToAll
from moe_serve.dispatch.gpu.facts import gather_facts, ipc_problem, nvshmem_problem, wire_problem
from moe_serve.dispatch.gpu.region import Region, gpu_buffer_sizes, gpu_region, most_gpu_tokens
from moe_serve.dispatch.gpu.symmetric import Sent, ipc_regions, nvshmem_regions, refuse_capture
from moe_serve.dispatch.peer_calls import all_gather_into
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import CapacityError, ConfigError, PeerError
from moe_serve.log import get_logger

if TYPE_CHECKING:  # loads triton
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks

log = get_logger(__name__)

LOOKS_PER_S = 1_000_000  # of a waiting kernel, estimated: one atomic at system scope each; the deadline is as rough
START_S = 600.0  # deadline of the first step, in which each rank compiles its kernels at its own pace
_HOW = {"nvshmem": "NVSHMEM", "cuda_ipc": "CUDA IPC between the processes of one host"}


class GpuSlabAllToAll(AllToAll[Sent]):
    """AllToAll of one rank over regions that exist; see make_gpu_slabs."""

    def __init__(self, ranks: "SlabRanks", group: EpGroup, transport: str = "nvshmem", deadline_s: float | None = None):
        """transport: "nvshmem" or "cuda_ipc";  deadline_s: of waits after the first step; None: as ranks have it"""
        self._ranks, self._num_queues = ranks, ranks.region.num_queues
        self._deadline_s, self._group = deadline_s, group
        self._queue = 0
        # On the host, [R] int64: the last round that each rank missed, 0 = none.
        self._late = torch.zeros(ranks.region.num_ranks, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._outs = [None if staged is None else staged[0] for staged in ranks.staged]  # of the one rank, by queue
        self.note = f"Triton kernels over {_HOW[transport]}, masked slabs"
        # A handle has a queue of its own until its combine is received.
        self.capabilities = replace(TRANSPORTS[transport], live_handles=self._num_queues)

    @property
    def captures(self) -> bool:
        return True

    def begin_step(self, most_tokens: int) -> None:
        self._queue = 0  # none is in flight; the ranks that replay a graph begin with the queue of its capture

    def end_step(self) -> None:
        self._late.copy_(self._ranks.late[0], non_blocking=True)
        if self._deadline_s is not None:
            self._ranks.max_spins = spins_of(self._deadline_s)

    def check_step(self) -> None:
        if self._ranks.late.is_cuda:
            torch.cuda.current_stream(self._ranks.late.device).synchronize()  # at once, where tokens were read
        late = self._late.numpy()
        if late.any():
            rank = int(late.argmax())
            raise PeerError(
                f"rank {rank} did not send its rows in round {int(late[rank])} of dispatch and combine; look at its "
                "last lines, and start the ranks again",
                rank,
                "dispatch or combine",
                int(late[rank]),
            )

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        # One small collective of the process group; only ranks with redundant experts need it.
        if self._group.process_group is None:
            return Ready(counts[None])
        gathered = counts.new_empty(self._group.num_ranks, *counts.shape)
        all_gather_into(gathered, counts.contiguous(), self._group.process_group)
        return Ready(gathered)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[Sent]]:
        # slot_counts is not needed: the segmented layout follows from the own ids.
        sent = self._ranks.dispatch_send(hidden[None], physical_ids[None], self._queue)
        self._queue = (self._queue + 1) % self._num_queues

        def receive() -> Dispatched[Sent]:
            slabs = self._ranks.dispatch_receive(sent)
            scale = None if slabs.scale is None else slabs.scale[0]
            return Dispatched(MaskedRows(slabs.x[0], slabs.rows_per_slot[0], scale), sent, self._outs[sent.queue])

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: Sent) -> Pending[Tensor]:
        staged, results = self._ranks.staged[handle.queue], expert_out[None]
        if staged is not None and expert_out is self._outs[handle.queue]:
            results = staged
        self._ranks.combine_send(handle, results)
        return Deferred(lambda: self._ranks.combine_receive(handle, weights[None])[0])


def make_gpu_slabs(group: EpGroup, request: TransportRequest, transport: str) -> GpuSlabAllToAll:
    """Returns this rank's end of the transport; a collective call, to be made before any graph is captured.

    transport: "nvshmem", which is started here where it does not run, or "cuda_ipc"
    Raises ConfigError for what the GPUs, the links between them or the kernels cannot do, for missing libraries and
    inside a graph capture; CapacityError when the GPU of some rank is too small. All ranks raise alike.
    """
    refuse_capture("low-latency buffers")
    facts = gather_facts(group)
    problem = wire_problem(facts, request.dtype, request.wire_dtype)
    problem = problem or (ipc_problem(facts) if transport == "cuda_ipc" else nvshmem_problem(facts))
    if problem:
        raise ConfigError(f"dispatch.backend {TRANSPORTS[transport].backend} cannot serve here: {problem}")
    stages = transport == "nvshmem"
    check_memory(group.num_ranks, request, stages, min(rank.free_bytes for rank in facts))
    shape = (group.num_ranks, request.limits, request.dtype, request.wire_dtype, stages)
    log.info("%s", gpu_buffer_sizes(*shape).line)
    ranks = make_ranks(gpu_region(*shape), group, request.dtype, transport, request.fp8_rows)
    return GpuSlabAllToAll(ranks, group, transport, request.deadline_s)


def make_gpu_by_batch(group: EpGroup, request: TransportRequest) -> ByBatchAllToAll:
    """Returns NVSHMEM for decode-sized steps and the collective transport for larger ones; a collective call.

    Raises what make_gpu_slabs raises.
    """
    limits: BufferLimits = small_limits(request.limits)
    small = make_gpu_slabs(group, replace(request, limits=limits), "nvshmem")
    wire = make_wire(request.wire_dtype, request.dtype)
    large = CollectiveAllToAll(group, limits.slots_per_rank, wire, keep_fp8=request.fp8_rows)
    return ByBatchAllToAll(small, large, limits.max_tokens_per_rank)


def check_memory(num_ranks: int, request: TransportRequest, stages: bool, free_bytes: int) -> None:
    """Raises CapacityError when buffers do not fit into the free memory of a GPU, saying how many tokens would."""
    shape = (num_ranks, request.limits, request.dtype, request.wire_dtype, stages)
    sizes = gpu_buffer_sizes(*shape)
    if sizes.total > free_bytes:
        raise CapacityError(
            f"low-latency buffers take {sizes.total / 2**30:.2f} GiB of a GPU for {sizes.max_tokens} tokens per rank "
            f"and {free_bytes / 2**30:.2f} GiB are free; lower dispatch.max_tokens_per_rank to "
            f"{most_gpu_tokens(*shape, free_bytes)}, or cache.memory_gib"
        )


def make_ranks(
    region: Region, group: EpGroup, dtype: torch.dtype, transport: str, fp8_rows: bool = False
) -> "SlabRanks":
    """Returns the kernels' side of this rank, over regions that are allocated here; a collective call.

    fp8_rows: hand rows of an FP8 wire on as they are
    """
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks

    make = nvshmem_regions if transport == "nvshmem" else ipc_regions
    return SlabRanks(make(region, group), dtype, fp8_rows, max_spins=spins_of(START_S))


def spins_of(deadline_s: float) -> int:
    """Returns how often a kernel reads a flag before it gives a peer up.

    Always odd: Triton compiles a kernel anew for a multiple of 16 where the last number was none.
    """
    return min(int(deadline_s * LOOKS_PER_S), 2**31 - 1) | 1
