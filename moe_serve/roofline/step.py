"""Steps on a GPU that is not there: what the decoder would launch.

A step fails to record where the host would wait for the device. But prefills over several ranks go by
torch.distributed, whose receives need sizes: there the host waits, and the sizes are those of experts chosen evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, Pending, Ready, TransportRequest
from moe_serve.dispatch.collective import CollectiveAllToAll, Sizes
from moe_serve.dispatch.gpu.launch_triton import SlabRanks
from moe_serve.dispatch.gpu.region import gpu_region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions
from moe_serve.dispatch.gpu.transport import GpuSlabAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.wire import Wire, make_wire
from moe_serve.ep.expert_form import ExpertForm
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import FAST
from moe_serve.models.decoder.moe_decoder import MoeDecoder, build_decoder, kv_layouts
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_share import WeightShare, fp8_projections
from moe_serve.models.weights import no_weights
from moe_serve.roofline.launches import Recording, fake_gpu, recorded

GPU = torch.device("cuda", 0)
Transport = Literal["local", "slabs", "collective"]
BLOCK_SIZE = 16


@dataclass(frozen=True)
class RankStep:
    """One rank's step: of decodes, or of prompts.

    sequences:  of this rank
    context:    tokens of each in the cache before the step
    new_tokens: of each in the step; 1: they decode
    transport:  "local" on one rank; between several "slabs" (GPUs write into each other's memory), or "collective"
    redundant:  slots beside those of one expert each
    cache_dtype: in which keys and values are cached
    """

    spec: ModelSpec
    sequences: int = 5
    context: int = 40
    new_tokens: int = 1
    num_ranks: int = 1
    transport: Transport = "local"
    wire_dtype: str = "auto"
    expert_form: ExpertForm = "dense"
    redundant: int = 0
    split: Any = "even"
    cache_dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return self.sequences * self.new_tokens

    @property
    def length(self) -> int:
        """Tokens of a sequence behind the step."""
        return self.context + self.new_tokens

    @property
    def placement(self) -> Placement:
        """Where the experts are."""
        spec = self.spec
        return Placement.trivial(
            spec.num_moe_layers, spec.num_logical, self.num_ranks, self.redundant, moe_layer_ids=spec.moe_layer_ids
        )

    @property
    def share(self) -> WeightShare:
        """The weights of a rank; projections are in FP8 where experts are and the checkpoint has them so."""
        spec, form = self.spec, self.expert_form
        fp8_dense = fp8_projections(spec, None) if form == "fp8" else frozenset()
        return WeightShare(spec, self.placement, 0, torch.bfloat16, GPU, form, fp8_dense=fp8_dense)


def record_step(step: RankStep) -> Recording:
    """Returns the launches of the forward of a step. Raises where the host would wait, but for sizes of receives."""
    decodes, waits = step.new_tokens == 1, step.transport == "collective"
    with fake_gpu():
        ready = ReadyStep.of(step)
        run: Any = ready.decoder.run
        run.capture = lambda launch: (launch(), lambda: None)[1]  # nothing runs in either case
        for _ in range(2 if decodes else 1):  # a first decode makes what stays, the second one is captured
            with recorded(takes_copies=waits, takes_reads=waits) as recording:
                clock: Any = ready.parallel.clock
                clock.turn = recording.turn
                ready.forward(ready.batch)
    return recording


@dataclass(frozen=True)
class ReadyStep:
    """A rank that has weights and a cache for a step, without memory. Made and used in `fake_gpu`.

    batch: of the step
    """

    decoder: MoeDecoder
    parallel: ExpertParallel
    cache: KvCache
    batch: ForwardBatch

    @classmethod
    def of(cls, step: RankStep) -> "ReadyStep":
        """Returns it with as many blocks in the cache as the step has."""
        spec, placement = step.spec, step.placement
        parallel = ExpertParallel(
            rank=0,
            router=spec.router,
            all_to_all=_transport_of(step, placement.slots_per_rank),
            replica_map=ReplicaMap(placement, GPU, step.split),
            recorder=LoadRecorder(placement.num_layers, placement.num_logical, EpGroup(0, 1, GPU)),
            max_tokens_per_rank=step.tokens,
            numerics=FAST,
        )
        decoder = build_decoder(spec, no_weights(step.share), parallel, GPU)
        batch = batch_of([(step.new_tokens, step.length)] * step.sequences)
        num_blocks = step.sequences * -(-step.length // BLOCK_SIZE)
        cache = KvCache(kv_layouts(spec), num_blocks, BLOCK_SIZE, step.cache_dtype, GPU, torch.bfloat16)
        return cls(decoder, parallel, cache, batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns the logits of a batch, in one round of the MoE layers."""
        return self.decoder.forward(batch, self.cache, 1)


def batch_of(sequences: Sequence[tuple[int, int]]) -> ForwardBatch:
    """Returns a batch whose numbers nobody knows. sequences: new tokens of each, and all behind them; decodes first"""
    new_tokens, lengths = zip(*sequences, strict=True)
    num, rows = len(sequences), sum(new_tokens)
    ids, positions, slots = (torch.empty(rows, dtype=torch.int64, device=GPU) for _ in range(3))
    lens, logit_rows = (torch.empty(num, dtype=torch.int64, device=GPU) for _ in range(2))
    starts = torch.empty(num + 1, dtype=torch.int32, device=GPU)
    tables = torch.empty(num, -(-max(lengths) // BLOCK_SIZE), dtype=torch.int32, device=GPU)
    tensors = ids, positions, slots, lens, logit_rows, starts, tables
    return ForwardBatch(*tensors, BLOCK_SIZE, rows, new_tokens.count(1), lengths, new_tokens)


class _Slabs(GpuSlabAllToAll):
    """The transport without the collective that gathers counts."""

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        gathered = counts.new_empty(self._ranks.region.num_ranks, *counts.shape)
        return Ready(gathered.copy_(counts))  # one launch, as the collective is


class _Collective(CollectiveAllToAll):
    """The transport without a process group: what it sends is lost, and what it receives has the sizes of an even load.

    sizes: entries and rows between any two ranks
    """

    def __init__(self, num_ranks: int, slots_per_rank: int, wire: Wire, sizes: Sizes, keep_fp8: bool):
        group: Any = object()
        super().__init__(EpGroup(0, num_ranks, GPU, group), slots_per_rank, wire, keep_fp8=keep_fp8)
        self._even = sizes

    def _on_host(self, sizes: Tensor) -> Sizes:
        return self._even

    def _is_small(self, slot_counts: Tensor, row_bytes: int) -> bool:
        return False  # a prompt's rows are worth a round of sizes

    def _all_to_all(self, phase: str, out: Tensor, *_: Any) -> Pending[Tensor]:
        return Ready(out)


def _transport_of(step: RankStep, slots_per_rank: int) -> AnyAllToAll:
    """Returns one rank's end of a transport."""
    spec, fp8_rows, num_ranks = step.spec, step.expert_form == "fp8", step.num_ranks
    limits = BufferLimits(step.tokens, spec.expert_hidden, spec.topk, slots_per_rank)
    request = TransportRequest("local", limits, torch.bfloat16, step.wire_dtype, fp8_rows=fp8_rows)
    group = EpGroup(0, 1, GPU)
    if step.transport == "local":
        return make_all_to_all(group, request)
    if step.transport == "collective":
        wire = make_wire(step.wire_dtype, torch.bfloat16)
        return _Collective(num_ranks, slots_per_rank, wire, even_sizes(step), fp8_rows)
    region = gpu_region(num_ranks, limits, torch.bfloat16, step.wire_dtype, stages=True)
    peers = torch.empty(num_ranks, dtype=torch.int64, device=GPU)
    own = torch.empty(1, region.region_bytes, dtype=torch.uint8, device=GPU)
    regions = SymmetricRegions(region, peers, 0, 1, own, own=own)
    return _Slabs(SlabRanks(regions, torch.bfloat16, keep_fp8=fp8_rows), group)


def even_sizes(step: RankStep) -> Sizes:
    """Returns what a rank sends to each, and receives, where experts are chosen evenly."""
    ranks = step.num_ranks
    rows = step.tokens * ranks * (1 - (1 - 1 / ranks) ** step.spec.topk)  # one for each rank of a token
    return Sizes(_even(step.tokens * step.spec.topk, ranks), _even(round(rows), ranks))


def _even(amount: int, num_ranks: int) -> list[int]:
    """Returns what each rank gets of an amount."""
    return [amount * (rank + 1) // num_ranks - amount * rank // num_ranks for rank in range(num_ranks)]
