"""The kernels of a step against a chip's sheet: what bounds each of them, and how long it takes at least.

The least time of a kernel is the longest of three: its bytes at the full rate of the memory, its FLOP at the full rate
of the matrix units, and the time that its launches cost. Needs no torch.
"""

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_serve.eplb.cost.kernels import even_amounts
from moe_serve.eplb.cost.profile_files import OURS, HardwareProfile, load_engine
from moe_serve.eplb.cost.step_record import KernelRecord, ModelSteps, StepRecord, total
from moe_serve.eplb.replay.report import printed, text_console
from moe_serve.errors import ConfigError

LAYERS = {"moe": "with experts", "dense": "without", "none": "-"}


@dataclass(frozen=True)
class Sizes:
    """A rank's step.

    tokens:  that it computes
    context: of decodes: tokens of each request in the cache; of prefills: length of a prompt
    """

    phase: str
    num_ranks: int
    tokens: int
    context: int

    @property
    def words(self) -> str:
        """Returns a few words for a heading."""
        of = f"{self.context:,} in the cache" if self.phase == "decode" else f"prompts of {self.context:,}"
        ranks = "one rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{self.phase}, {self.tokens:,} tokens a rank, {of}, {ranks}"


@dataclass(frozen=True)
class Line:
    """A kernel in all layers of its kind. Seconds are the least; bound: the one that is longest"""

    kernel: KernelRecord
    launches: float
    num_bytes: float
    flops: float
    memory_s: float
    compute_s: float
    launch_s: float

    @property
    def bound(self) -> str:
        """Returns what takes longest: "memory", "compute" or "launch"."""
        times = {"memory": self.memory_s, "compute": self.compute_s, "launch": self.launch_s}
        return max(times, key=lambda name: times[name])

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s, self.launch_s)


def roofline(steps: ModelSteps, chip: HardwareProfile, sizes: Sizes) -> list[Line]:
    """Returns the kernels of a step, in its order. Raises ConfigError where its experts cannot be spread so."""
    experts = steps.sizes["num_logical"]
    if sizes.num_ranks > experts:
        raise ConfigError(f"{experts} experts are spread over at most {experts} ranks, not {sizes.num_ranks}")
    step = steps.step(sizes.phase, sizes.num_ranks)
    new = 1 if sizes.phase == "decode" else sizes.context
    length = sizes.context + 1 if sizes.phase == "decode" else sizes.context
    slots = steps.slots_per_rank(sizes.num_ranks)
    amounts = even_amounts(sizes.tokens / new, length, new, sizes.num_ranks, slots, steps.sizes["topk"])
    launch_s = load_engine(OURS).launch_s
    peak = {"bf16": chip.bf16_flops, "attention": chip.bf16_flops, "fp8": chip.fp8_flops}
    lines = []
    for kernel in step.kernels:
        launches, num_bytes, flops = (
            kernel.times * float(total(work, amounts)) for work in (kernel.launches, kernel.num_bytes, kernel.flops)
        )
        lines.append(
            Line(
                kernel,
                launches,
                num_bytes,
                flops,
                num_bytes / chip.hbm_bytes_per_s,
                flops / peak[kernel.rate],
                launches * launch_s,
            )
        )
    return lines


def to_table(steps: ModelSteps, chip: HardwareProfile, sizes: Sizes) -> str:
    """Returns the lines for a terminal."""
    lines = roofline(steps, chip, sizes)
    step = steps.step(sizes.phase, sizes.num_ranks)
    console = text_console(140, color=False)
    console.print(Text(f"{steps.name} on {chip.name}: {sizes.words}"), Text(f"({_form(steps, step)})"), soft_wrap=True)
    console.print()
    table = Table(box=None)
    columns = ("layers", "part", "kernel", "launches", "MB", "GFLOP", "memory µs", "compute µs", "launch µs", "bound")
    for column in (*columns, "share"):
        table.add_column(column, justify="left" if column in ("layers", "part", "kernel", "bound") else "right")
    whole = sum(line.seconds for line in lines)
    for line in lines:
        kernel = line.kernel
        times = (f"{1e6 * seconds:,.0f}" for seconds in (line.memory_s, line.compute_s, line.launch_s))
        count = f"{kernel.times} {LAYERS[kernel.layers]}" if kernel.layers != "none" else "-"
        table.add_row(
            count, kernel.part, kernel.name, f"{line.launches:,.0f}", f"{line.num_bytes / 1e6:,.1f}",
            f"{line.flops / 1e9:,.1f}", *times, line.bound, f"{line.seconds / whole:.1%}",
        )  # fmt: skip
    console.print(table)
    console.print()
    for sentence in sentences(lines, chip, sizes):
        console.print(sentence, soft_wrap=True)
    return printed(console)


def sentences(lines: list[Line], chip: HardwareProfile, sizes: Sizes) -> list[str]:
    """Returns what the lines say together."""
    whole = sum(line.seconds for line in lines)
    by_bound = {
        name: sum(line.seconds for line in lines if line.bound == name) for name in ("memory", "compute", "launch")
    }
    shares = ", ".join(f"{seconds / whole:.0%} bound by {name}" for name, seconds in by_bound.items())
    out = [
        f"At least {1e3 * whole:,.2f} ms a step at the full rates of {chip.name}: {shares}; "
        f"{sizes.tokens / whole:,.0f} tokens/s a GPU at most.",
    ]
    if sizes.num_ranks > 1:
        out.append(
            "Rows between GPUs count as memory traffic here. `moe-serve simulate --engine moe_serve` prices links, an "
            "uneven load, and the rates that published kernels reach."
        )
    out.append("No kernel was timed on a GPU.")
    return out


def to_json(steps: ModelSteps, chip: HardwareProfile, sizes: Sizes) -> dict[str, Any]:
    """Returns the lines as plain JSON types; times in microseconds."""
    lines = roofline(steps, chip, sizes)
    return {
        "format": "moe_serve.roofline",
        "model": steps.name,
        "chip": chip.name,
        "phase": sizes.phase,
        "num_ranks": sizes.num_ranks,
        "tokens": sizes.tokens,
        "context": sizes.context,
        "step_us": 1e6 * sum(line.seconds for line in lines),
        "kernels": [
            {
                "layers": line.kernel.layers,
                "times": line.kernel.times,
                "part": line.kernel.part,
                "kernel": line.kernel.name,
                "launches": line.launches,
                "num_bytes": line.num_bytes,
                "flops": line.flops,
                "memory_us": 1e6 * line.memory_s,
                "compute_us": 1e6 * line.compute_s,
                "launch_us": 1e6 * line.launch_s,
                "bound": line.bound,
            }
            for line in lines
        ],
    }


def _form(steps: ModelSteps, step: StepRecord) -> str:
    wire = "" if step.transport == "local" else f", rows as {steps.wire}"
    replicas = f", {steps.redundant} redundant experts" if steps.redundant and step.transport != "local" else ""
    cache = "" if steps.cache == "auto" else f", KV cache in {steps.cache}"
    return f"experts in {steps.experts}{replicas}{cache}{wire}, transport {step.transport}"
