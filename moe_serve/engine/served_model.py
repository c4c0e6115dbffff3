"""Everything of one rank that computes: decoder, experts, transport, KV cache and load recorder, built from the config.

`build_served_model` is the one place where attention, experts and balancing meet; the engine above it sees requests and
steps, the rooms below it see tensors.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, bytes_per_block
from moe_serve.config import ServeConfig, model_dir, served_name
from moe_serve.dispatch.base import AllToAll, EpGroup, FollowsSteps, MeasuresWaits
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.membership import GoesOnWithoutTheLost, Membership
from moe_serve.engine.load_windows import LoadWindows
from moe_serve.engine.messages import ModelLimits
from moe_serve.ep.expert_form import MEANING, ExpertForm, choose_expert_form, has_e4m3
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, make_moe_layer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import CapacityError, ConfigError
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.log import get_logger
from moe_serve.models.moe_decoder import MoeDecoder, build_decoder, kv_layouts
from moe_serve.models.spec import ModelSpec, read_spec
from moe_serve.models.weights import dummy_weights, load_weights

Progress = Callable[[str, float], None]  # (phase, fraction done)
MANY_TOKENS = 1 << 30  # more than any step has


@dataclass
class ServedModel:
    """A model that is ready to run steps on one rank."""

    spec: ModelSpec
    decoder: MoeDecoder
    cache: KvCache
    placement: Placement
    recorder: LoadRecorder
    limits: ModelLimits
    num_blocks: int
    numerics: Numerics
    device: torch.device
    all_to_all: AllToAll
    replica_map: ReplicaMap
    info: dict[str, Any]
    on_record: Callable[[LoadRecord], None] | None = None

    def __post_init__(self) -> None:
        self._windows = LoadWindows(self.recorder, self.placement)

    @property
    def batch_form(self) -> tuple[int, torch.device, Numerics]:
        """Returns what `ForwardBatch.build` needs beside the chunks."""
        return self.limits.block_size, self.device, self.numerics

    @property
    def waited_s(self) -> list[float]:
        """Seconds that this rank has waited for each other one; empty where the transport does not measure it."""
        return self.all_to_all.waited_s if isinstance(self.all_to_all, MeasuresWaits) else []

    @property
    def split_outcomes(self) -> list[int]:
        """Batches that the exact split has proven at once, proven after repair, not proven; empty where none serves."""
        outcomes = self.replica_map.split_outcomes
        return [] if outcomes is None else [int(number) for number in outcomes.cpu()]

    def begin_step(self, max_tokens: int) -> None:
        """Tells a transport that chooses by the size of the step. max_tokens: of the plan, equal on all ranks"""
        if isinstance(self.all_to_all, FollowsSteps):
            self.all_to_all.begin_step(max_tokens)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns the logits of the rows that are sampled, [len(logit_rows), vocab] float32.

        Raises PeerError when a peer's rows did not come: the step is void, and `void_step` forgets what it counted.
        """
        logits = self.decoder.forward(batch, self.cache, num_chunks, overlap)
        if isinstance(self.all_to_all, FollowsSteps):
            self.all_to_all.end_step()
        self.recorder.step_done()
        if self.membership is not None:
            self.membership.step_done()
        return logits

    @property
    def membership(self) -> Membership | None:
        """Who takes part; None where the transport cannot go on without a rank."""
        return self.all_to_all.membership if isinstance(self.all_to_all, GoesOnWithoutTheLost) else None

    def void_step(self) -> None:
        """Forgets what a step has counted that did not come to its end, and records that some rank may not have."""
        self._windows.void()

    def activate(self, placement: Placement) -> None:
        """Serves with another placement of the same shape, whose experts are where it says, from the next step on."""
        self.replica_map.activate(placement)
        self.placement = placement

    def warm_up(self) -> None:
        """Runs empty steps through every layer and collective, so that the first request does not pay for it."""
        sizes = (0, MANY_TOKENS) if isinstance(self.all_to_all, FollowsSteps) else (0,)
        for max_tokens in sizes:  # both ways of a transport that chooses by size
            self.begin_step(max_tokens)
            self.forward(ForwardBatch.empty(self.device, self.numerics), 1)

    def come_back(self, first_step: int) -> None:
        """This rank was out: its load record begins with first_step, where that of the others does."""
        self._windows.come_back(first_step, self.placement)

    def close_window(self, step: int) -> None:
        """Ends the load record with the step before `step`. All ranks take part: it is a reduction.

        Raises PeerError when a peer does not: the record goes on.
        """
        self._windows.close(step, self.placement)

    def confirm_windows(self) -> None:
        """Hands on the records that were closed: all ranks have come through their reductions."""
        for record in self._windows.confirm():
            if self.on_record is not None:
                self.on_record(replace(record, model_id=self.limits.model_name))


