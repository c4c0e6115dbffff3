"""The AllToAll contract over the low-latency GPU kernels: one rank of the process, its peers through NVSHMEM or IPC.

Results arrive as MaskedRows in the order of all transports (slot, source rank, token), except that a token that names
one slot twice sends one row, whose result both entries use. Two handles may be in flight; they take lanes in turn, so a
handle's combine must be received before the second dispatch after its own is sent, and captured graphs must hold a
whole number of turns or none in flight at their ends. Between `begin_step` and `end_step` nothing is read back to the
host; `end_step` reads once which peers were late, when the host wants the step's logits anyway.

Kernels run in the interpreter and compile for sm_80 to sm_100; nothing here was run on a GPU yet.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, Deferred, Dispatched, EpGroup, MaskedRows, Pending, Ready
from moe_serve.dispatch.by_batch import ByBatchAllToAll, small_limits
from moe_serve.dispatch.collective import CollectiveAllToAll
from moe_serve.dispatch.gpu.facts import GpuFacts, gather_facts, ipc_problem, nvshmem_problem, wire_problem
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.gpu.sizes import gpu_buffer_sizes, gpu_region, most_gpu_tokens
from moe_serve.dispatch.gpu.symmetric import Sent, SymmetricRegions, refuse_capture
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import CapacityError, ConfigError, PeerError
from moe_serve.log import get_logger

if TYPE_CHECKING:  # loads triton
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks

log = get_logger(__name__)

LOOKS_PER_S = 1_000_000  # of a waiting kernel, estimated: one atomic at system scope each; the deadline is as rough
START_S = 600.0  # deadline of the first step, in which each rank compiles its kernels at its own pace


class GpuSlabAllToAll:
    """AllToAll of one rank over ready regions; see make_gpu_slabs for how they come to be."""

    is_bitwise = True

    def __init__(self, ranks: "SlabRanks", group: EpGroup, note: str = "", deadline_s: float | None = None):
        """deadline_s: of waits after the first step; None: as ranks have it"""
        self._ranks, self._num_lanes = ranks, ranks.region.num_lanes
        self._deadline_s = deadline_s
        self._counts: CollectiveAllToAll | None = None
        if group.process_group is not None:
            self._counts = CollectiveAllToAll(group, ranks.region.slots_per_rank, make_wire("auto", torch.bfloat16))
        self._lane = 0
        self.note = note

    @property
    def most_handles(self) -> int:
        """How many handles may live at once: each has a lane until its combine is received."""
        return self._num_lanes

    def begin_step(self, most_tokens: int) -> None:
        """Nothing to prepare: regions are sized for every dispatch."""

    def end_step(self) -> None:
        """Raises PeerError when a peer's rows did not come by the deadline: what the kernels gave is void then."""
        late = self._ranks.late[0].cpu().numpy()  # [R] the last round that each rank missed, 0 = none
        if late.any():
            rank = int(late.argmax())
            raise PeerError(
                f"rank {rank} did not send its rows in round {int(late[rank])} of dispatch and combine; look at its "
                "last lines, and start the ranks again",
                rank,
                "dispatch or combine",
                int(late[rank]),
            )
        if self._deadline_s is not None:
            self._ranks.max_spins = spins_of(self._deadline_s)

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        """As the contract says, by one collective of the process group: small, and only the exact split needs it."""
        return Ready(counts[None]) if self._counts is None else self._counts.exchange_counts(counts)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched]:
        """As the contract says; slot_counts is not needed: the segmented layout is a function of the own ids."""
        sent = self._ranks.dispatch_send(hidden[None], physical_ids[None], self._lane)
        self._lane = (self._lane + 1) % self._num_lanes

        def receive() -> Dispatched:
            slabs = self._ranks.dispatch_receive(sent)
            return Dispatched(MaskedRows(slabs.x[0], slabs.rows_per_slot[0]), sent)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        """As the contract says."""
        assert isinstance(handle, Sent), "a handle of another transport"
        self._ranks.combine_send(handle, expert_out[None])
        return Deferred(lambda: self._ranks.combine_receive(handle, weights[None])[0])


