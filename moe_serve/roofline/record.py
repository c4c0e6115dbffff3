"""Records the steps of a model for the cost model: a few sizes of each, and from them what grows with what.

Bytes, FLOP and launches of a kernel are sums over units of the batch (eplb/cost/step_record.py). Rows and experts are
told apart by the rules of work.py, the other units by recording sizes that differ in them. Steps are recorded with two
layers of each kind, whose second one stands for all; what is over is of the step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_serve.ep.expert_form import choose_expert_form
from moe_serve.eplb.cost.step_record import KernelRecord, Layers, ModelSteps, Rate, StepRecord, Unit
from moe_serve.eplb.load import Phase
from moe_serve.errors import ConfigError
from moe_serve.kernels.part_clock import ATTENTION, EXPERTS, OTHER, PARTS
from moe_serve.models.spec import CompressedSpec, GqaSpec, MlaSpec, ModelSpec
from moe_serve.roofline.launches import Launch
from moe_serve.roofline.step import RankStep, Transport, even_sizes, record_step
from moe_serve.roofline.work import ExpertLoad, work_of

STEPS: tuple[tuple[Phase, Transport], ...] = (
    ("decode", "local"), ("decode", "slabs"), ("prefill", "local"), ("prefill", "collective"),
)  # fmt: skip
_ATTENTION = {"attend_kernel", "expand_kernel"}
_WEIGHT_OF = {"mm": 1, "addmm": 2, "addmm_": -1}  # which tensor of a product is the weight
CACHE_DTYPES = {"auto": torch.bfloat16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
_EXACT = 1e-6  # of an amount: what is smaller is noise of the fit


@dataclass(frozen=True)
class _Size:
    """sequences, context, new_tokens: as of RankStep;  ranks: which of `_numbers_of_ranks`"""

    sequences: int
    context: int
    new_tokens: int = 1
    ranks: int = 0


# Of each phase sizes differ in one unit after the other. Decodes: enough rows that no row's keys are cut into parts.
_SIZES: dict[Phase, tuple[_Size, ...]] = {
    "decode": (
        _Size(128, 4095), _Size(256, 4095), _Size(128, 8191), _Size(128, 4095, ranks=1), _Size(128, 4095, ranks=2),
    ),
    "prefill": (
        _Size(1, 0, 1024), _Size(2, 0, 1024), _Size(1, 0, 2048), _Size(1, 0, 4096), _Size(1, 1024, 1024),
        _Size(1, 1024, 2048), _Size(1, 0, 1024, ranks=1), _Size(2, 0, 1024, ranks=1), _Size(1, 0, 1024, ranks=2),
    ),
}  # fmt: skip
_UNITS: dict[Phase, tuple[Unit, ...]] = {
    "decode": ("step", "token", "key"),
    "prefill": ("step", "token", "sequence", "key", "pair", "square"),
}


@dataclass(frozen=True)
class _Key:
    part: str
    name: str
    rate: Rate


@dataclass
class _Sums:
    """Of the launches of one kernel in a layer. row_*, expert_*: what a row, and an expert with rows, add"""

    launches: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0
    row_bytes: float = 0.0
    row_flops: float = 0.0
    expert_bytes: float = 0.0

    def add(self, other: "_Sums", times: int = 1) -> None:
        """Adds another kernel's, so many times."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)


def record_model(
    spec: ModelSpec,
    name: str,
    wire: str = "auto",
    progress: Callable[[float, float | None], None] = lambda *_: None,
    redundant: int = 0,
    cache: str = "auto",
) -> ModelSteps:
    """Returns the steps of a model: decodes and prefills, on one rank and on several.

    wire: as dispatch.wire_dtype;  progress: called with (kinds of steps recorded, all of them)
    redundant: slots beside one of each expert, among several ranks;  cache: as cache.dtype
    Raises ConfigError for a wire or a cache that is unknown, and for one that the model cannot have.
    """
    if wire not in ("auto", "bf16", "fp8"):
        raise ConfigError(f"the wire of GPUs is {wire!r}; choose auto, bf16 or fp8")
    if cache not in CACHE_DTYPES:
        raise ConfigError(f"the KV cache is in {cache!r}; choose one of {', '.join(CACHE_DTYPES)}")
    if cache != "auto" and isinstance(spec.attention, MlaSpec) and spec.attention.indexer is not None:
        raise ConfigError(f"{spec.model_type} has an indexer, which reads its keys in bfloat16; record with auto")
    if spec.stateful is not None:
        raise ConfigError(f"{spec.model_type} keeps states of requests, for which there is no GPU kernel: no steps")
    if spec.router.num_identity:
        raise ConfigError(f"{spec.model_type} has experts that give back what they take, which no GPU runs: no steps")
    if isinstance(spec.attention, GqaSpec) and spec.attention.value_dim is not None:
        raise ConfigError(f"{spec.model_type} has values narrower than keys, which no GPU kernel has: no steps")
    if isinstance(spec.attention, CompressedSpec):
        raise ConfigError(f"{spec.model_type} attends entries of groups of tokens, which no GPU kernel has: no steps")
    experts = choose_expert_form(
        "auto", spec.fp8_block, "cuda", True, in_mxfp4=spec.experts_in_mxfp4, has_narrow_rows=True
    )
    sizes = {
        "num_layers": spec.num_layers, "num_moe_layers": spec.num_moe_layers, "hidden": spec.hidden,
        "num_logical": spec.num_logical, "topk": spec.topk,
    }  # fmt: skip
    like = RankStep(spec, expert_form=experts, wire_dtype=wire, redundant=redundant, cache_dtype=CACHE_DTYPES[cache])
    steps = []
    progress(0, len(STEPS))
    for phase, transport in STEPS:
        steps.append(record_kind(like, phase, transport))
        progress(len(steps), len(STEPS))
    return ModelSteps(name, sizes, experts, wire, tuple(steps), redundant, cache)