def make_numerics(config: ServeConfig) -> Numerics:
    """Returns how reductions are cut under this configuration."""
    if config.engine.numerics == "fast":
        return FAST
    return Numerics(row_tile=config.engine.row_tile)


def compute_dtype(config: ServeConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of weights and activations; auto is float32 on CPU, where bfloat16 is several times slower."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    return names.get(config.model.dtype, auto)


def expert_form(config: ServeConfig, spec: ModelSpec, device: torch.device) -> ExpertForm:
    """Returns how experts are kept under this configuration. Raises ConfigError where the setting cannot be."""
    return choose_expert_form(config.model.expert_weights, spec.fp8_block, device.type, has_e4m3(device))


def make_placement(config: ServeConfig, spec: ModelSpec) -> Placement:
    """Returns where experts live at start: the trivial placement, or the one in eplb.init_expert_location."""
    num_ranks = config.parallel.num_ranks
    where = config.eplb.init_expert_location
    if where == "trivial":
        # Uneven experts are padded with empty slots; the remainder of a redundant count is given to experts, not
        # wasted.
        num_redundant = config.eplb.num_redundant_experts
        if num_redundant:
            num_redundant += -(spec.num_logical + num_redundant) % num_ranks
        return Placement.trivial(
            len(spec.moe_layer_ids), spec.num_logical, num_ranks, num_redundant, moe_layer_ids=spec.moe_layer_ids
        )
    from moe_serve.eplb.files.placements import read_placement
    from moe_serve.eplb.planner import plan_counts

    return read_placement(Path(where), num_ranks, spec.num_logical, spec.moe_layer_ids, plan_counts=plan_counts)


def num_cache_blocks(config: ServeConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> int:
    """Returns how many blocks the KV cache of one rank has. Raises CapacityError where one request could not fit."""
    block_size = config.cache.block_size
    size_bytes = bytes_per_block(kv_layouts(spec), block_size, dtype)
    num_blocks = config.cache.num_blocks or int(config.cache.memory_gib * 2**30 // size_bytes)
    # More than every running request at full length, twice over for reusable prefixes, would never be touched.
    if config.cache.num_blocks is None:
        num_blocks = min(num_blocks, 2 * config.engine.max_running_requests * -(-max_model_len // block_size))
    if num_blocks * block_size < 2:
        raise CapacityError(
            f"cache.memory_gib {config.cache.memory_gib:g} holds {num_blocks} blocks of {size_bytes / 2**20:.2f} MiB; "
            "raise cache.memory_gib or set cache.num_blocks"
        )
    return num_blocks


def build_served_model(config: ServeConfig, group: EpGroup, progress: Progress | None = None) -> ServedModel:
    """Returns this rank's part of the model, loaded and ready.

    progress: called with (phase, fraction) while weights are read
    Raises ModelError, PlacementError, ConfigError or CapacityError naming what does not fit.
    """
    report = progress or (lambda phase, fraction: None)
    started_s = time.monotonic()
    folder = model_dir(config.model)
    spec = read_spec(folder)
    device = group.device
    dtype = compute_dtype(config, device)
    numerics = make_numerics(config)
    placement = make_placement(config, spec)
    form = expert_form(config, spec, device)
    if form != "dense" and group.rank == 0:
        get_logger(__name__).info("%s expert weights: %s", form, MEANING[form])
    max_model_len = _max_model_len(config, spec)
    num_blocks = num_cache_blocks(config, spec, dtype, max_model_len)

    report("loading weights", 0.0)
    if config.model.load_format == "dummy":
        weights = dummy_weights(spec, placement, group.rank, dtype, device, config.model.seed, form)
    else:

        def report_bytes(num_done: int, num_total: int) -> None:
            report("loading weights", num_done / max(num_total, 1))

        weights = load_weights(folder, spec, placement, group.rank, dtype, device, report_bytes, form)
    loaded_s = time.monotonic()
    max_tokens_per_rank = config.dispatch.max_tokens_per_rank or config.engine.max_batch_tokens
    all_to_all = make_all_to_all(
        config.dispatch.backend,
        group,
        placement.slots_per_rank,
        dtype,
        config.dispatch.wire_dtype,
        max_tokens_per_rank=max_tokens_per_rank,
        hidden=spec.hidden,
        topk=spec.topk,
        deadline_s=config.dispatch.deadline_s or config.engine.step_deadline_s,
        compiled=config.dispatch.compiled,
        masked=None if config.dispatch.rows == "auto" else config.dispatch.rows == "masked",
        combine=config.dispatch.combine,
    )
    check_bits(all_to_all, config)
    # A transport that goes on without a rank also reduces without it; torch.distributed could not.
    gather = all_to_all.exchange_counts if isinstance(all_to_all, GoesOnWithoutTheLost) else None
    recorder = LoadRecorder(len(spec.moe_layer_ids), spec.num_logical, group, gather)
    replica_map = ReplicaMap(placement, device, config.eplb.split, config.dispatch.compiled)
    parallel = ExpertParallel(
        rank=group.rank,
        router=spec.router,
        all_to_all=all_to_all,
        replica_map=replica_map,
        recorder=recorder,
        max_tokens_per_rank=max_tokens_per_rank,
        numerics=numerics,
    )
    layer_rows = {layer_id: row for row, layer_id in enumerate(spec.moe_layer_ids)}

    def make_layer(
        layer_id: int,
        gate_weight: Tensor,
        correction_bias: Tensor | None,
        experts: dict[str, Tensor],
        shared: Callable[[Tensor], Tensor] | None,
    ) -> MoeLayer:
        return make_moe_layer(parallel, layer_rows[layer_id], gate_weight, correction_bias, experts, shared)

    decoder = build_decoder(spec, weights, make_layer, numerics, device)
    cache = KvCache(kv_layouts(spec), num_blocks, config.cache.block_size, dtype, device)
    limits = ModelLimits(
        model_name=served_name(config.model),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        max_prompt_len=min(max_model_len, num_blocks * config.cache.block_size) - 1,
        eos_token_ids=list(spec.eos_token_ids),
        block_size=config.cache.block_size,
    )
    info = {
        "model_type": spec.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "expert_weights": f"{form} ({MEANING[form]})",
        "device": str(device),
        "num_threads": torch.get_num_threads(),
        "bytes_read": weights.bytes_read,
        "weight_load_s": round(loaded_s - started_s, 3),
        "num_slots": placement.num_slots,
        "slots_per_rank": placement.slots_per_rank,
        "num_redundant_experts": placement.num_slots - spec.num_logical,
        "num_cache_blocks": num_blocks,
        "all_to_all": type(all_to_all).__name__,
        "all_to_all_note": all_to_all.note,
        "all_to_all_is_bitwise": all_to_all.is_bitwise,
        "numerics": config.engine.numerics,
    }
    return ServedModel(
        spec, decoder, cache, placement, recorder, limits, num_blocks, numerics, device, all_to_all, replica_map, info
    )


def check_bits(all_to_all: AllToAll, config: ServeConfig) -> None:
    """Raises ConfigError for a transport outside the bitwise class in batch_invariant, whoever chose it."""
    if config.engine.numerics == "batch_invariant" and not all_to_all.is_bitwise:
        raise ConfigError(
            f"dispatch.backend {config.dispatch.backend} gives {type(all_to_all).__name__} here ({all_to_all.note}), "
            "whose sums depend on where experts live, which engine.numerics batch_invariant excludes; set "
            "dispatch.backend: collective, or engine.numerics: fast"
        )


def _max_model_len(config: ServeConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return spec.max_position
    if wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len is {wanted} but the model knows {spec.max_position} positions; lower max_model_len"
        )
    return wanted
