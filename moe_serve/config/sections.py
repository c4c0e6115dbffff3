"""The sections of the configuration: frozen pydantic models, each setting with its unit and its reason."""

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from moe_serve.config.section import Section
from moe_serve.config.server_section import ServerConfig
from moe_serve.dispatch.capabilities import Backend, Combine, Rows, Wanted, refusals
from moe_serve.eplb.policies.names import ServedPolicy

DEMO_MODEL = "demo"  # name of the model inside the package


class ModelConfig(Section):
    """The model, and how its weights are loaded."""

    path: str = DEMO_MODEL  # a Hugging Face model folder, or "demo"
    served_name: str | None = None  # name in /v1/models; None: the folder's name
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights of the right shapes, none is read
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    # How expert weights are stored. auto: an FP8 checkpoint as it is where the GPU has e4m3 or the compiled CPU kernels
    # run, an MXFP4 one as it is where these run, else dense (the compute dtype); int8: CPUs only, a quarter of the
    # memory of float32, rounded from the checkpoint's values.
    expert_weights: Literal["auto", "dense", "fp8", "int8", "mxfp4"] = "auto"
    max_model_len: PositiveInt | None = None  # tokens, prompt + output; None: the model's own limit
    skip_tokenizer: bool = False  # ids in, ids out
    seed: NonNegativeInt = 0  # of dummy weights


class ParallelConfig(Section):
    """The ranks and their devices. Over all of them attention is data-parallel and experts are expert-parallel."""

    num_ranks: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: PositiveInt | None = None  # CPU threads; None: cores / ranks of this machine, at least 1
    attn_tp: PositiveInt = 1
    pp: PositiveInt = 1

    @model_validator(mode="after")
    def _only_data_and_expert_parallel(self) -> Self:
        for name, words in (("attn_tp", "tensor-parallel attention"), ("pp", "pipeline parallelism")):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)} but {words} is not supported; set {name}: 1, and num_ranks to "
                    "the number of ranks, over which experts are spread"
                )
        return self


class DispatchConfig(Section):
    """The way of token rows between ranks."""

    # auto: local on one rank, shared memory on one CPU host; on GPUs NVSHMEM for small steps where it reaches all
    # ranks; else collective (NCCL, gloo). low_latency: shared memory on CPUs, NVSHMEM on GPUs. cuda_ipc: its kernels
    # over the GPUs of one host, without NVSHMEM. deepep: an installed DeepEP
    backend: Backend = "auto"
    max_tokens_per_rank: PositiveInt | None = None  # rows of one dispatch; None: engine.max_batch_tokens
    wire_dtype: Literal["auto", "float32", "bf16", "fp8"] = "auto"  # auto: the compute dtype
    # A step in which some rank has at least this many rows runs its MoE layers in two or more rounds: the experts of
    # one round compute while rows of others travel. None: never, which is best over shared memory of one host, where
    # the rank's own core copies the rows (benchmarks/results/overlap.md). For a network: docs/communication.md.
    overlap_from_tokens: PositiveInt | None = None
    # Layout of the rows that experts receive. packed: without gaps; masked: a slab of fixed size for each slot
    # (low_latency; its only layout on GPUs). auto: packed on CPUs, the transport's own on GPUs
    rows: Rows = "auto"
    # Where the results of a token's experts are added. ordered: on its source rank, in top-k order, with the same bits
    # on every transport; rank_sum: first on each destination rank, which returns one row, not one for each expert
    combine: Combine = "ordered"
    compiled: bool = True  # low_latency on CPUs moves rows with a C helper if there is a compiler; same bits either way
    deadline_s: PositiveFloat | None = None  # how long low_latency waits for a peer; None: engine.step_deadline_s


