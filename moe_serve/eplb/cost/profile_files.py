"""Profiles of machines, models and engines for the cost model: numbers from YAML files, each with its source.

A file holds one profile:

    name: H100
    fp8_flops: {value: 1979e12, source: "where this number is from"}
    ...

The packaged ones are in profiles/hardware, profiles/models and profiles/engines; a path to another file works as well.
"""

from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import yaml

from moe_serve.eplb.cost.step_record import ModelSteps, load_steps
from moe_serve.errors import ConfigError

OURS = "moe_serve"  # the profile of our engine
Kind = Literal["hardware", "models", "engines"]
ReplicaChoice = Literal["", "own_first"]
Prompts = Literal["", "whole"]
# All other fields are numbers.
_WORDS = ("attention", "compute", "expert_compute", "attention_compute", "replica_choice", "prompts")


@dataclass(frozen=True)
class HardwareProfile:
    """One GPU (or CPU process) and its network. Rates are per rank; "link" joins ranks of a node, "nic" joins nodes.

    fp8_flops, bf16_flops:   peak dense matrix rate, FLOP/s (a CPU profile gives its float32 rate for both)
    fp4_flops:               the same of 4-bit floats; 0 = the chip has none, GEMMs of such weights run at fp8_flops
    hbm_bytes, hbm_bytes_per_s: memory and its peak rate
    ranks_per_node:          ranks that share the fast link
    link_bytes_per_s, nic_bytes_per_s: peak rate in each direction
    node_nic_bytes_per_s:    rate of all NICs of a node together
    tile_rows:               rows per tile of a grouped GEMM: an expert's rows are rounded up to it
    gemm_efficiency, hbm_efficiency: share of the peaks that large grouped GEMMs reach
    attention_flops, attention_bytes_per_s: rates that the attention kernel reaches
    link_efficiency, nic_efficiency_low_latency, nic_efficiency_normal: shares that dispatch and combine reach
    dispatch_latency_s, combine_latency_s: time of a dispatch and a combine without rows
    overlap_compute_share:   compute units left for compute while normal dispatch and combine hold the others
    sources:                 field -> where its number is from
    """

    name: str
    fp8_flops: float
    bf16_flops: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    ranks_per_node: int
    link_bytes_per_s: float
    nic_bytes_per_s: float
    node_nic_bytes_per_s: float
    tile_rows: int
    gemm_efficiency: float
    hbm_efficiency: float
    attention_flops: float
    attention_bytes_per_s: float
    link_efficiency: float
    nic_efficiency_low_latency: float
    nic_efficiency_normal: float
    dispatch_latency_s: float
    combine_latency_s: float
    overlap_compute_share: float
    fp4_flops: float = 0.0
    sources: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def scaled(self, **factors: float) -> Self:
        """Returns the profile with these fields multiplied, to see what would change."""
        numbers = [f.name for f in fields(self) if f.name not in ("name", "sources")]
        unknown = sorted(set(factors) - set(numbers))
        if unknown:
            raise ConfigError(f"hardware profiles have no number {', '.join(unknown)}; they have {', '.join(numbers)}")
        changed = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, **changed)


