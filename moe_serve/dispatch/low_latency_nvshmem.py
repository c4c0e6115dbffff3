"""The AllToAll contract over the low-latency GPU kernels: one rank of the process, its peers through NVSHMEM.

Results arrive as MaskedRows in the order of all transports (slot, source rank, token), except that a token that names
one slot twice sends one row, whose result both entries use. Two handles may be in flight; they take lanes in turn, so a
handle's combine must be received before the second dispatch after its own is sent, and captured graphs must hold a
whole number of turns or none in flight at their ends.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import Deferred, Dispatched, EpGroup, MaskedRows, Pending, Ready
from moe_serve.dispatch.symmetric_gpu import Sent
from moe_serve.errors import ConfigError
from moe_serve.kernels.low_latency_region import Region

if TYPE_CHECKING:  # loads triton
    from moe_serve.dispatch.low_latency_triton import LowLatencyRanks


class LowLatencyAllToAll:
    """AllToAll of one rank over ready regions; see make_low_latency for how they come to be."""

    def __init__(self, ranks: "LowLatencyRanks", group: EpGroup, num_lanes: int):
        self._ranks, self._group, self._num_lanes = ranks, group, num_lanes
        self._lane = 0

    @property
    def late(self) -> Tensor:
        """[R] int64 on the device: the last round that each rank missed; the engine reads it between steps."""
        return self._ranks.late[0]

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        """As the contract says, by one collective of the process group: small, and only the exact split needs it."""
        if self._group.process_group is None:
            return Ready(counts[None])
        gathered = counts.new_empty(self._group.num_ranks, counts.shape[0])
        work = dist.all_gather_into_tensor(gathered, counts, group=self._group.process_group, async_op=True)

        def receive() -> Tensor:
            work.wait()
            return gathered

        return Deferred(receive)

    def dispatch(self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None) -> Pending[Dispatched]:
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


def low_latency_region(
    num_ranks: int, slots_per_rank: int, max_tokens_per_rank: int, hidden: int, topk: int, dtype: torch.dtype,
    wire_dtype: str, stages: bool,
) -> Region:  # fmt: skip
    """Returns the region that these settings need; its region_bytes are what every rank must have free.

    slots_per_rank counts replicas: sizing by logical experts is the usual way to run out of room after a rebalance.
    Raises ConfigError for a wire dtype that these kernels do not carry.
    """
    match wire_dtype:
        case "fp8":
            value_bytes, home_value_bytes = 1, 2
        case "auto":
            value_bytes = home_value_bytes = dtype.itemsize
        case "bf16" if dtype == torch.bfloat16:
            value_bytes = home_value_bytes = 2
        case _:
            raise ConfigError(
                f"dispatch.wire_dtype is {wire_dtype!r} with compute dtype {dtype}; low latency on GPUs carries "
                "fp8 or the compute dtype: set it to fp8 or auto"
            )
    return Region(num_ranks, slots_per_rank, max_tokens_per_rank, hidden, topk, value_bytes, home_value_bytes, stages)


def make_low_latency(
    group: EpGroup, slots_per_rank: int, max_tokens_per_rank: int, hidden: int, topk: int, dtype: torch.dtype,
    wire_dtype: str = "auto",
) -> LowLatencyAllToAll:  # fmt: skip
    """Allocates this rank's region in NVSHMEM's heap, which must have been started, and returns the transport.

    Raises ConfigError for fp8 on a GPU without e4m3, inside a graph capture, and when NVSHMEM is missing.
    """
    from moe_serve.dispatch.low_latency_triton import LowLatencyRanks
    from moe_serve.dispatch.symmetric_nvshmem import nvshmem_regions

    if wire_dtype == "fp8" and torch.cuda.get_device_capability(group.device) < (8, 9):
        raise ConfigError(
            f"dispatch.wire_dtype is fp8 but {torch.cuda.get_device_name(group.device)} has no e4m3 (sm_89 and "
            "later have); set dispatch.wire_dtype: auto"
        )
    region = low_latency_region(
        group.num_ranks, slots_per_rank, max_tokens_per_rank, hidden, topk, dtype, wire_dtype, stages=True
    )
    ranks = LowLatencyRanks(nvshmem_regions(region, group.rank, group.device), dtype)
    return LowLatencyAllToAll(ranks, group, region.num_lanes)
