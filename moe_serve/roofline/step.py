"""Decode steps on a GPU that is not there: what the decoder would launch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, Pending, Ready, TransportRequest
from moe_serve.dispatch.gpu.launch_triton import SlabRanks
from moe_serve.dispatch.gpu.region import gpu_region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions
from moe_serve.dispatch.gpu.transport import GpuSlabAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import FAST
from moe_serve.models.decoder.moe_decoder import build_decoder, kv_layouts
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import no_weights
from moe_serve.roofline.launches import Recording, fake_gpu, recorded

GPU = torch.device("cuda", 0)
TRANSPORTS = ("local", "nvshmem")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class DecodeStep:
    """One rank's decode step.

    tokens: of this rank, each of another request with `context` tokens before it
    transport: "local" on one rank, else of GPUs that write into each other's memory
    redundant: slots beside those of one expert each
    """

    spec: ModelSpec
    tokens: int = 5
    context: int = 40
    num_ranks: int = 1
    transport: str = "local"
    wire_dtype: str = "auto"
    expert_form: Any = "dense"
    redundant: int = 0
    split: Any = "even"

    @property
    def placement(self) -> Placement:
        """Where the experts are."""
        spec = self.spec
        return Placement.trivial(
            spec.num_moe_layers, spec.num_logical, self.num_ranks, self.redundant, moe_layer_ids=spec.moe_layer_ids
        )


def record_step(step: DecodeStep) -> Recording:
    """Returns the launches of the forward of a step. Raises where the host would wait for the device."""
    spec = step.spec
    placement = step.placement
    with fake_gpu():
        share = WeightShare(spec, placement, 0, torch.bfloat16, GPU, step.expert_form)
        group = EpGroup(0, 1, GPU)
        parallel = ExpertParallel(
            rank=0,
            router=spec.router,
            all_to_all=transport_of(step, placement.slots_per_rank),
            replica_map=ReplicaMap(placement, GPU, step.split),
            recorder=LoadRecorder(placement.num_layers, placement.num_logical, group),
            max_tokens_per_rank=step.tokens,
            numerics=FAST,
        )
        decoder = build_decoder(spec, no_weights(share), parallel, GPU)
        num_blocks = step.tokens * (-(-(step.context + 1) // BLOCK_SIZE))
        cache = KvCache(kv_layouts(spec), num_blocks, BLOCK_SIZE, torch.bfloat16, GPU)
        batch = decode_batch(step)
        run: Any = decoder.run
        run.capture = lambda launch: (lambda: None, launch())  # nothing runs in either case
        for _ in "12":  # the first one makes what stays, the second one is captured
            with recorded() as recording:
                clock: Any = parallel.clock
                clock.turn = recording.turn
                decoder.forward(batch, cache, 1)
    return recording


def decode_batch(step: DecodeStep) -> ForwardBatch:
    """Returns a batch of decodes, whose numbers nobody knows."""
    rows, length = step.tokens, step.context + 1
    ids, positions, slots, lens, logit_rows = (torch.empty(rows, dtype=torch.int64, device=GPU) for _ in range(5))
    starts = torch.empty(rows + 1, dtype=torch.int32, device=GPU)
    tables = torch.empty(rows, -(-length // BLOCK_SIZE), dtype=torch.int32, device=GPU)
    tensors = ids, positions, slots, lens, logit_rows, starts, tables
    return ForwardBatch(*tensors, BLOCK_SIZE, rows, rows, (length,) * rows, (1,) * rows)


class _OfSeveralRanks(GpuSlabAllToAll):
    """The transport without the collective that gathers counts."""

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return Ready(counts.new_empty(self._ranks.region.num_ranks, *counts.shape))


def transport_of(step: DecodeStep, slots_per_rank: int) -> AnyAllToAll:
    """Returns one rank's end of a transport."""
    spec, fp8_rows = step.spec, step.expert_form == "fp8"
    limits = BufferLimits(step.tokens, spec.hidden, spec.topk, slots_per_rank)
    request = TransportRequest("local", limits, torch.bfloat16, step.wire_dtype, fp8_rows=fp8_rows)
    group = EpGroup(0, 1, GPU)
    if step.transport == "local":
        return make_all_to_all(group, request)
    region = gpu_region(step.num_ranks, limits, torch.bfloat16, step.wire_dtype, stages=True)
    peers = torch.empty(step.num_ranks, dtype=torch.int64, device=GPU)
    regions = SymmetricRegions(region, peers, 0, 1, None)
    return _OfSeveralRanks(SlabRanks(regions, torch.bfloat16, keep_fp8=fp8_rows), group)