def make_gpu_slabs(
    group: EpGroup,
    limits: BufferLimits,
    dtype: torch.dtype,
    wire_dtype: str,
    deadline_s: float,
    memory: str,
    facts: Sequence[GpuFacts] | None = None,
) -> GpuSlabAllToAll:
    """Returns this rank's end of the transport; a collective call, to be made before any graph is captured.

    memory: "nvshmem", which is started here where it does not run, or "ipc"
    facts:  of all ranks, where they have been gathered already
    Raises ConfigError for what the GPUs, the links between them or the kernels cannot do, for missing libraries and
    inside a graph capture; CapacityError when the GPU of some rank has no room. All ranks raise alike.
    """
    refuse_capture("low-latency buffers")
    backend = "cuda_ipc" if memory == "ipc" else "low_latency"
    if group.process_group is None:
        raise ConfigError(f"dispatch.backend {backend} joins several ranks and here is one; set dispatch.backend: auto")
    facts = facts or gather_facts(group)
    problem = wire_problem(facts, dtype, wire_dtype)
    problem = problem or (ipc_problem(facts) if memory == "ipc" else nvshmem_problem(facts))
    if problem:
        raise ConfigError(f"dispatch.backend {backend} cannot serve here: {problem}")
    stages = memory == "nvshmem"
    check_room(group.num_ranks, limits, dtype, wire_dtype, stages, min(rank.free_bytes for rank in facts))
    for line in gpu_buffer_sizes(group.num_ranks, limits, dtype, wire_dtype, stages).lines():
        log.info("%s", line)
    ranks = make_ranks(gpu_region(group.num_ranks, limits, dtype, wire_dtype, stages), group, dtype, memory)
    how = "NVSHMEM" if stages else "CUDA IPC between the processes of one host"
    return GpuSlabAllToAll(ranks, group, f"Triton kernels over {how}, masked slabs", deadline_s)


def make_gpu_by_batch(
    group: EpGroup, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, deadline_s: float
) -> ByBatchAllToAll:
    """Returns NVSHMEM for decode-sized steps and the collective transport for larger ones; a collective call.

    Raises what make_gpu_slabs raises.
    """
    few = small_limits(limits)
    small = make_gpu_slabs(group, few, dtype, wire_dtype, deadline_s, "nvshmem")
    large = CollectiveAllToAll(group, limits.slots_per_rank, make_wire(wire_dtype, dtype))
    return ByBatchAllToAll(small, large, few.max_tokens_per_rank)


def check_room(
    num_ranks: int, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, stages: bool, free_bytes: int
) -> None:
    """Raises CapacityError when buffers do not fit into the free memory of a GPU, saying how many tokens would."""
    sizes = gpu_buffer_sizes(num_ranks, limits, dtype, wire_dtype, stages)
    if sizes.total > free_bytes:
        fit = most_gpu_tokens(num_ranks, limits, dtype, wire_dtype, stages, free_bytes)
        raise CapacityError(
            f"low-latency buffers take {sizes.total / 2**30:.2f} GiB of a GPU for {limits.max_tokens_per_rank} tokens "
            f"per rank and {free_bytes / 2**30:.2f} GiB are free; lower dispatch.max_tokens_per_rank to {fit}, or "
            "cache.memory_gib"
        )


def make_ranks(region: Region, group: EpGroup, dtype: torch.dtype, memory: str) -> "SlabRanks":
    """Returns the kernels' side of this rank, over regions that are allocated here; a collective call."""
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks

    regions: SymmetricRegions
    if memory == "nvshmem":
        from moe_serve.dispatch.gpu.nvshmem import nvshmem_regions

        regions = nvshmem_regions(region, group)
    else:
        from moe_serve.dispatch.gpu.ipc import ipc_regions

        regions = ipc_regions(region, group)
    return SlabRanks(regions, dtype, max_spins=spins_of(START_S))


def spins_of(deadline_s: float) -> int:
    """Returns how often a kernel looks before it gives a peer up.

    Always odd: Triton compiles a kernel anew for a multiple of 16 where the last number was none.
    """
    return min(int(deadline_s * LOOKS_PER_S), 2**31 - 1) | 1
