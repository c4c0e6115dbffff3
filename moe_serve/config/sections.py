"""The sections of the configuration: frozen pydantic models, each setting with its unit and its reason."""

import difflib
import json
import os
import re
import reprlib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from moe_serve.dispatch.capabilities import Backend, Combine, Rows, Wanted, refusals
from moe_serve.eplb.policies.names import ServedPolicy


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DegradeStep(Section):
    """Reduces calls once their share of the queue exceeds `above`; a share of its tokens works the same way."""

    above: float = Field(ge=0, lt=1)
    max_new_tokens: PositiveInt | None = None  # of requests that name no length
    min_priority: int | None = None  # calls below it get 429
    max_samples: PositiveInt | None = None  # calls with a larger `n` get 429

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.max_new_tokens is None and self.min_priority is None and self.max_samples is None:
            raise ValueError(
                "a step of server.degrade changes nothing; give max_new_tokens, min_priority or max_samples"
            )
        return self


class ServerConfig(Section):
    """The HTTP front end, and the address where workers attach to it."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = Field(default=30000, le=65535)
    # Processes that serve `port` of a host together, each on a core of its own; only under `moe-serve serve`. One that
    # dies takes its open connections with it, and is started again. Each gets its share of the bounds on what waits or
    # is open; limits of clients hold for all of a host together.
    api_workers: PositiveInt = Field(default=1, le=32)
    worker_host: str = "127.0.0.1"  # where workers reach the front end
    worker_port: NonNegativeInt = Field(default=30001, le=65535)  # on several hosts the next api_workers - 1 ports, too
    # The secret by which front end and ranks trust each other, where $MOE_SERVE_TOKEN does not give it: a file that
    # only its owner reads, made by whoever starts first. None: one of this user on this machine, so worker_host must
    # be its loopback address. `moe-serve serve` needs neither token nor port: it uses sockets in a folder of its own.
    token_file: str | None = None
    max_body_mib: PositiveFloat = 16.0  # a larger HTTP body is refused
    max_bodies_mib: PositiveFloat = 64.0  # of all bodies that are received and parsed at a time; beyond it: HTTP 429
    # Of one client (its API key, or its address where there are no keys). None: half of max_bodies_mib, but one body
    max_bodies_mib_per_client: PositiveFloat | None = None
    # HTTPS: PEM files. ssl_keyfile None: the key is in ssl_certfile. ssl_ca_certs: clients need a certificate of these
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    # Files with one key on each line, a name before it or not, that only their owner may read; the environment's keys
    # ($MOE_SERVE_API_KEY, $MOE_SERVE_ADMIN_API_KEY) count too. Without an API key, anyone who reaches the port is
    # served. Without an admin key, admin routes are closed unless `host` is this machine's loopback. Before the key a
    # line may give limits of its own: NAME rpm_limit=60 tpm_limit=none KEY
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    # Cached prefixes are each client's own where there are keys: what one has sent, `cached_tokens` and the time of an
    # answer would tell another. true: all keys share them, as all clients do where there are none
    share_prefix_cache: bool = False
    # What one client may ask `/generate` and `/v1` for: by its API key, or by its address where there are no keys.
    # Requests per minute (each output counts), tokens per minute (prompts and outputs), and requests at a time; beyond
    # it: HTTP 429. None: no limit. Admin keys have the limits of their own line alone.
    rpm_limit: PositiveInt | None = None
    tpm_limit: PositiveInt | None = None
    max_parallel_requests: PositiveInt | None = None
    # Names by which clients may call this server, besides addresses and localhost; "*": any. None given: any, except
    # where `host` is loopback: a web page can make its own name point there.
    allowed_hosts: tuple[str, ...] = ()
    # Sites whose pages may use this server from a browser, such as https://a.example
    cors_origins: tuple[str, ...] = ()
    # At a bound on connections, one that waits for a request yields to a new one; where all are busy, that gets a 503.
    # The limit of descriptors is raised to fit at start, and lowers the bound where it cannot be.
    max_connections: PositiveInt = 4096
    max_connections_per_client: PositiveInt | None = None  # of one address; None: half of max_connections
    max_header_kib: PositiveFloat = 16.0
    # Time for a client to send the header of a request (and to shake hands), and its body; and for which a connection
    # without a request stays open.
    header_deadline_s: PositiveFloat = 10.0
    body_deadline_s: PositiveFloat = 60.0
    idle_deadline_s: PositiveFloat = 75.0
    # A client that takes less than 16 KiB in this time, while an answer waits for it, is cut off: its requests end.
    send_deadline_s: PositiveFloat = 30.0
    attach_deadline_s: PositiveFloat = 600.0  # how long the front end waits for all ranks at start
    # A rank ends when the front end is silent for longer than this. A rank is lost when it is silent for longer than
    # this and than engine.step_deadline_s.
    worker_deadline_s: PositiveFloat = 30.0
    # When all ranks are lost and their launcher starts them again, open requests wait so long for them, and go on.
    restart_deadline_s: PositiveFloat = 120.0
    # Prefix and session affinity yield above this gap, in tokens; also where only other ranks have a free slot
    routing_load_gap: NonNegativeFloat = 512.0
    # A request that waits for a rank with `priority: p` is served as if it had come p times this earlier; 0: priorities
    # mean nothing.
    priority_head_start_s: NonNegativeFloat = 1.0
    # A request that runs longer is cut short with finish_reason abort; `timeout` in a request may ask for less. One
    # that waits for a rank longer than queue_deadline_s gets 503.
    request_deadline_s: PositiveFloat | None = None
    queue_deadline_s: PositiveFloat | None = None
    # Prompt and longest output of the requests that wait for a rank; beyond it: HTTP 429, before the body is read.
    max_waiting_tokens: PositiveInt = 1_000_000
    # Reductions while the queue grows, the first steps first, each named in the header
    # x-moe-serve-degraded of the answers that it changes; such as
    # [{above: 0.5, max_new_tokens: 64}, {above: 0.8, min_priority: 0, max_samples: 1}]
    degrade: tuple[DegradeStep, ...] = ()
    # Sampling parameters that a call of /v1 leaves out, such as temperature and top_p: those that the model folder's
    # generation_config.json recommends, or OpenAI's. /generate has SGLang's.
    sampling_defaults: Literal["model", "openai"] = "model"
    # A file with the jinja template that makes a prompt of a chat's messages. None: the model folder's
    chat_template: str | None = None
    trust_request_chat_template: bool = False  # clients may send a template of their own, which runs in a sandbox
    # One line in the log for each request that has ended, up to 200 a second: ids, tokens, times, why; never text
    log_requests: bool = False
    log_format: Literal["text", "json"] = "text"  # of the log of every process
    metrics_compat: Literal["sglang", "vllm"] | None = None  # /metrics has these names too, where they mean the same
    # Where POST /stop_profile writes its traces of steps, their parts, and requests; None: profiles are refused
    profile_dir: str | None = None
    # Parsers of the text of chats, by their names in SGLang and vLLM. reasoning_parser: deepseek-r1,
    # deepseek-v3, qwen3, qwen3-thinking, glm45, minimax-m2, kimi_k2 or gpt-oss; tool_call_parser: hermes, qwen25,
    # qwen3_coder, deepseekv3, deepseekv31, glm45, minimax-m2, kimi_k2, mistral or gpt-oss. None: all text is content.
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    incremental_stream_output: bool = False  # events of a stream hold only what is new, where the request says nothing
    # After SIGTERM open requests have so long to end, and new ones get 503. Kubernetes kills after 30 s by default.
    drain_deadline_s: NonNegativeFloat = 25.0
    health_deadline_s: PositiveFloat = 20.0  # how long /health_generate waits for a token of every rank

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        if self.max_bodies_mib < self.max_body_mib:
            raise ValueError(
                f"max_bodies_mib is {self.max_bodies_mib:g} but one body may have max_body_mib = "
                f"{self.max_body_mib:g}; raise max_bodies_mib"
            )
        own = self.max_bodies_mib_per_client
        if own is not None and own < self.max_body_mib:
            raise ValueError(
                f"max_bodies_mib_per_client is {own:g} but one body may have max_body_mib = {self.max_body_mib:g}; "
                "raise max_bodies_mib_per_client"
            )
        return self

    @model_validator(mode="after")
    def _steps_come_in_order(self) -> Self:
        shares = [step.above for step in self.degrade]
        if shares != sorted(shares):
            raise ValueError(f"degrade has its steps above {shares} of the queue; give them in rising order")
        return self

    @model_validator(mode="after")
    def _keys_have_a_certificate(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_keyfile or ssl_ca_certs is set without ssl_certfile; set ssl_certfile too")
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.port and self.port == self.worker_port:
            raise ValueError(f"port and worker_port are both {self.port}; give them different values")
        return self


DEMO_MODEL = "demo"  # name of the model inside the package


class ModelConfig(Section):
    """The model, and how its weights are loaded."""

    path: str = DEMO_MODEL  # a Hugging Face model folder, a GGUF file (of several parts the first), or "demo"
    # Names by which clients may call the model; answers and metrics have the first. None given: the folder's name
    served_name: tuple[str, ...] = ()
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights of the right shapes, none is read
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    # How expert weights are stored. auto: an FP8 checkpoint as it is where the GPU has e4m3 or the compiled CPU kernels
    # run, an MXFP4 one as it is where these run or a GPU computes in bfloat16, else dense (the compute dtype); int8:
    # CPUs only, a quarter of the memory of float32, rounded from the checkpoint's values; int4: likewise in 4.5 bits,
    # by the compiled CPU kernels.
    expert_weights: Literal["auto", "dense", "fp8", "int8", "mxfp4", "int4"] = "auto"
    # What weights in groups of four to eight bits are multiplied with: experts in int4 or in the checkpoint's codes,
    # and dense layers in these. auto: int8, each 128 values of a row with a scale of their own, as integers; float: the
    # compute dtype as it is.
    activations: Literal["auto", "float", "int8"] = "auto"
    # Where the CPU ranks of a host keep the one copy of the weights that they share, packed for the compiled kernels.
    # memory: made at each start, where there are several ranks; a folder: in a file there, of which later starts
    # compare the bytes and map them (docs/operate.md); none: each rank has its own
    weight_cache: str = "memory"
    max_model_len: PositiveInt | None = None  # tokens, prompt + output; None: the model's own limit
    skip_tokenizer: bool = False  # ids in, ids out
    seed: NonNegativeInt = 0  # of dummy weights

    @field_validator("served_name", mode="before")
    @classmethod
    def _one_name_alone(cls, value: object) -> object:
        names = [value] if isinstance(value, str) else [] if value is None else value
        return tuple(name for name in dict.fromkeys(names) if name != "") if isinstance(names, list | tuple) else value


class ParallelConfig(Section):
    """The ranks and their devices. Over all of them attention is data-parallel and experts are expert-parallel."""

    num_ranks: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: PositiveInt | None = None  # CPU threads; None: cores / ranks of this machine, at least 1
    # Binds the threads of a CPU rank, and its memory, to a NUMA node. auto: the ranks of a host divide over its nodes,
    # where they do so evenly; a list: the node of each rank of a host. Ranks of one node share weights
    cpu_bind: Literal["auto", "none"] | tuple[NonNegativeInt, ...] = "auto"
    attn_tp: PositiveInt = 1
    pp: PositiveInt = 1
    # Ranks that compute prompts with their first token, an expert-parallel group of its own beside the num_ranks, which
    # then decode. Only under `moe-serve serve`, on CPUs; on the same host, or on hosts of their own
    # (launcher.prefill_nnodes). 0: every rank does both
    num_prefill_ranks: NonNegativeInt = 0
    handover_gb: PositiveFloat = 0.5  # memory of each prefill rank for pages on their way to decode ranks
    # A prompt with fewer tokens than this that no decode rank has cached stays with the decode ranks. Prompts of 32
    # tokens, the shortest measured, hold up decodes for 12 to 22 times what a hand-over takes (benchmarks/handover.py)
    prefill_from_tokens: PositiveInt = 32
    role: Literal["both", "prefill", "decode"] = "both"  # of these ranks; `moe-serve serve` sets it for each group

    @field_validator("handover_gb", mode="before")
    @classmethod
    def _pages_have_room(cls, value: object) -> object:
        if value == 0:
            raise ValueError(
                "it is 0, and no page of a prompt could reach a decode rank; give it some GB, or set "
                "num_prefill_ranks: 0, so that every rank computes its own prompts"
            )
        return value

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

    # auto: local on one rank; on CPUs shared memory, with own TCP connections between hosts; on GPUs NVSHMEM for small
    # steps where it reaches all ranks; else collective (NCCL, gloo). low_latency: the first of these on CPUs, NVSHMEM
    # on GPUs. cuda_ipc: its kernels over the GPUs of one host, without NVSHMEM. deepep: an installed DeepEP
    backend: Backend = "auto"
    max_tokens_per_rank: PositiveInt | None = None  # rows of one dispatch; None: engine.max_batch_tokens
    wire_dtype: Literal["auto", "float32", "bf16", "fp8"] = "auto"  # auto: the compute dtype
    # A step in which some rank has at least this many rows runs in two halves: attention and experts of one half
    # compute while rows of the other travel. None: never, which is best over shared memory of one host, where
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
    # How replicas share a batch. nearest: prefer the own rank, then the own node; exact: least largest rank load; time:
    # least largest rank time, the reading of weights included (CPU ranks). auto: time on CPUs, even on GPUs. Where
    # exact or time is seen not to pay, batches are split evenly
    split: Literal["auto", "even", "nearest", "exact", "time"] = "auto"
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
    # Per rank, for copies of states, of models whose layers keep any: a cached prefix counts up to the last copy
    snapshot_gib: NonNegativeFloat = 1.0
    # Prefixes beyond the pool, for all ranks of a host, and over restarts: pages are copied to memory, in GB for all
    # ranks of a host, and to files in `path`, in GB for all models there. None: no such tier
    host_gb: PositiveFloat | None = None
    disk_gb: PositiveFloat | None = None
    path: str | None = None
    # auto: the dtype of the computation. int8, fp8_e4m3: a scale for each head and token; answers change a little
    # (docs/numerics.md). vLLM's names for the same are taken, too: fp8, int8_per_token_head
    dtype: Literal["auto", "int8", "fp8_e4m3"] = "auto"

    @model_validator(mode="after")
    def _tiers_are_whole(self) -> Self:
        if (self.disk_gb is None) != (self.path is None):
            given, missing = ("disk_gb", "path") if self.path is None else ("path", "disk_gb")
            raise ValueError(f"{given} is set but not {missing}; files of the KV cache need both, a quota and a folder")
        if not self.prefix_cache and (self.host_gb or self.disk_gb):
            raise ValueError("host_gb and disk_gb keep prefixes, which prefix_cache: false excludes; leave one out")
        return self

    @field_validator("host_gb", "disk_gb", mode="before")
    @classmethod
    def _a_tier_has_room(cls, value: object) -> object:
        if value == 0:
            raise ValueError("it is 0, which holds no page; leave it out for no such tier, or give it some GB")
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_names_of_vllm(cls, value: object) -> object:
        names = {"fp8": "fp8_e4m3", "int8_per_token_head": "int8"}
        return names.get(value, value) if isinstance(value, str) else value


class EngineConfig(Section):
    """The step loop of one rank."""

    max_running_requests: PositiveInt = 64  # per rank
    max_queued_requests: PositiveInt = 1024  # over all ranks, at the front end; beyond it: HTTP 429
    max_logprobs: NonNegativeInt = 20  # likeliest tokens that a request may ask for beside each token
    # Requests may ask for the experts of their tokens, which are kept beside keys and values (docs/api.md)
    return_routed_experts: bool = False
    # Of the rows that a rank computes in a step, an expert takes at most so many times the mean, from 1 on: **answers
    # change**, and depend on what else runs (docs/numerics.md). None: all that chose it
    expert_capacity: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    # Where the others of its rows go. next: to the best expert for the token that has room; drop: to none
    over_capacity: Literal["next", "drop"] = "next"
    max_batch_tokens: PositiveInt = 1024  # token budget of one step of one rank; longer prompts are prefilled in chunks
    # Of GPUs, and of CPUs where plain torch computes; the compiled CPU kernels are batch_invariant (docs/numerics.md)
    numerics: Literal["fast", "batch_invariant"] = "fast"
    # auto: CPU ranks compute with C kernels where there is a compiler and compute is float32; their tokens never depend
    # on what else runs, whatever `numerics` says. torch: plain torch, for comparison or where ranks have no compiler
    # no_amx: as auto, but without AMX, whose products with bfloat16 weights have other last bits: if some lack it
    cpu_kernels: Literal["auto", "no_amx", "torch"] = "auto"
    # Kernels of attention on GPUs, by SGLang's names; vLLM's are taken, too. auto: triton
    # flashinfer, flashmla: of these packages, for models that they cover; decode steps are then not captured in graphs
    attention_backend: Literal["auto", "triton", "flashinfer", "flashmla"] = "auto"
    row_tile: Literal[4, 8, 16] = 4  # rows of a GEMM tile in batch_invariant; 1 and 2 are not invariant everywhere
    exchange: Literal["auto", "gloo", "shm"] = "auto"  # of step proposals; auto: shm on one host and between CPU hosts
    step_deadline_s: PositiveFloat = 60.0  # a peer that takes longer is lost
    # mask: the others go on without a lost rank where they can (CPU ranks of one host, slots for all experts), and
    # a rank that was only late rejoins; end: all ranks end, to be started again
    on_lost_rank: Literal["mask", "end"] = "mask"
    # Where the others can go on without it, a rank whose process gives no sign of life for so long is masked: it is
    # stopped, or its machine hangs. A step that is merely long gives signs of life from a thread of its own.
    suspect_after_s: PositiveFloat = 3.0
    heartbeat_s: PositiveFloat = 1.0  # how often an idle rank shows that it is alive
    prefill_hold_steps: NonNegativeInt = 0  # steps a lone prefill may wait so that ranks prefill together

    @field_validator("attention_backend", mode="before")
    @classmethod
    def _by_names_of_vllm(cls, value: object) -> object:
        name = value.lower() if isinstance(value, str) else value
        return "triton" if name == "triton_attn" else name

    @model_validator(mode="after")
    def _capacity_is_possible(self) -> Self:
        if self.expert_capacity is None and self.over_capacity == "drop":
            raise ValueError("over_capacity is drop, but there is no expert_capacity; set it, or leave the former out")
        if self.expert_capacity is not None and self.numerics == "batch_invariant":
            raise ValueError(
                f"expert_capacity is {self.expert_capacity:g}, by which a token's experts depend on the rows beside "
                "it, and numerics is batch_invariant, which excludes that; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _decode_rows_fit_the_budget(self) -> Self:
        if self.max_running_requests > self.max_batch_tokens:
            raise ValueError(
                f"max_running_requests is {self.max_running_requests} but a step takes at most "
                f"max_batch_tokens = {self.max_batch_tokens} tokens, one for each running request; "
                f"raise max_batch_tokens or lower max_running_requests"
            )
        return self


NO_DRAFT_MODEL = (
    "drafts by a model of its own (EAGLE, draft_model) are not supported; from text they come by ngram, which is auto, "
    "from the checkpoint's layer for multi-token prediction by mtp"
)


def mode_of(name: object) -> object:
    """Returns our name of a mode, a method of vLLM's or an algorithm of SGLang's: NEXTN drafts by such a layer."""
    if name is False:
        return "off"  # as YAML reads a bare `off`
    if not isinstance(name, str):
        return name
    lower = name.lower()
    if lower in ("mtp", "nextn") or lower.endswith("_mtp"):  # such as deepseek_mtp, glm4_moe_mtp
        return "mtp"
    return "auto" if lower == "ngram" else name


Mode = Literal["off", "auto", "lookup", "mtp"]


class SpeculationConfig(Section):
    """Guesses of tokens, which a step verifies together. They change no token, only how many a step yields."""

    # auto: guesses come from text that came before, and from the checkpoint's layer for multi-token prediction if it
    # has one, as many as pay by the measured times of steps; lookup: from text, as many as there are, whether they pay
    # or not; mtp: from that layer, in every step; off: none
    mode: Mode = "off"
    max_drafts: PositiveInt = Field(default=8, le=64)  # of one request in one step
    # Of these, how many the layer for multi-token prediction guesses. It has learnt to guess one, and runs once for
    # each.
    predicted_drafts: PositiveInt = Field(default=1, le=8)
    # Memory of a rank's index of texts, by default of six million tokens; places in it are numbers of 32 bits
    index_mib: PositiveFloat = Field(default=64.0, le=16384)

    @property
    def reads_text(self) -> bool:
        """Whether guesses come from text."""
        return self.mode in ("auto", "lookup")

    @field_validator("mode", mode="before")
    @classmethod
    def _by_names_of_others(cls, value: object) -> object:
        mode, modes = mode_of(value), get_args(Mode)
        if mode not in modes:
            near = difflib.get_close_matches(str(mode).lower(), modes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else NO_DRAFT_MODEL
            raise ValueError(f"it is {reprlib.repr(mode)}, expected {', '.join(modes[:-1])} or {modes[-1]}; {hint}")
        return mode


class LauncherConfig(Section):
    """The hosts of `moe-serve serve`, and restarts of lost ranks by it and by `LLM`."""

    # `moe-serve serve` runs on each of so many hosts, with the same settings but node_rank (0 to nnodes - 1) and
    # parallel.num_ranks / nnodes ranks. Node rank 0 listens at dist_init_addr, HOST:PORT.
    nnodes: PositiveInt = Field(default=1, le=64)
    node_rank: NonNegativeInt = 0
    # With parallel.num_prefill_ranks and several hosts: so many of these, the last ones, have the prefill ranks, and
    # the first ones those that decode. Every host of a role has as many of its ranks.
    prefill_nnodes: PositiveInt = 1
    dist_init_addr: str | None = None
    # Which hosts take HTTP, each with server.api_workers front ends. With one on every host, the hosts that go on after
    # the loss of others always have one.
    front_ends: Literal["first_host", "every_host"] = "first_host"
    max_restarts: NonNegativeInt = 3  # a lost rank, or all, are started again so often within the window; 0: never
    restart_window_s: PositiveFloat = 600.0  # a restart that is longer ago does not count

    @model_validator(mode="after")
    def _hosts_can_meet(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank is {self.node_rank} but nnodes is {self.nnodes}; node ranks count from 0 to "
                f"{self.nnodes - 1}"
            )
        if self.nnodes > 1:
            self.meeting_place()
        return self

    def meeting_place(self) -> tuple[str, int]:
        """Returns host and port of dist_init_addr. Raises ValueError where it is no HOST:PORT."""
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"dist_init_addr is {self.dist_init_addr} but nnodes is {self.nnodes}, and the hosts meet there; set "
                "it to HOST:PORT, an address of node rank 0 that the others reach and a free port"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)


class ServeConfig(Section):
    """The whole configuration of a serving system."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    dispatch: DispatchConfig = DispatchConfig()
    eplb: EplbConfig = EplbConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
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
    def _drafts_change_no_token(self) -> Self:
        if self.engine.expert_capacity is not None and self.speculation.mode != "off":
            raise ValueError(
                f"engine.expert_capacity is {self.engine.expert_capacity:g}, by which drafts would change the experts "
                f"of other tokens, but speculation.mode is {self.speculation.mode}; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _hosts_have_equal_shares(self) -> Self:
        nnodes, num_ranks = self.launcher.nnodes, self.parallel.num_ranks
        if num_ranks % nnodes and not self.parallel.num_prefill_ranks:  # of which each role has hosts of its own
            raise ValueError(
                f"parallel.num_ranks is {num_ranks} but launcher.nnodes is {nnodes}, and every host has as many ranks; "
                f"set parallel.num_ranks to a multiple of {nnodes}"
            )
        last = 65536 - self.server.api_workers
        if self.parallel.num_prefill_ranks:
            last = 65535 - 2 * self.server.api_workers
        if nnodes > 1 and not 0 < self.server.worker_port <= last:
            raise ValueError(
                f"server.worker_port is {self.server.worker_port} but ranks of other hosts attach there, and at the "
                "next ports where there are several front ends or prefill ranks; name one from 1 to "
                f"{last}"
            )
        return self

    def nodes_of(self, role: Literal["prefill", "decode"]) -> range:
        """Returns the node ranks of the hosts with a role: the first ones decode."""
        nnodes = self.launcher.nnodes
        if nnodes == 1:
            return range(1)
        num_decode = nnodes - self.launcher.prefill_nnodes
        return range(num_decode) if role == "decode" else range(num_decode, nnodes)

    @property
    def nodes(self) -> range:
        """The node ranks of the hosts of `parallel.num_ranks`, of which each has as many."""
        role = self.parallel.role
        if role == "both":
            return self.nodes_of("decode") if self.parallel.num_prefill_ranks else range(self.launcher.nnodes)
        return self.nodes_of(role)

    @property
    def ranks_per_host(self) -> int:
        """How many of `parallel.num_ranks` a host of theirs has."""
        return self.parallel.num_ranks // len(self.nodes)

    @property
    def prefill_port(self) -> int:
        """Where prefill ranks of other hosts attach to the first front end, and at the next ports to further ones."""
        return self.server.worker_port + self.server.api_workers

    @property
    def page_port(self) -> int:
        """Where each decode host takes pages of prefill ranks of other hosts, behind all ports where ranks attach. The
        first of several prefill hosts has the store of their launch there."""
        return self.prefill_port + self.server.api_workers

    @property
    def num_front_ends(self) -> int:
        """The front ends of all hosts."""
        every = self.launcher.front_ends == "every_host"
        return self.server.api_workers * (self.launcher.nnodes if every else 1)

    @property
    def has_front_ends(self) -> bool:
        """Whether this host has some."""
        return self.launcher.front_ends == "every_host" or self.launcher.node_rank == 0

    @model_validator(mode="after")
    def _roles_fit(self) -> Self:
        parallel = self.parallel
        if parallel.role != "both" and not parallel.num_prefill_ranks:
            raise ValueError(
                f"parallel.role is {parallel.role} but parallel.num_prefill_ranks is 0; leave parallel.role out, and "
                "start both groups by moe-serve serve --prefill-ranks P --decode-ranks D"
            )
        if self.launcher.prefill_nnodes > 1 and (self.launcher.nnodes == 1 or not parallel.num_prefill_ranks):
            why = "there is one host" if self.launcher.nnodes == 1 else "parallel.num_prefill_ranks is 0"
            raise ValueError(
                f"launcher.prefill_nnodes is {self.launcher.prefill_nnodes} but {why}; set launcher.prefill_nnodes: 1"
            )
        if not parallel.num_prefill_ranks:
            return self
        if self.launcher.nnodes > 1:
            self._roles_divide_over_hosts()
        if self.launcher.nnodes > 1 and self.launcher.front_ends == "every_host":
            raise ValueError(
                f"parallel.num_prefill_ranks is {parallel.num_prefill_ranks} on {self.launcher.nnodes} hosts but "
                "launcher.front_ends is every_host, and HTTP is taken on the host of the decode ranks; set "
                "launcher.front_ends: first_host, and server.api_workers for more front ends there"
            )
        if parallel.device == "cuda":
            raise ValueError(
                "parallel.num_prefill_ranks is above 0 but parallel.device is cuda, and prefill ranks are on CPUs; set "
                "parallel.num_prefill_ranks: 0, or parallel.device: cpu"
            )
        if self.eplb.record_path is not None:
            raise ValueError(
                "eplb.record_path is one file, which prefill and decode ranks would both write; leave it out, or set "
                "parallel.num_prefill_ranks: 0"
            )
        return self

    def _roles_divide_over_hosts(self) -> None:
        parallel, nnodes, prefill_nnodes = self.parallel, self.launcher.nnodes, self.launcher.prefill_nnodes
        if prefill_nnodes >= nnodes:
            raise ValueError(
                f"launcher.prefill_nnodes is {prefill_nnodes} of launcher.nnodes {nnodes}, and no host is left for the "
                f"ranks that decode; lower it to {nnodes - 1} or less"
            )
        if parallel.role != "both":
            return
        for number, hosts, setting, count in (
            (parallel.num_ranks, nnodes - prefill_nnodes, "parallel.num_ranks", "launcher.nnodes - prefill_nnodes"),
            (parallel.num_prefill_ranks, prefill_nnodes, "parallel.num_prefill_ranks", "launcher.prefill_nnodes"),
        ):
            if number % hosts:
                raise ValueError(
                    f"{setting} is {number} on {hosts} hosts ({count}), and every host of a role has as many ranks; "
                    f"set it to a multiple of {hosts}, or change launcher.prefill_nnodes"
                )

    def of_role(self, role: Literal["prefill", "decode"]) -> "ServeConfig":
        """Returns the configuration of the ranks with a role; `parallel.num_ranks` is how many they are."""
        if role == self.parallel.role:
            return self
        assert self.parallel.role != "prefill", "how many ranks decode is not known there"
        number = self.parallel.num_prefill_ranks if role == "prefill" else self.parallel.num_ranks
        parallel = self.parallel.model_copy(update={"role": role, "num_ranks": number})
        return self.model_copy(update={"parallel": parallel})

    def of_this_host(self) -> "ServeConfig":
        """Returns the configuration of this host's ranks, where each role has hosts of its own."""
        if self.launcher.nnodes == 1 or not self.parallel.num_prefill_ranks:
            return self
        return self.of_role("decode" if self.launcher.node_rank in self.nodes_of("decode") else "prefill")

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
    """Returns the folder of the model, or its GGUF file; `demo` is the folder inside the package.

    A name of the Hugging Face Hub means the folder of its files in the cache on this machine.
    """
    if config.path == DEMO_MODEL:
        return Path(str(resources.files("moe_serve") / "demo_model"))
    folder = Path(config.path).expanduser()
    return folder if folder.exists() or not is_hub_name(config.path) else _of_hub_cache(config.path) or folder


def is_hub_name(path: str) -> bool:
    """Returns whether a path may be a name of the Hugging Face Hub, such as Qwen/Qwen3-30B-A3B."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not path.endswith(".gguf")


def hub_cache() -> Path:
    """Returns the folder in which Hugging Face's tools keep what they have downloaded, by their variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _of_hub_cache(name: str) -> Path | None:
    """Returns the folder of a model's main revision, None where it is not in the cache.

    Layout: huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    found = folder / "snapshots" / revision
    return found if re.fullmatch(r"[\w.-]+", revision) and found.is_dir() else None


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the model for clients: as configured, else `demo`, or that of its folder or file."""
    folder = model_dir(config)
    of_files = folder.name.removesuffix(".gguf")
    is_of_hub = is_hub_name(config.path) and folder != Path(config.path)
    return config.served_name or (config.path if config.path == DEMO_MODEL or is_of_hub else of_files,)


def served_name(config: ModelConfig) -> str:
    """Returns the name of the model in answers and metrics."""
    return served_names(config)[0]