class EplbConfig(Section):
    """The placement of experts, and how the tokens of a replicated expert are split over its replicas."""

    # off: experts stay where they start and their load is not recorded; static: they stay, and it is; dynamic: the
    # balancer moves them while the server serves, when it expects the move to pay
    mode: Literal["off", "static", "dynamic"] = "static"
    init_expert_location: str = "trivial"  # or a placement file: ours or SGLang's, .json or .pt
    num_redundant_experts: NonNegativeInt = 0  # extra slots per layer; the total is rounded up to a multiple of ranks
    # How replicas share a batch. nearest: prefer the own rank, then the own node; exact: minimise the largest rank load
    split: Literal["even", "nearest", "exact"] = "even"
    record_window_steps: PositiveInt = 1000  # steps of one load record; the balancer thinks after each of them
    record_path: str | None = None  # .jsonl trace to which load records are written; `moe-serve replay` reads it
    record_max_mib: PositiveFloat = 1024.0  # of that trace; at half of it, the file becomes NAME.1.jsonl
    # What /start_expert_distribution_record records, as SGLang's: sums over the ranks per load record; counts of every
    # rank's slots per forward pass; or the slots of every token. Dumps go to recorder_dir; None: to
    # $SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR, or where temporary files go
    recorder_mode: Literal["stat", "per_pass", "per_token"] = "stat"
    recorder_dir: str | None = None
    recorder_max_mib: PositiveFloat = 512.0  # memory of one recording on one rank; it ends there, and can be dumped
    # Of mode dynamic. policy plans placements: incremental edits the one in use with few moves; the others plan anew
    policy: ServedPolicy = "incremental"
    trigger: float = Field(default=0.95, ge=0, le=1)  # plan layers whose balancedness (mean / max of ranks) is below
    horizon_windows: PositiveInt = 20  # load records over which the gain of a move must pay for it
    plan_deadline_s: PositiveFloat = 60.0  # a plan that takes longer is given up, and its process is started again
    staging_slots: PositiveInt = 1  # experts that a rank receives in one round of moves; each takes memory of an expert
    pair_moves: PositiveInt | None = None  # experts from one rank to another in a round; None: up to staging_slots
    node_moves: PositiveInt | None = None  # experts over a node's network, in or out, in a round; None: no limit
    move_step_share: float = Field(default=0.05, gt=0, le=1)  # how much longer steps may be while experts move
    move_deadline_s: PositiveFloat = 60.0  # a round of moves that takes longer is given up

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, mode: object) -> object:
        return "off" if mode is False else mode  # YAML reads a bare `off` as false

    @field_validator("record_path")
    @classmethod
    def _traces_are_jsonl(cls, path: str | None) -> str | None:
        if path is not None and not path.endswith(".jsonl"):
            raise ValueError(
                f"a running server writes .jsonl traces; name the file e.g. {Path(path).stem or 'load'}.jsonl"
            )
        return path

    @model_validator(mode="after")
    def _off_records_nothing(self) -> Self:
        if self.mode == "off" and self.record_path is not None:
            raise ValueError(
                f"record_path is {self.record_path} but mode is off, which records nothing; set mode: static, or leave "
                "record_path out"
            )
        return self

    @model_validator(mode="after")
    def _file_brings_its_own_slots(self) -> Self:
        if self.init_expert_location != "trivial" and self.num_redundant_experts:
            raise ValueError(
                f"num_redundant_experts is {self.num_redundant_experts} but the placement file "
                f"{self.init_expert_location} already says how many slots there are; leave num_redundant_experts at 0"
            )
        return self


class CacheConfig(Section):
    """The paged KV cache of one rank."""

    block_size: PositiveInt = 16  # tokens per block
    num_blocks: PositiveInt | None = None  # per rank; None: from memory_gib
    memory_gib: PositiveFloat = 1.0  # per rank, where num_blocks is None
    prefix_cache: bool = True  # reuse the blocks of equal prompt prefixes