def record_kind(like: RankStep, phase: Phase, transport: Transport) -> StepRecord:
    """Returns the steps of one kind. like: their model and the forms of its weights and rows"""
    return StepRecord(phase, transport, tuple(_kernels(like, phase, transport)))


def _kernels(like: RankStep, phase: Phase, transport: Transport) -> Iterable[KernelRecord]:
    """Returns the kernels of a step, by layers."""
    if transport == "local":  # one rank has each expert once
        like = replace(like, redundant=0)
    ranks = [1] if transport == "local" else _numbers_of_ranks(like.spec.num_logical, like.redundant)
    sizes = [size for size in _SIZES[phase] if size.ranks < len(ranks)]
    of_ranks: tuple[Unit, ...] = ("rank", "slot")  # told apart by a third number of ranks
    units = (*_UNITS[phase], *of_ranks[: len(ranks) - 1])
    if transport == "collective" and len(ranks) > 1:
        units = (*units, "sent")
    of_step: list[dict[_Key, _Sums]] | None = None
    for one, times in _kinds(like.spec).items():
        two = _two_layers(like.spec, one)
        steps = [
            replace(
                like, spec=two, sequences=size.sequences, context=size.context, new_tokens=size.new_tokens,
                transport=transport, num_ranks=ranks[size.ranks],
            )
            for size in sizes
        ]  # fmt: skip
        recorded = [_sums_of(step) for step in steps]
        layers: Layers = "moe" if two.moe_layer_ids else "dense"
        yield from _fitted(steps, [layer for layer, _ in recorded], units, layers, times)
        of_step = of_step or [rest for _, rest in recorded]
    assert of_step is not None, "a model has layers"
    yield from _fitted(steps, of_step, units, "none", 1)


def _numbers_of_ranks(num_experts: int, redundant: int) -> list[int]:
    """Returns up to three numbers of ranks over which the slots can be spread evenly, no expert twice on a rank."""
    slots = num_experts + redundant
    tried = dict.fromkeys((16, 8, 4, 2, *range(3, 16)))  # each once: equal sizes tell nothing apart
    found = [ranks for ranks in tried if slots % ranks == 0 and slots <= ranks * num_experts]
    return sorted(found[:3]) or [1]


def _kinds(spec: ModelSpec) -> Mapping[int, int]:
    """Returns a layer of each kind, and how many are like it."""
    attention = spec.attention if isinstance(spec.attention, GqaSpec) else None

    def kind(layer: int) -> tuple[object, ...]:
        of_attention: tuple[object, ...] = ()
        if attention is not None:
            is_rotated = layer not in attention.unrotated_layer_ids
            of_attention = attention.window_of(layer), attention.chunk_of(layer), is_rotated
        return layer in spec.moe_layer_ids, *of_attention

    numbers = Counter(kind(layer) for layer in range(spec.num_layers))
    first = {kind(layer): layer for layer in reversed(range(spec.num_layers))}
    return {first[each]: number for each, number in numbers.items()}


def _two_layers(spec: ModelSpec, layer: int) -> ModelSpec:
    """Returns the model with two layers of a kind."""
    attention = spec.attention
    if isinstance(attention, GqaSpec):
        attention = replace(
            attention,
            windowed_layer_ids=(0, 1) if layer in attention.windowed_layer_ids else (),
            chunked_layer_ids=(0, 1) if layer in attention.chunked_layer_ids else (),
            unrotated_layer_ids=(0, 1) if layer in attention.unrotated_layer_ids else (),
        )
    return replace(spec, num_layers=2, moe_layer_ids=(0, 1) if layer in spec.moe_layer_ids else (), attention=attention)


