"""Runs a decoder on chosen chunks, as the engine does, and keeps the logits of every position."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.group_quantised import Activations
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.models.checkpoint_parts import as_stored
from moe_serve.models.decoder import moe_decoder
from moe_serve.models.decoder.moe_decoder import MoeDecoder, build_decoder, kv_layouts, state_shapes
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import LoadedWeights, load_weights
from tests.models.reference_moe import ReferenceMoe

BLOCK_SIZE = 8
NUM_STATES = 64  # of requests, where the model keeps any
INVARIANT = Numerics(row_tile=4)


def one_rank(spec: ModelSpec) -> Placement:
    return Placement.trivial(spec.num_moe_layers, spec.num_logical, 1, moe_layer_ids=spec.moe_layer_ids)


def one_rank_parallel(spec: ModelSpec, numerics: Numerics, dtype: torch.dtype = torch.float32) -> ExpertParallel:
    placement = one_rank(spec)
    group = EpGroup(0, 1, torch.device("cpu"))
    limits = BufferLimits(4096, spec.expert_hidden, spec.topk, placement.slots_per_rank)
    transport = TransportRequest("local", limits, dtype, cpu_kernels=numerics.compiled)
    return ExpertParallel(
        rank=0,
        router=spec.router,
        all_to_all=make_all_to_all(group, transport),
        replica_map=ReplicaMap(placement),
        recorder=LoadRecorder(placement.num_layers, placement.num_logical, group),
        max_tokens_per_rank=4096,
        numerics=numerics,
    )


def load_decoder(
    folder: Path,
    numerics: Numerics = FAST,
    dtype: torch.dtype = torch.float32,
    moe_layer: Callable[..., Any] = ReferenceMoe,
) -> MoeDecoder:
    """moe_layer: made in place of MoeLayer, with its arguments"""
    spec = as_stored(read_spec(folder), folder)
    # The plain MoE layer of tests takes experts as they are, the real one takes them packed.
    stored = StoredWeights.of(spec, folder) if numerics.compiled and moe_layer is MoeLayer else None
    weights = load_weights(folder, WeightShare(spec, one_rank(spec), 0, dtype, "cpu", stored=stored))
    return decoder_with(moe_layer, spec, weights, numerics, dtype)


def share_in_groups(path: Path, activations: Activations) -> WeightShare:
    """Returns the share of one rank that keeps experts in the groups in which they are stored."""
    spec = read_spec(path)
    stored = StoredWeights.of(spec, path)
    return WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "groups", stored, activations)


def decoder_with(
    moe_layer: Callable[..., Any],
    spec: ModelSpec,
    weights: LoadedWeights,
    numerics: Numerics = FAST,
    dtype: torch.dtype = torch.float32,
) -> MoeDecoder:
    with mock.patch.object(moe_decoder, "MoeLayer", moe_layer):
        return build_decoder(spec, weights, one_rank_parallel(spec, numerics, dtype), "cpu")


class Runner:
    """Sequences on one decoder with a cache of their own; blocks are handed out in a scattered order."""

    def __init__(
        self,
        decoder: MoeDecoder,
        numerics: Numerics,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        overlap: bool = False,
        cache_dtype: torch.dtype | None = None,
    ):
        """overlap: batches run in halves;  cache_dtype: of 8 bits; None: dtype"""
        self.decoder = decoder
        self.overlap = overlap
        self.numerics = numerics
        self.tables = BlockTables(BLOCK_SIZE)
        kept = cache_dtype or dtype
        states = state_shapes(decoder.spec)
        self.cache = KvCache(
            kv_layouts(decoder.spec), num_blocks, BLOCK_SIZE, kept, "cpu", dtype, states, NUM_STATES if states else 0
        )
        self._free_states = list(range(NUM_STATES)) if states else []
        self._free = [(i * 7) % num_blocks for i in range(num_blocks)]  # 7 and num_blocks have no common factor
        self.logits: dict[str, dict[int, Tensor]] = {}  # request id -> position -> [vocab]

    def request(self, name: str, ids: Sequence[int], shared_blocks: Sequence[int] = ()) -> Request:
        """Returns a request; shared_blocks hold the keys of its first tokens already."""
        request = Request(name, 0, list(ids), [], SamplingParams(), 0)
        self.tables.extend(request, list(shared_blocks))
        request.num_computed = len(shared_blocks) * BLOCK_SIZE
        self.logits[name] = {}
        if self._free_states:
            request.state_slot = self._free_states.pop(0)
            request.state_from = self._snapshot(ids, request.num_computed) if shared_blocks else -1
        return request

    def _snapshot(self, ids: Sequence[int], num_tokens: int) -> int:
        """Returns the slot of a state behind so many tokens, which another request has kept in passing."""
        other = self.request("kept", ids)
        other.snapshot_at, other.snapshot_slot = num_tokens, self._free_states.pop()
        self.prefill([other])
        return other.snapshot_slot

    def schedule(self, chunks: Iterable[tuple[Request, int]]) -> list[ScheduledChunk]:
        """Returns (request, number of tokens) as chunks of requests that have the blocks for them."""
        scheduled = []
        for request, length in chunks:
            end = request.num_computed + length
            while len(request.block_ids) * BLOCK_SIZE < end:
                self.tables.extend(request, [self._free.pop()])
            scheduled.append(ScheduledChunk(request, request.num_computed, length, end == request.num_known))
        return scheduled

    def step(self, chunks: Iterable[tuple[Request, int]]) -> None:
        """Runs (request, number of tokens) together in one forward and keeps the logits of every computed position."""
        scheduled = self.schedule(chunks)
        batch = ForwardBatch.build(scheduled, self.tables, "cpu", self.numerics)
        batch = batch._replace(logit_rows=torch.arange(batch.num_tokens))
        rows = iter(self.decoder.forward(batch, self.cache, 1, self.overlap).clone())  # the next step writes there
        for chunk in sorted(scheduled, key=lambda chunk: chunk.length):  # as the batch orders them
            for position in range(chunk.start, chunk.start + chunk.length):
                self.logits[chunk.request.request_id][position] = next(rows)
            chunk.request.num_computed += chunk.length
            chunk.request.state_from = chunk.request.state_slot

    def prefill(self, requests: Sequence[Request], chunk: int | None = None) -> None:
        """Computes all known tokens, `chunk` at a time and all requests together; None: in one piece."""
        while True:
            left = [(r, r.num_known - r.num_computed) for r in requests if r.num_known > r.num_computed]
            if not left:
                return
            self.step([(r, n if chunk is None else min(n, chunk)) for r, n in left])

    def greedy(self, requests: Sequence[Request], num_tokens: int) -> None:
        """Decodes all requests together; output_ids hold the tokens afterwards."""
        for _ in range(num_tokens):
            for request in requests:
                request.output_ids.append(int(self.logits[request.request_id][request.num_known - 1].argmax()))
            self.step([(request, 1) for request in requests])

    def stacked(self, request: Request) -> Tensor:
        """Returns the logits of all computed positions, [positions, vocab]."""
        found = self.logits[request.request_id]
        return torch.stack([found[position] for position in sorted(found)])
