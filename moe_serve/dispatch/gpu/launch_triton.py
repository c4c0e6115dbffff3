"""Low-latency dispatch and combine on GPUs: the segmented layout over symmetric memory, launched in four halves.

    dispatch_send     quantise, write rows and flags into the peers' regions
    dispatch_receive  wait for flags, close the gaps: slabs whose first rows are filled, as masked GEMMs take them
    combine_send      write each result to its place on the source rank; end the round
    combine_receive   wait, add weighted in top-k order

Source rank r owns rows [r * T_max, (r + 1) * T_max) of every slot's slab: the n-th token of r that names slot s lies in
row r * T_max + n. A token takes a row of a slot once, also where its ids name the slot twice, so T_max rows suffice.

One object drives one rank of its process, or V virtual ranks on one GPU: tensors have a leading dimension for them, 1
or V. Nothing is read back to the host and all addresses are fixed, so the four calls can be captured in a graph;
building the object inside a capture is refused. A round that misses a peer ends too: `late` names it, the step is void.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.dispatch.buffer_sizes import check_capacity
from moe_serve.dispatch.gpu.receive_triton import combine_receive_kernel, dispatch_receive_kernel
from moe_serve.dispatch.gpu.send_triton import (
    TOKENS_COUNTED,
    combine_send_kernel,
    count_before_kernel,
    dispatch_send_kernel,
)
from moe_serve.dispatch.gpu.symmetric import Sent, SymmetricRegions, refuse_capture
from moe_serve.kernels.forms import num_groups

SLOTS_PER_PROGRAM = 16  # counts announced by one program of dispatch_send
ROW_SPLITS = 2  # programs that share the rows of one (slot, source) at the receiver
COMBINE_SPLITS = 8  # programs that share the rows of one slot when results are sent
COMBINE_BLOCK = 1024  # channels of one program of combine_receive: 8 for each of 128 threads
DEFAULT_MAX_SPINS = 1 << 24  # seconds; the host's deadline is shorter

_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Slabs:
    """The rows that one dispatch brought, on the device, at addresses that never change.

    x:             [V, S, capacity, H] compute dtype, or float8_e4m3fn when FP8 rows stay FP8
    scale:         [V, S, capacity, ceil(H / 128)] float32 with FP8 rows, else None
    rows_per_slot: [V, S] int64
    origin:        [V, S, capacity] int64, source rank << 32 | t * K + k
    """

    x: Tensor
    scale: Tensor | None
    rows_per_slot: Tensor
    origin: Tensor


class SlabRanks:
    """The ranks of this process. A handle's combine must be received before its queue is used again."""

    def __init__(
        self, regions: SymmetricRegions, dtype: torch.dtype, keep_fp8: bool = False,
        max_spins: int = DEFAULT_MAX_SPINS,
    ) -> None:  # fmt: skip
        """dtype: of hidden rows and results;  keep_fp8: hand FP8 rows on as they are (needs an FP8 wire);
        max_spins: reads of a flag before a peer counts as late"""
        refuse_capture("low-latency buffers")
        region = regions.region
        self._regions, self.region, self.max_spins = regions, region, max_spins
        self._fp8 = region.value_bytes == 1
        self._keep_fp8 = keep_fp8 and self._fp8
        self._wire = tl.float8e4nv if self._fp8 else _TL_DTYPE[dtype]
        self._result_wire = tl.bfloat16 if self._fp8 else _TL_DTYPE[dtype]
        device, local = regions.peers.device, regions.num_local
        rows = (local, region.slots_per_rank, region.capacity)
        x_dtype = torch.float8_e4m3fn if self._keep_fp8 else dtype
        queues = range(region.num_queues)
        self._peers = [regions.peers + queue * region.queue_bytes for queue in queues]
        # [V] int64 each: the last round that has ended, for dispatch, and the one that has been received, for combine.
        # So no launch reads what it writes, and a round needs no launch of its own to be counted.
        self._finished = [torch.zeros(local, dtype=torch.int64, device=device) for _ in queues]
        self._round_now = [torch.zeros(local, dtype=torch.int64, device=device) for _ in queues]
        self._slabs = [
            Slabs(
                torch.empty(*rows, region.hidden, dtype=x_dtype, device=device),
                torch.empty(*rows, num_groups(region.hidden), device=device) if self._keep_fp8 else None,
                torch.zeros(rows[:2], dtype=torch.int64, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
            )
            for _ in queues
        ]
        # Where experts write results that need not be copied before they are sent; None: there is no such place.
        gives = torch.bfloat16 if self._keep_fp8 else dtype
        fits = gives == (torch.bfloat16 if self._fp8 else dtype)
        self.staged = [regions.staged_results(queue, gives) if fits else None for queue in queues]
        self.late = torch.zeros(local, region.num_ranks, dtype=torch.int64, device=device)
        """[V, R] int64: the last round in which this rank waited for that one in vain; 0 = never."""

    def dispatch_send(self, x: Tensor, ids: Tensor, queue: int = 0) -> Sent:
        """x: [V, T, H], ids: [V, T, K] int64 physical ids, -1 = none, T <= max_tokens, may be 0."""
        region, regions = self.region, self._regions
        num_tokens, topk = ids.shape[1:]
        check_capacity(num_tokens, region.max_tokens)
        assert (topk, x.shape[2]) == (region.topk, region.hidden), "shapes of the region"
        x, ids = x.contiguous(), ids.contiguous()
        num_slots = region.num_ranks * region.slots_per_rank
        grid = (num_tokens + triton.cdiv(num_slots, SLOTS_PER_PROGRAM), regions.num_local)
        regions.launcher(dispatch_send_kernel)[grid](
            x, ids, self._count_before(ids), self._peers[queue], self._finished[queue], regions.first_rank, num_tokens,
            region.hidden, region.num_ranks, region.slots_per_rank, region.max_tokens,
            region.counts_at, region.arrived_at, region.rows_at, region.staged_at, region.row_bytes, region.scales_at,
            TOPK=topk, W=triton.next_power_of_2(topk), HEADER_INTS=region.header_ints,
            HEADER=triton.next_power_of_2(region.header_ints), GROUPS=triton.next_power_of_2(num_groups(region.hidden)),
            SLOTS=SLOTS_PER_PROGRAM, WIRE=self._wire, FP8=self._fp8, STAGES=region.stages, NVSHMEM=regions.nvshmem,
            num_warps=8,
        )  # fmt: skip
        return Sent(queue, ids)

    def _count_before(self, ids: Tensor) -> Tensor | None:
        """Returns the rows of each slot up to every TOKENS_COUNTED-th token; None where there is none to count."""
        local, num_tokens, topk = ids.shape
        if num_tokens <= TOKENS_COUNTED.value:
            return None
        num_slots = self.region.num_ranks * self.region.slots_per_rank
        shape = (local, triton.cdiv(num_tokens, TOKENS_COUNTED.value) + 1, num_slots)
        before = torch.empty(shape, dtype=torch.int32, device=ids.device)
        grid = (triton.cdiv(num_slots, SLOTS_PER_PROGRAM), local)
        count_before_kernel[grid](ids, before, num_tokens, num_slots, TOPK=topk, SLOTS=SLOTS_PER_PROGRAM)
        return before

    def dispatch_receive(self, sent: Sent) -> Slabs:
        """Returns the slabs of that handle; valid until its queue is used again."""
        region, regions, slabs = self.region, self._regions, self._slabs[sent.queue]
        grid = (region.slots_per_rank * region.num_ranks * ROW_SPLITS, regions.num_local)
        regions.launcher(dispatch_receive_kernel)[grid](
            slabs.x, slabs.scale, slabs.origin, slabs.rows_per_slot, self.late, self._peers[sent.queue],
            self._finished[sent.queue], self._round_now[sent.queue], regions.first_rank, self.max_spins,
            region.hidden, region.num_ranks, region.slots_per_rank, region.max_tokens,
            region.counts_at, region.arrived_at, region.rows_at, region.row_bytes, region.scales_at,
            TOPK=region.topk, HEADER_INTS=region.header_ints, HEADER=triton.next_power_of_2(region.header_ints),
            GROUPS=triton.next_power_of_2(num_groups(region.hidden)), RANKS=triton.next_power_of_2(region.num_ranks),
            SPLITS=ROW_SPLITS, WIRE=self._wire, FP8=self._fp8, UNPACK_FP8=not self._keep_fp8, num_warps=8,
        )  # fmt: skip
        return slabs

    def combine_send(self, sent: Sent, results: Tensor) -> None:
        """results: [V, S, capacity, H], rows where dispatch_receive put the inputs; `staged` of the queue, or other."""
        region, regions, slabs, queue = self.region, self._regions, self._slabs[sent.queue], sent.queue
        grid = (region.slots_per_rank * COMBINE_SPLITS + 1, regions.num_local)
        regions.launcher(combine_send_kernel)[grid](
            results, slabs.origin, slabs.rows_per_slot, self._peers[queue], self._round_now[queue],
            self._finished[queue], regions.first_rank, region.hidden, region.num_ranks, region.slots_per_rank,
            region.max_tokens, region.result_arrived_at, region.result_rows_at, region.result_staged_at,
            region.result_row_bytes, region.done_at,
            SPLITS=COMBINE_SPLITS, BLOCK=triton.next_power_of_2(region.hidden),
            RANKS=triton.next_power_of_2(region.num_ranks), WIRE=self._result_wire, STAGES=region.stages,
            COPIES=results is not self.staged[queue], NVSHMEM=regions.nvshmem, num_warps=8,
        )  # fmt: skip

    def combine_receive(self, sent: Sent, weights: Tensor) -> Tensor:
        """weights: [V, T, K] float32 -> [V, T, H]; a token without any expert is zero."""
        region, regions, queue = self.region, self._regions, sent.queue
        num_tokens = sent.ids.shape[1]
        dtype = self._slabs[queue].x.dtype if not self._keep_fp8 else torch.bfloat16
        out = torch.empty(regions.num_local, num_tokens, region.hidden, dtype=dtype, device=weights.device)
        splits = triton.cdiv(region.hidden, COMBINE_BLOCK)
        grid = (num_tokens * splits + 1, regions.num_local)
        regions.launcher(combine_receive_kernel)[grid](
            out, sent.ids, weights.contiguous(), self.late, self._peers[queue], self._round_now[queue],
            regions.first_rank, self.max_spins, num_tokens, region.hidden, region.num_ranks, region.slots_per_rank,
            region.result_arrived_at, region.done_at, region.result_rows_at, region.result_row_bytes,
            TOPK=region.topk, W=triton.next_power_of_2(region.topk), RANKS=triton.next_power_of_2(region.num_ranks),
            SPLITS=splits, BLOCK=COMBINE_BLOCK, WIRE=self._result_wire,
        )  # fmt: skip
        return out
