"""Decides how a rank serves a model, before any weight is read: kernels, numerics, dtypes, placement, cache sizes."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import torch

from moe_serve.attention_dp.host_pages import slot_bytes
from moe_serve.attention_dp.kv_cache import KvLayout, bytes_per_block, state_bytes
from moe_serve.attention_dp.page_record import HEADER_BYTES, check_size
from moe_serve.attention_dp.scheduler import most_yielding_rows
from moe_serve.c_library import processor_features
from moe_serve.config import ServeConfig, model_dir
from moe_serve.engine.model.predictor_plan import make_placement, with_predictor
from moe_serve.ep.expert_form import ExpertForm, SlotForm, choose_activations, choose_expert_form, has_e4m3
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.make import ServedSplit
from moe_serve.errors import CapacityError, ConfigError
from moe_serve.kernels.cpu.library import AMX, CpuLibrary, find_cpu_library
from moe_serve.kernels.group_quantised import Activations
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.models.checkpoint_parts import as_stored
from moe_serve.models.decoder.moe_decoder import kv_layouts, state_shapes
from moe_serve.models.spec import CompressedSpec, GqaSpec, MlaSpec, ModelSpec
from moe_serve.models.weight_share import StoredWeights, WeightShare, fp8_projections

# Of attention kernels: the module, and where it is from.
_PACKAGES = {
    "flashinfer": ("flashinfer", "pip install flashinfer-python"),
    "flashmla": ("flash_mla", "pip install sgl-flash-mla"),
}


@dataclass(frozen=True)
class NumericsChoice:
    """The kernels and the class of numerics of a rank (docs/numerics.md).

    numerics: for the forward;  library: the compiled CPU kernels, None where torch or Triton computes
    kernels:  the kernels, in words;  why: the reason for this choice
    is_limited: experts have a capacity, so that the experts of a token depend on the rows beside it
    """

    numerics: Numerics
    library: CpuLibrary | None
    kernels: str
    why: str
    is_limited: bool = False

    @property
    def name(self) -> str:
        """The class as engine.numerics names it: batch_invariant or fast."""
        return "batch_invariant" if self.numerics.invariant and not self.is_limited else "fast"


@dataclass(frozen=True)
class ModelPlan:
    """The sizes and forms in which one rank serves a model.

    dtype:               of activations
    cache_dtype:         of the KV cache, the same one or of 8 bits
    choice:              kernels and numerics
    stored:              the dtypes in which weights are kept for the compiled CPU kernels; None: all in dtype
    activations:         what weights in groups are multiplied with
    fp8_dense:           names of the dense tensors that a GPU keeps in FP8, as it does the experts of such a checkpoint
    max_model_len:       prompt and output tokens of one request
    num_blocks:          of this rank's KV cache
    num_snapshots:       of states beside it (state_slots.py); 0 where the model keeps none
    max_tokens_per_rank: rows that one dispatch carries
    split:               how replicas share a batch
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    choice: NumericsChoice
    placement: Placement
    expert_form: ExpertForm
    stored: StoredWeights | None
    activations: Activations
    fp8_dense: frozenset[str]
    max_model_len: int
    num_blocks: int
    num_snapshots: int
    max_tokens_per_rank: int
    split: ServedSplit

    @classmethod
    def of(cls, config: ServeConfig, spec: ModelSpec, device: torch.device) -> Self:
        """Returns the plan for a device. Raises PlacementError, ConfigError or CapacityError that names the setting."""
        check_capacity(config, spec, device)
        dtype = compute_dtype(config, device)
        choice = choose_numerics(config, device, dtype)
        folder = checkpoint_folder(config)
        spec = spec if folder is None else as_stored(spec, folder)
        spec = with_predictor(config, spec, folder, on_gpu=device.type != "cpu")
        stored = StoredWeights.of(spec, folder) if choice.numerics.compiled else None
        max_model_len = _max_model_len(config, spec)
        form = expert_form(config, spec, device, stored)
        cache_dtype = choose_cache_dtype(config, spec, device, dtype)
        check_attention_backend(config, spec, device, cache_dtype)
        check_states(config, spec, device)
        check_identity_experts(config, spec, device)
        check_streams(config, spec, device)
        num_blocks = num_cache_blocks(config, spec, cache_dtype, max_model_len)
        return cls(
            spec=spec.in_context(max_model_len),
            device=device,
            dtype=dtype,
            cache_dtype=cache_dtype,
            choice=choice,
            placement=make_placement(config, spec),
            expert_form=form,
            stored=stored,
            activations=choose_activations(
                config.model.activations, form, has_groups=stored is not None and bool(stored.dense_groups)
            ),
            fp8_dense=fp8_projections(spec, folder) if form == "fp8" and device.type == "cuda" else frozenset(),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots(config, spec, num_blocks),
            max_tokens_per_rank=config.dispatch.max_tokens_per_rank or config.engine.max_batch_tokens,
            split=choose_split(config, device),
        )

    @property
    def numerics(self) -> Numerics:
        return self.choice.numerics

    @property
    def slot_form(self) -> SlotForm:
        """The form of one expert slot; of the largest where layers differ."""
        return self.share(0).slot_form

    def share(self, rank: int, has_experts: bool = True) -> WeightShare:
        """Returns a rank's share of the weights. has_experts: False leaves its slots empty"""
        placement = self.placement if has_experts else self.placement.without_ranks([rank])[0]
        return WeightShare(
            self.spec, placement, rank, self.dtype, self.device, self.expert_form, self.stored, self.activations,
            fp8_dense=self.fp8_dense,
        )  # fmt: skip


