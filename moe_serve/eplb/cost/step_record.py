"""What the kernels of a step do on a GPU: launches, bytes and FLOP of each, as numbers that grow with the batch.

`moe-serve roofline` records the steps of our decoder on tensors without memory (moe_serve/roofline) and writes them as
JSON; `simulate` prices them, and neither needs torch for it. The records of the packaged models are in
profiles/steps. Each amount is a sum over units of the batch:

    step      one in each step
    token     new tokens of the rank
    sequence  requests that they belong to
    key       tokens in the cache of these, the new ones included
    pair      new tokens x tokens in the cache of their request
    square    new tokens x new tokens of their request
    row       rows that the experts of the rank get
    expert    experts of the rank that get any
    sent      rows that the rank sends: one of each token for each rank that has any of its experts
    rank      ranks
    slot      slots of the rank
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import ConfigError

Floats = NDArray[np.float64]
Unit = Literal["step", "token", "sequence", "key", "pair", "square", "row", "expert", "sent", "rank", "slot"]
Rate = Literal["bf16", "fp8", "attention"]  # of its FLOP: dense or grouped products, or attention
Layers = Literal["moe", "dense", "none"]
Work = Mapping[Unit, float]
Amounts = Mapping[Unit, "float | Floats"]
FORMAT = "moe_serve.steps"


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a step, all launches of it in a layer together.

    part:     of the step, of kernels.part_clock.PARTS
    layers:   in which it runs: those with experts, those without, or none; times: how many they are, 1 for none
    launches: how often it is started in one of them;  num_bytes: read and written there;  flops: computed there
    """

    part: str
    name: str
    layers: Layers
    times: int
    rate: Rate
    launches: Work
    num_bytes: Work
    flops: Work


@dataclass(frozen=True)
class StepRecord:
    """The kernels of a step of one kind.

    phase:     "decode" or "prefill"
    transport: "local" on one rank; between GPUs "slabs", or "collective"
    """

    phase: str
    transport: str
    kernels: tuple[KernelRecord, ...]


@dataclass(frozen=True)
class ModelSteps:
    """The steps of one model.

    name:    of the model
    sizes:   its num_layers, num_moe_layers, hidden, num_logical and topk, so that nothing else is priced by it
    experts: form of expert weights;  wire: dtype of rows on their way to experts
    redundant: slots beside one of each expert, between several ranks, which choose replicas in each step where there
             are any;  cache: form of keys and values, as cache.dtype
    """

    name: str
    sizes: Mapping[str, int]
    experts: str
    wire: str
    steps: tuple[StepRecord, ...]
    redundant: int = 0
    cache: str = "auto"

    def slots_per_rank(self, num_ranks: int) -> int:
        """Returns the slots of each of so many ranks."""
        return -(-(self.sizes["num_logical"] + (self.redundant if num_ranks > 1 else 0)) // num_ranks)

    def step(self, phase: str, num_ranks: int) -> StepRecord:
        """Returns the step of a phase on so many ranks."""
        return next(
            each for each in self.steps if each.phase == phase and (each.transport == "local") == (num_ranks == 1)
        )


def total(work: Work, amounts: Amounts) -> Any:
    """Returns a sum over units; an array where amounts are arrays."""
    return sum((number * amounts[unit] for unit, number in work.items()), start=0.0)


def packaged_steps() -> list[str]:
    """Returns the names of the models whose steps are packaged."""
    return sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json"))


def load_steps(name_or_path: str | Path) -> ModelSteps:
    """Returns the steps of a packaged model by its name, or those in a file that `moe-serve roofline --save` wrote.

    Raises ConfigError where there are none.
    """
    asked = str(name_or_path)
    known = {name.lower(): name for name in packaged_steps()}
    if asked.lower() in known:
        text = (_folder() / f"{known[asked.lower()]}.json").read_text(encoding="utf-8")
    elif Path(asked).is_file():
        text = Path(asked).read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"no steps of {asked!r} are recorded; use {', '.join(known.values())}, or record those of a model folder "
            "by `moe-serve roofline FOLDER --save FILE`"
        )
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{asked} is no record of steps ({error!r})"
        raise ConfigError(f"{why}; write one by `moe-serve roofline FOLDER --save FILE`") from None


def to_json(steps: ModelSteps) -> str:
    """Returns the text of a file, a line for each kernel."""
    head = {"format": FORMAT, **{key: value for key, value in asdict(steps).items() if key != "steps"}}
    parts = []
    for step in steps.steps:
        lines = ",\n".join(f"    {json.dumps(asdict(kernel))}" for kernel in step.kernels)
        parts.append(f'  {{"phase": "{step.phase}", "transport": "{step.transport}", "kernels": [\n{lines}\n  ]}}')
    return json.dumps(head, indent=1)[:-2] + ',\n "steps": [\n' + ",\n".join(parts) + "\n ]\n}\n"


def _folder() -> Any:
    return resources.files("moe_serve.eplb.cost") / "profiles" / "steps"


def _read(raw: dict[str, Any]) -> ModelSteps:
    if raw.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    steps = tuple(
        StepRecord(str(step["phase"]), str(step["transport"]), tuple(_kernel(each) for each in step["kernels"]))
        for step in raw.pop("steps")
    )
    return ModelSteps(**raw, steps=steps)


def _kernel(raw: dict[str, Any]) -> KernelRecord:
    kernel = KernelRecord(**raw)
    for work in (kernel.launches, kernel.num_bytes, kernel.flops):
        unknown = set(work) - set(get_args(Unit))
        if unknown:
            raise ValueError(f"{kernel.name} has unknown units {sorted(unknown)}")
        if not all(isinstance(number, int | float) for number in work.values()):
            raise ValueError(f"{kernel.name} has amounts that are no numbers")
    if kernel.rate not in get_args(Rate) or kernel.layers not in get_args(Layers) or not isinstance(kernel.times, int):
        raise ValueError(f"{kernel.name} has an unknown rate or kind of layers")
    return kernel