@dataclass(frozen=True)
class ModelProfile:
    """The shapes of a model that its time depends on.

    num_layers, num_moe_layers, hidden, vocab: all layers and those with experts
    num_logical, topk, moe_intermediate: routed experts of a layer, experts per token, their width
    num_shared, dense_intermediate: shared experts (as many widths in one); width of layers without experts, 0 = none
    num_groups, topk_groups: router groups, and how many of them a token may use; 1, 1 = no groups
    attention:   "mla" or "gqa"; num_heads, and of mla: q_lora (0 = none), kv_lora, nope_dim, rope_dim, v_dim; of gqa:
                 num_kv_heads, head_dim
                 num_kv_heads, head_dim, and q_lora, o_lora, o_groups where queries and outputs are low rank: outputs
                 in o_groups parts (0: one), o_lora values of all parts together
    attended:    the most cached tokens that a token attends to in the mean layer, 0 = all of them
    weight_bytes, kv_bytes, dispatch_bytes, combine_bytes: of one value, scales included
    compute:     the matrix rate of GEMMs
    expert_weight_bytes, expert_compute: the same of routed experts where they differ, as with 4-bit experts; 0 and ""
                 = as all others
    attention_compute: fp8, where the core of attention is computed in it; "" = in bf16
    """

    name: str
    num_layers: int
    num_moe_layers: int
    hidden: int
    vocab: int
    num_logical: int
    topk: int
    moe_intermediate: int
    num_shared: int
    dense_intermediate: int
    num_groups: int
    topk_groups: int
    attention: Literal["mla", "gqa"]
    num_heads: int
    weight_bytes: float
    kv_bytes: float
    dispatch_bytes: float
    combine_bytes: float
    compute: Literal["fp8", "bf16"]
    expert_weight_bytes: float = 0.0
    expert_compute: Literal["", "fp4", "fp8", "bf16"] = ""
    attention_compute: Literal["", "fp8"] = ""
    attended: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    o_lora: int = 0
    o_groups: int = 0
    sources: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert of one layer: gate, up and down."""
        return round(3 * self.hidden * self.moe_intermediate * (self.expert_weight_bytes or self.weight_bytes))

    def gqa_projections(self, ranks: int = 1) -> list[tuple[int, int]]:
        """Returns the [k] x [k, n] of queries, keys, values and outputs as (n, k), of GQA. ranks: share the heads"""
        h, all_heads = self.hidden, self.num_heads * self.head_dim
        wide, keys = all_heads // ranks, 2 * self.kv_heads_of(ranks) * self.head_dim
        queries = [(self.q_lora + keys, h), (wide, self.q_lora)] if self.q_lora else [(wide + keys, h)]
        low = self.o_lora // ranks
        outputs = [(low, all_heads // max(self.o_groups, 1)), (h, low)] if self.o_lora else [(h, wide)]
        return queries + outputs

    def kv_heads_of(self, ranks: int) -> int:
        """Returns the heads of keys and values that each of these ranks holds, of GQA."""
        return max(self.num_kv_heads // ranks, 1)

    @property
    def other_bytes(self) -> int:
        """Weights beside the routed experts, which every rank holds whole: embedding, head and router in two bytes."""
        h, heads = self.hidden, self.num_heads
        if self.attention == "mla":
            queries = heads * (self.nope_dim + self.rope_dim)
            attention = h * self.q_lora + self.q_lora * queries if self.q_lora else h * queries
            attention += h * (self.kv_lora + self.rope_dim) + self.kv_lora * heads * (self.nope_dim + self.v_dim)
            attention += heads * self.v_dim * h
        else:
            attention = sum(n * k for n, k in self.gqa_projections())
        shared = 3 * h * self.num_shared * self.moe_intermediate
        dense = 3 * h * self.dense_intermediate * (self.num_layers - self.num_moe_layers)
        narrow = (attention * self.num_layers + shared * self.num_moe_layers + dense) * self.weight_bytes
        return round(narrow + 2 * (2 * self.vocab * h + self.num_moe_layers * h * self.num_logical))

    @property
    def kv_token_bytes(self) -> int:
        """The KV cache of one token, all layers."""
        values = self.kv_lora + self.rope_dim if self.attention == "mla" else 2 * self.num_kv_heads * self.head_dim
        return round(values * self.kv_bytes * self.num_layers)


@dataclass(frozen=True)
class EngineProfile:
    """The distance of an engine from the modelled kernels.

    step_factor:   whole step / its modelled parts, in both phases: launches, gaps, host work, kernels slower than the
                   published ones; 1 = nothing but the modelled parts
    launch_s:      0, or of an engine whose launches are recorded: time of a launch in which nothing computes
    host_launch_s: of such an engine: the host's time for a launch outside of graphs
    steps:         its recorded launches; None: those that are packaged for the model
    replica_choice: own_first, where a rank that holds a replica sends its tokens there; "" = evenly to all replicas
    prompts:       whole, where a prompt is computed in one step, beside all decodes of its rank; "" = in chunks, so
                   that all steps have as many rows
    Raises ConfigError for another choice.
    """

    name: str
    step_factor: float
    launch_s: float = 0.0
    host_launch_s: float = 0.0
    steps: ModelSteps | None = None
    replica_choice: ReplicaChoice = ""
    prompts: Prompts = ""
    sources: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        if self.replica_choice not in get_args(ReplicaChoice):
            raise ConfigError(f"replica_choice is {self.replica_choice!r}; give own_first, or leave it out")
        if self.prompts not in get_args(Prompts):
            raise ConfigError(f"prompts is {self.prompts!r}; give whole, or leave it out")


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """Returns a packaged hardware profile by name ("H800", ...), or the one in a YAML file.

    Raises ConfigError when there is no such profile, or one of its fields is missing, unknown or without a source.
    """
    return HardwareProfile(**_read(name_or_path, "hardware", HardwareProfile))


def load_model_profile(name_or_path: str | Path) -> ModelProfile:
    """Returns a packaged model profile by name ("DeepSeek-V3", ...), or the one in a YAML file; errors as above."""
    return ModelProfile(**_read(name_or_path, "models", ModelProfile))


def load_engine(name_or_path: str | Path) -> EngineProfile:
    """Returns a packaged engine profile by name ("SGLang", ...), or the one in a YAML file; errors as above.

    A JSON file holds steps of our engine, as `moe-serve roofline --save` writes them.
    """
    if str(name_or_path).endswith(".json"):
        return replace(load_engine(OURS), steps=load_steps(name_or_path))
    return EngineProfile(**_read(name_or_path, "engines", EngineProfile))


def profile_names(kind: Kind) -> list[str]:
    """Returns the names of the packaged profiles."""
    folder = resources.files("moe_serve.eplb.cost") / "profiles" / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read(name_or_path: str | Path, kind: Kind, profile: type) -> dict[str, Any]:
    names = profile_names(kind)
    known = {name.lower(): name for name in names}
    asked = str(name_or_path)
    if asked.lower() in known:
        entry = resources.files("moe_serve.eplb.cost") / "profiles" / kind / f"{known[asked.lower()]}.yaml"
        text = entry.read_text(encoding="utf-8")
    elif Path(asked).is_file():
        text = Path(asked).read_text(encoding="utf-8")
    else:
        raise ConfigError(f"no {kind} profile {asked!r}; use one of {', '.join(names)}, or the path of a YAML file")
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{asked} is not YAML ({error}); see the packaged profiles for the form") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{asked} holds no mapping of fields; see the packaged profiles for the form")
    return _checked(asked, raw, profile)


def _checked(asked: str, raw: dict[str, Any], profile: type) -> dict[str, Any]:
    types = {f.name: f for f in fields(profile) if f.name not in ("sources", "steps")}
    raw = {key: value for key, value in raw.items() if not str(key).startswith("_")}  # _anything: YAML anchors
    unknown = sorted(set(raw) - set(types))
    missing = sorted(name for name, f in types.items() if f.default is MISSING and name not in raw)
    if unknown or missing:
        raise ConfigError(f"{asked}: unknown {unknown}, missing {missing}; give exactly {', '.join(sorted(types))}")
    values: dict[str, Any] = {"name": str(raw.pop("name"))}
    sources: dict[str, str] = {}
    for name, item in raw.items():
        if not isinstance(item, dict) or set(item) != {"value", "source"} or not str(item["source"]).strip():
            raise ConfigError(f"{asked}: {name} is {item!r}; write {{value: ..., source: where it is from}}")
        sources[name] = str(item["source"])
        try:
            values[name] = item["value"] if name in _WORDS else float(item["value"])
        except (TypeError, ValueError):
            raise ConfigError(f"{asked}: {name} is {item['value']!r}; give a number") from None
        if types[name].type in (int, "int"):
            values[name] = int(values[name])
    return {**values, "sources": MappingProxyType(sources)}