def _sums_of(step: RankStep) -> tuple[dict[_Key, _Sums], dict[_Key, _Sums]]:
    """Returns the kernels of a layer, and those of the step beside its layers."""
    launches = record_step(step).launches
    begins = [
        index
        for index, launch in enumerate(launches)
        if launch.part == ATTENTION and (index == 0 or launches[index - 1].part != ATTENTION)
    ]
    second = launches[begins[1] :]
    last_part = max(index for index, launch in enumerate(second) if _in_layer(launch))
    layer = _add_up(second[: last_part + 1], step)
    rest = _add_up(launches, step)
    for key, sums in layer.items():
        rest[key].add(sums, -2)
    return layer, {key: sums for key, sums in rest.items() if sums.launches > 0}


def _in_layer(launch: Launch) -> bool:
    return 0 <= launch.part < len(PARTS) and PARTS[launch.part] not in ("vocabulary", "other", "between")


def _add_up(launches: list[Launch], step: RankStep) -> dict[_Key, _Sums]:
    found: dict[_Key, _Sums] = defaultdict(_Sums)
    for launch in launches:
        nothing, row, expert = (work_of(launch, step, ExpertLoad(*load)) for load in ((0, 0), (1, 0), (0, 1)))
        row_bytes, row_flops = row.num_bytes - nothing.num_bytes, row.flops - nothing.flops
        sums = _Sums(1, nothing.num_bytes, nothing.flops, row_bytes, row_flops, expert.num_bytes - nothing.num_bytes)
        found[_key(launch)].add(sums)
    return found


def _key(launch: Launch) -> _Key:
    name = launch.name.removesuffix("_kernel")
    if launch.name in _WEIGHT_OF:
        weight = launch.tensors[_WEIGHT_OF[launch.name]]
        name = f"{name.rstrip('_')} {weight.shape[0]} x {weight.shape[1]}"
    elif "n" in launch.arguments and "k" in launch.arguments:
        name = f"{name} {launch.arguments['k']} x {launch.arguments['n']}"
    rate: Rate = "attention" if launch.name in _ATTENTION else "fp8" if launch.arguments.get("SCALED") else "bf16"
    return _Key(PARTS[launch.part] if launch.part >= 0 else PARTS[OTHER], name, rate)


def _fitted(
    steps: list[RankStep], recorded: list[dict[_Key, _Sums]], units: tuple[Unit, ...], layers: Layers, times: int
) -> Iterable[KernelRecord]:
    """Returns the kernels whose recorded sums are given for each step, as sums over units."""
    amounts = np.array([[amount_of(unit, step) for unit in units] for step in steps])
    scale = amounts.max(axis=0)
    for key in dict.fromkeys(key for sums in recorded for key in sums):
        each = [sums.get(key, _Sums()) for sums in recorded]

        def fit(name: str) -> dict[Unit, float]:
            values = np.array([float(getattr(sums, name)) for sums in each])  # noqa: B023, called before the next turn
            if not values.any():
                return {}
            found = np.linalg.lstsq(amounts / scale, values, rcond=None)[0]
            most = np.abs(values).max()
            return {
                unit: float(f"{number / of_unit:.9g}")
                for unit, number, of_unit in zip(units, found, scale, strict=True)
                if abs(number) > _EXACT * most
            }

        num_bytes, flops, last = fit("num_bytes"), fit("flops"), each[-1]
        if key.part == PARTS[EXPERTS] and "token" in num_bytes:  # rows of experts, which were as many as were sent
            num_bytes["row"] = num_bytes.pop("token") / steps[0].spec.topk
        of_load: tuple[tuple[dict[Unit, float], Unit, float], ...] = (
            (num_bytes, "row", last.row_bytes),
            (num_bytes, "expert", last.expert_bytes),
            (flops, "row", last.row_flops),
        )
        for work, unit, number in of_load:
            if number:
                work[unit] = work.get(unit, 0.0) + number
        yield KernelRecord(key.part, key.name, layers, times, key.rate, fit("launches"), num_bytes, flops)


def amount_of(unit: Unit, step: RankStep) -> float:
    """Returns how much a step has of a unit that is not of its experts."""
    match unit:
        case "token":
            return step.tokens
        case "sequence":
            return step.sequences
        case "key":
            return step.sequences * step.length
        case "pair":
            return step.tokens * step.length
        case "square":
            return step.tokens * step.new_tokens
        case "sent":
            return sum(even_sizes(step).rows)
        case "rank":
            return step.num_ranks
        case "slot":
            return step.placement.slots_per_rank
        case _:
            assert unit == "step", f"{unit} is of experts"
            return 1.0