def compute_dtype(config: ServeConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of activations; auto is float32 on CPU, where bfloat16 is several times slower."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    return names.get(config.model.dtype, auto)


def choose_split(config: ServeConfig, device: torch.device) -> ServedSplit:
    """Returns how replicas share a batch. Raises ConfigError for the split by time on a GPU."""
    if config.eplb.split == "time" and device.type == "cuda":
        raise ConfigError("eplb.split time is for CPU ranks; set eplb.split: exact, which GPUs split by too")
    if config.eplb.split == "auto":
        return "even" if device.type == "cuda" else "time"
    return config.eplb.split


def choose_cache_dtype(
    config: ServeConfig, spec: ModelSpec, device: torch.device, computed: torch.dtype
) -> torch.dtype:
    """Returns the dtype of the KV cache. Raises ConfigError for one that the model or the device cannot have."""
    wanted = config.cache.dtype
    if wanted == "auto":
        return computed
    if isinstance(spec.attention, CompressedSpec):
        raise ConfigError(
            f"cache.dtype is {wanted} but the attention of {spec.model_type} makes entries of rows of the cache, in "
            "the dtype of the computation; set cache.dtype: auto"
        )
    if isinstance(spec.attention, MlaSpec) and spec.attention.indexer is not None:
        raise ConfigError(
            f"cache.dtype is {wanted} but the sparse attention of {spec.model_type} reads latents and index keys in "
            "the dtype of the computation; set cache.dtype: auto"
        )
    if wanted == "fp8_e4m3" and device.type == "cuda" and not has_e4m3(device):
        raise ConfigError(
            "cache.dtype is fp8_e4m3 but this GPU has no e4m3 (it is older than sm_89); set cache.dtype: int8 or auto"
        )
    return torch.int8 if wanted == "int8" else torch.float8_e4m3fn


def check_capacity(config: ServeConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError where the capacity of experts is limited and the device or the router knows no such limit."""
    factor = config.engine.expert_capacity
    if factor is None:
        return
    if device.type == "cuda":
        raise ConfigError(
            f"engine.expert_capacity is {factor:g}, which is built for CPUs, but the ranks have GPUs; leave it out, or "
            "set parallel.device: cpu"
        )
    if spec.router.scoring == "sparsemixer" and config.engine.over_capacity == "next":
        raise ConfigError(
            f"engine.over_capacity is next, but the router of {spec.model_type} weighs two experts by one another, and "
            "another one would have no weight; set engine.over_capacity: drop, or leave out engine.expert_capacity"
        )


def cache_layouts(config: ServeConfig, spec: ModelSpec) -> tuple[KvLayout, ...]:
    """Returns the layouts of what a rank caches of a token."""
    return kv_layouts(spec, config.engine.return_routed_experts, config.engine.expert_capacity is not None)


def check_attention_backend(config: ServeConfig, spec: ModelSpec, device: torch.device, cache: torch.dtype) -> None:
    """Raises ConfigError where a device, or a package of kernels that is asked for, cannot attend for this model."""
    name, attention = config.engine.attention_backend, spec.attention
    if device.type == "cuda" and isinstance(attention, GqaSpec) and attention.value_dim is not None:
        raise ConfigError(
            f"{spec.model_type} has values narrower than keys, for which there is no GPU kernel; serve on CPU ranks"
        )
    if name in ("auto", "triton"):
        return
    module, install = _PACKAGES[name]
    latents = attention if isinstance(attention, MlaSpec) else None
    heads = attention if isinstance(attention, GqaSpec) else None
    back = "set engine.attention_backend: auto"
    reasons = (
        (device.type != "cuda", f"this rank computes on {device.type}; {back}"),
        (find_spec(module) is None, f"it is not installed; {install}, or {back}"),
        (config.engine.numerics != "fast", "its sums depend on the batch; set engine.numerics: fast"),
        (cache != torch.bfloat16, "it reads bfloat16 alone here; set cache.dtype: auto and model.dtype: bfloat16"),
        (heads is not None and heads.has_sinks, f"{spec.model_type} has attention sinks; {back}"),
        (heads is not None and heads.windowed_heads is not None,
         f"windowed layers of {spec.model_type} have heads of their own; {back}"),
        (heads is not None and any(map(heads.chunk_of, range(spec.num_layers))),
         f"{spec.model_type} attends within chunks of positions; {back}"),
        (latents is not None and (latents.kv_lora_rank, latents.rope_dim) != (512, 64),
         f"it takes latents of 512 + 64 columns alone; {back}"),
        (name == "flashmla" and latents is None, f"it attends latents alone, as DeepSeek has; {back}"),
        (name == "flashmla" and latents is not None and latents.num_heads not in (64, 128),
         f"it takes 64 or 128 heads alone; {back}"),
        (name == "flashmla" and config.cache.block_size != 64, "its pages have 64 tokens; set cache.block_size: 64"),
    )  # fmt: skip
    for applies, why in reasons:
        if applies:
            raise ConfigError(f"engine.attention_backend is {name}, but {why}")


def check_states(config: ServeConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError for what does not go with the states that layers keep of requests."""
    if not state_shapes(spec):
        return
    of_model = f"{spec.model_type} has layers that keep a state of each request"
    size = state_bytes(state_shapes(spec))
    keeps_snapshots = config.cache.prefix_cache and config.cache.snapshot_gib * 2**30 >= size
    reasons = (
        (device.type != "cpu", f"and this rank computes on {device.type}; they run on CPUs alone: serve on CPU ranks"),
        ((config.cache.host_gb is not None or config.cache.disk_gb is not None) and not keeps_snapshots,
         "which tiers hold as snapshots, and there are none; set cache.snapshot_gib to "
         f"{size / 2**30:.3g} at least, or leave cache.host_gb and cache.disk_gb out"),
        (config.parallel.num_prefill_ranks > 0 and not keeps_snapshots,
         f"which prefill ranks hand over as snapshots, and there are none; set cache.prefix_cache: true and "
         f"cache.snapshot_gib to {size / 2**30:.3g} at least"),
    )  # fmt: skip
    for applies, why in reasons:
        if applies:
            raise ConfigError(f"{of_model}, {why}")


def check_identity_experts(config: ServeConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError for what does not go with experts that give back what they take."""
    if not spec.router.num_identity:
        return
    of_model = f"{spec.model_type} has experts that give back what they take"
    if device.type != "cpu":
        raise ConfigError(
            f"{of_model}, and this rank computes on {device.type}; they are built for CPUs alone: serve on CPU ranks"
        )
    if config.engine.expert_capacity is not None:
        raise ConfigError(f"{of_model}, which no capacity limits; leave engine.expert_capacity out")


def check_streams(config: ServeConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError for what does not go with several residual streams, and experts that a token's id chooses."""
    if spec.streams is not None and device.type != "cpu":
        raise ConfigError(
            f"{spec.model_type} has several residual streams, and attention to entries of groups of tokens, and this "
            f"rank computes on {device.type}; they are built for CPUs alone: serve on CPU ranks"
        )
    if spec.choosing_layer_ids and config.engine.expert_capacity is not None:
        raise ConfigError(
            f"{spec.model_type} has layers in which a token's id chooses its experts, which no capacity limits; leave "
            "engine.expert_capacity out"
        )


def num_draft_states(config: ServeConfig) -> int:
    """Returns how many states one rank keeps behind drafts of a step, beside those of requests, of a model that keeps
    any: no step has more drafts than there are requests left to run, and these."""
    running = config.engine.max_running_requests
    return 0 if config.speculation.mode == "off" else most_yielding_rows(running) - running


def num_snapshots(config: ServeConfig, spec: ModelSpec, num_blocks: int) -> int:
    """Returns how many copies of states one rank keeps; at most one for each block of its KV cache."""
    shapes = state_shapes(spec)
    if not shapes or not config.cache.prefix_cache:
        return 0
    return min(int(config.cache.snapshot_gib * 2**30) // state_bytes(shapes), num_blocks)


def checkpoint_folder(config: ServeConfig) -> Path | None:
    """Returns the folder of the checkpoint; None: weights are drawn."""
    return None if config.model.load_format == "dummy" else model_dir(config.model)


def expert_form(config: ServeConfig, spec: ModelSpec, device: torch.device, stored: StoredWeights | None) -> ExpertForm:
    """Returns the form of expert weights under this configuration. Raises ConfigError where it is not possible."""
    keeps_fp8 = has_e4m3(device) if stored is None else stored.keeps_fp8
    wanted = config.model.expert_weights
    compiled = stored is not None
    in_mxfp4, in_groups = spec.experts_in_mxfp4, stored is not None and bool(stored.groups)
    narrow = compute_dtype(config, device) == torch.bfloat16
    return choose_expert_form(wanted, spec.fp8_block, device.type, keeps_fp8, compiled, in_mxfp4, narrow, in_groups)


def num_cache_blocks(config: ServeConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> int:
    """Returns how many blocks the KV cache of one rank has.

    Raises CapacityError where one request could not fit, ConfigError where a tier below has no room for a block.
    """
    block_size = config.cache.block_size
    size_bytes = bytes_per_block(cache_layouts(config, spec), block_size, dtype)
    of_state = -(-state_bytes(state_shapes(spec)) // size_bytes)
    # Twice, since not all of a full tier is of use: sets of memory hold pages of others, and files make room by tenths.
    num_pages = 2 * (1 + of_state) if of_state else 1
    if config.cache.host_gb is not None:
        least_bytes = num_pages * slot_bytes(size_bytes)
        check_size("cache.host_gb", int(config.cache.host_gb * 1e9), least_bytes, of_state > 0)
    if config.cache.disk_gb is not None:
        least_bytes = num_pages * (HEADER_BYTES + size_bytes)
        check_size("cache.disk_gb", int(config.cache.disk_gb * 1e9), least_bytes, of_state > 0)
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


def _max_model_len(config: ServeConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return spec.default_context
    if wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len is {wanted} but the model knows {spec.max_position} positions; lower max_model_len"
        )
    return wanted


def choose_numerics(config: ServeConfig, device: torch.device, dtype: torch.dtype) -> NumericsChoice:
    """Returns the kernels for this device and compute dtype. Builds the compiled kernels where they are chosen.

    Raises ConfigError for more than one thread per rank in batch_invariant where torch computes on CPU.
    """
    if device.type != "cpu":
        return NumericsChoice(_of_setting(config), None, "Triton", f"for {device.type}")
    is_limited = config.engine.expert_capacity is not None
    library, why_not = _find_library(config, dtype)
    if library is not None:
        kernels = f"compiled for this CPU ({library.form})"
        why = f"float32 on a machine with a C compiler: {library.compiler}{_why_no_amx(config, library)}"
        return NumericsChoice(COMPILED, library, kernels, why, is_limited)
    threads = config.parallel.threads_per_rank
    if config.engine.numerics == "batch_invariant" and threads not in (None, 1):
        raise ConfigError(
            f"parallel.threads_per_rank is {threads} but engine.numerics batch_invariant by plain torch holds for one "
            f"thread per rank only, and torch computes here: {why_not}; set parallel.threads_per_rank: 1 and use more "
            "ranks, or serve with the compiled CPU kernels"
        )
    return NumericsChoice(_of_setting(config), None, "plain torch", why_not, is_limited)


def _find_library(config: ServeConfig, dtype: torch.dtype) -> tuple[CpuLibrary | None, str]:
    """Returns the compiled kernels, or None and the reason."""
    if config.engine.cpu_kernels == "torch":
        return None, "engine.cpu_kernels is torch"
    if dtype != torch.float32:
        return None, f"compute in {str(dtype).removeprefix('torch.')} is not for the compiled CPU kernels"
    library = find_cpu_library()
    if library is None:
        return None, "there are no compiled CPU kernels, see the log"
    library.use_amx(config.engine.cpu_kernels == "auto")
    return library, ""


def _why_no_amx(config: ServeConfig, library: CpuLibrary) -> str:
    """Returns why products with bfloat16 weights go without the AMX that the CPU has; "" where they do not."""
    if library.form == AMX or "amx_bf16" not in processor_features():
        return ""
    if config.engine.cpu_kernels == "no_amx":
        return "; without AMX: engine.cpu_kernels is no_amx"
    return f"; without AMX, which takes gcc 11 or clang 12 and Linux 5.16: {library.compiler} or this system is older"


def _of_setting(config: ServeConfig) -> Numerics:
    """Returns how torch and Triton cut reductions under this configuration."""
    if config.engine.numerics == "fast":
        return FAST
    return Numerics(row_tile=config.engine.row_tile)