class EngineConfig(Section):
    """The step loop of one rank."""

    max_running_requests: PositiveInt = 64  # per rank
    max_queued_requests: PositiveInt = 1024  # over all ranks, at the front end; beyond it: HTTP 429
    max_logprobs: NonNegativeInt = 20  # likeliest tokens that a request may ask for beside each token
    max_batch_tokens: PositiveInt = 1024  # token budget of one step of one rank; longer prompts are prefilled in chunks
    # Of GPUs, and of CPUs where plain torch computes; the compiled CPU kernels are batch_invariant (docs/numerics.md)
    numerics: Literal["fast", "batch_invariant"] = "fast"
    # auto: CPU ranks compute with C kernels where there is a compiler and compute is float32; their tokens never depend
    # on what else runs, whatever `numerics` says. torch: plain torch, for comparison or where ranks have no compiler
    # no_amx: as auto, but without AMX, whose products with bfloat16 weights have other last bits: if some lack it
    cpu_kernels: Literal["auto", "no_amx", "torch"] = "auto"
    row_tile: Literal[4, 8, 16] = 4  # rows of a GEMM tile in batch_invariant; 1 and 2 are not invariant everywhere
    exchange: Literal["auto", "gloo", "shm"] = "auto"  # how step proposals are exchanged; auto: shm on one machine
    step_deadline_s: PositiveFloat = 60.0  # a peer that takes longer is lost
    # mask: the others go on without a lost rank where they can (CPU ranks of one host, slots for all experts), and
    # a rank that was only late rejoins; end: all ranks end, to be started again
    on_lost_rank: Literal["mask", "end"] = "mask"
    # Where the others can go on without it, a rank whose process gives no sign of life for so long is masked: it is
    # stopped, or its machine hangs. A step that is merely long gives signs of life from a thread of its own.
    suspect_after_s: PositiveFloat = 3.0
    heartbeat_s: PositiveFloat = 1.0  # how often an idle rank shows that it is alive
    prefill_hold_steps: NonNegativeInt = 0  # steps a lone prefill may wait so that ranks prefill together

    @model_validator(mode="after")
    def _decode_rows_fit_the_budget(self) -> Self:
        if self.max_running_requests > self.max_batch_tokens:
            raise ValueError(
                f"max_running_requests is {self.max_running_requests} but a step takes at most "
                f"max_batch_tokens = {self.max_batch_tokens} tokens, one for each running request; "
                f"raise max_batch_tokens or lower max_running_requests"
            )
        return self


class LauncherConfig(Section):
    """Restarts of lost ranks by `moe-serve serve` and `LLM`."""

    max_restarts: NonNegativeInt = 3  # a lost rank, or all, are started again so often within the window; 0: never
    restart_window_s: PositiveFloat = 600.0  # a restart that is longer ago does not count


class ServeConfig(Section):
    """The whole configuration of a serving system."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    dispatch: DispatchConfig = DispatchConfig()
    eplb: EplbConfig = EplbConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    launcher: LauncherConfig = LauncherConfig()

    @field_validator("*", mode="before")
    @classmethod
    def _empty_section_means_defaults(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.engine.heartbeat_s >= max(self.server.worker_deadline_s, self.engine.step_deadline_s):
            raise ValueError(
                f"engine.heartbeat_s is {self.engine.heartbeat_s:g} but a rank that is silent for "
                f"server.worker_deadline_s = {self.server.worker_deadline_s:g} and engine.step_deadline_s = "
                f"{self.engine.step_deadline_s:g} seconds is lost; lower heartbeat_s"
            )
        return self

    @model_validator(mode="after")
    def _a_transport_can_do_what_is_asked(self) -> Self:
        wanted = Wanted(
            num_ranks=self.parallel.num_ranks,
            device=self.parallel.device,
            rows=self.dispatch.rows,
            combine=self.dispatch.combine,
            batch_invariant=self.engine.numerics == "batch_invariant",
        )
        refused = refusals(self.dispatch.backend, wanted)
        if refused:
            raise ValueError(". ".join(refused))
        return self

    def to_yaml(self) -> str:
        """Returns the effective configuration, every setting named."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def changed(self) -> list[str]:
        """Returns the settings that differ from their defaults, each as section.key=value."""
        own, usual = self.model_dump(mode="json"), ServeConfig().model_dump(mode="json")
        return [
            f"{section}.{key}={json.dumps(value)}"
            for section, settings in own.items()
            for key, value in settings.items()
            if value != usual[section][key]
        ]


def model_dir(config: ModelConfig) -> Path:
    """Returns the folder of the model; `demo` is the one inside the package."""
    if config.path == DEMO_MODEL:
        return Path(str(resources.files("moe_serve") / "demo_model"))
    return Path(config.path).expanduser()


def served_name(config: ModelConfig) -> str:
    """Returns the name of the model for clients: as configured, else `demo` or its folder's name."""
    return config.served_name or (DEMO_MODEL if config.path == DEMO_MODEL else model_dir(config).name)
