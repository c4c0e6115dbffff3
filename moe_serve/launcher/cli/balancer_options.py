"""The options that the balancer commands share, as dataclasses: a field is an option, and methods interpret them.

A command takes one dataclass, made of these by inheritance (command.py).
Nothing here imports torch; reading a `.pt` does, in the reader.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import option
from moe_serve.topology import Topology

if TYPE_CHECKING:
    from moe_serve.eplb.cost.profile_files import EngineProfile
    from moe_serve.eplb.load import LoadTrace
    from moe_serve.eplb.replay.costs import ProfileCosts, Serving

TracePath = Annotated[
    str,
    typer.Argument(
        help="Load trace, recognised by content: ours (.npz, .jsonl, .csv), an SGLang recorder dump (.pt, or the "
        "folder of all ranks), TensorRT-LLM statistics (a folder), vLLM or ADRS JSON, a Megatron router trace; or "
        "example:demo and example:demo_unbalanced.",
        show_default=False,
    ),
]


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Returns the numbers of an option that takes several. Raises ConfigError for what are none."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; give whole numbers with commas between them, like 1,4,18") from None


def topk() -> Any:
    return option("--topk", min=1, help="Experts per token, where the trace does not say it.")


def off_home() -> Any:
    return option(
        "--off-home",
        default=1.0,
        min=0,
        max=1,
        help="Share of the load that may leave its expert's home node; 0 = DeepSeek's hard hierarchy, 1 = none.",
    )


def seed() -> Any:
    return option("--seed", default=0, min=0, help="Breaks ties and drives searches.")


def model_layers() -> Any:
    return option(
        "--model-layers",
        min=1,
        help="All layers of the model, dense ones too (sglang).",
        show_default="up to the last MoE layer",
    )


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The ranks of a cluster."""

    ranks: int | None = option(min=1, help="Expert ranks (GPUs).", show_default="8 a node")
    nodes: int = option(default=1, min=1, help="Machines that the ranks are spread over.")

    def topology(self) -> Topology:
        """Returns the ranks and nodes. Raises ConfigError when the ranks do not divide over the nodes."""
        total = self.ranks or 8 * self.nodes
        if total % self.nodes:
            raise ConfigError(
                f"{total} ranks do not divide over {self.nodes} nodes; give a multiple of {self.nodes} for --ranks"
            )
        return Topology(self.nodes, total // self.nodes)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(RankOptions):
    """The cluster that a trace is replayed or planned on."""

    slots: int | None = option(min=1, help="Physical experts per layer, a multiple of the ranks.", show_default=False)
    redundant: int = option(
        default=0, min=0, help="Instead of --slots: slots above one per expert, rounded up to the ranks."
    )

    def num_slots(self, num_logical: int) -> int:
        """Returns the slots per layer. Raises ConfigError for more than each rank can use."""
        num_ranks = self.topology().num_ranks
        slots = self.slots or -(-(num_logical + self.redundant) // num_ranks) * num_ranks
        if slots > num_ranks * num_logical:
            raise ConfigError(
                f"{slots} slots on {num_ranks} ranks are more than {num_logical} a rank, which is every expert; use at "
                f"most {num_ranks * num_logical}"
            )
        return slots


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a load trace is read."""

    window: int = option(
        "--window", default=0, min=0, help="Fold so many steps into one window of load; 0 = windows as recorded."
    )
    only_phase: str | None = option(
        "--only-phase",
        help="Only the windows of this phase, prefill, decode or mixed: for engines that serve them apart, each with "
        "a placement of its own.",
        show_default="windows of all phases",
    )
    experts: int | None = option("--experts", min=1, help="Experts per layer, where the trace does not say it.")
    max_pt_gib: float = option(
        "--max-pt-gib", default=1.0, min=0, max=65536, help="Largest .pt file to load whole, in GiB."
    )

    def open_trace(
        self,
        path: str,
        progress: Callable[[int, int], None] | None = None,
        topk: int | None = None,
        fold: bool = True,
    ) -> "LoadTrace":
        """Returns the trace, its --only-phase, folded to --window; it is read, and progress called, while iterated."""
        from moe_serve.eplb.files.traces import read_trace
        from moe_serve.eplb.files.windows import folded, of_phase

        limit = int(self.max_pt_gib * 2**30)
        trace = read_trace(path, progress=progress, num_logical=self.experts, max_torch_bytes=limit)
        if topk is not None and trace.topk not in (None, topk):
            raise ConfigError(f"--topk is {topk} but the trace says {trace.topk}; leave --topk out")
        if topk is not None:
            trace = replace(trace, topk=topk)
        if self.only_phase is not None:
            trace = of_phase(trace, self.only_phase)
        return folded(trace, self.window) if self.window and fold else trace


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How the batches of a window are split over replicas, and what plans balance with it."""

    split: str = option(
        "--split",
        default="window",
        help="window: replicas share evenly, on window sums; even, nearest, exact, time, fewest_activated: split "
        "every single step as a server does (steps must be in the trace, or drawn with --window 1; for nearest by "
        "source rank; time needs --model and --hardware, or a server's trace). With time, plans balance time, too.",
    )


@dataclass(frozen=True, kw_only=True)
class WindowOptions(SplitOptions):
    """How windows of load become plans."""

    history: int = option(default=1, min=1, help="Windows that a plan is made from.")
    interval: str = option(default="1", help="Windows between plans (not of gated policies); several with commas.")
    jobs: int | None = option(min=1, help="Policies to replay at once.", show_default="CPUs")

    def intervals(self) -> tuple[int, ...]:
        """Returns the windows between plans, each number once."""
        return tuple(dict.fromkeys(numbers(self.interval, "--interval")))


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How the ranks serve, for predicted times."""

    engine: str = option(
        default="SGLang",
        help="Engine profile: SGLang, DeepSeek, vLLM, TensorRT-LLM, ATOM, CloudMatrix-Infer, ideal (the modelled "
        "kernels alone), moe_serve (our recorded launches; none was timed on a GPU), a YAML file, or a file of "
        "`moe-serve roofline --save`.",
    )
    context: float = option(
        default=4096,
        min=1,
        max=1e9,
        help="Tokens in the cache per request (decode), or length of a prompt (prefill, mixed).",
    )
    phase: str = option(
        default="decode",
        help="prefill, decode, or mixed (batches of both), for windows that do not say it.",
    )
    answer: float = option(
        default=0.0,
        min=0,
        max=1e9,
        help="Tokens of an answer (mixed): with --context they say how many rows of a batch decode.",
    )
    overlap: str = option(
        default="auto",
        help="Two half-batches overlap in every step (two-batch), in none (none), or in those that they make shorter "
        "(auto).",
    )
    utilisation: float = option(
        default=1.0,
        min=0,
        max=1,
        help="Share of the time in which steps run; 1 = full batches at all times, as benchmarks measure. A service "
        "waits for requests: over a day DeepSeek's prefill was at 0.5.",
    )
    cache_hit: float = option(default=0.0, min=0, max=1, help="Share of the prompts that the cache holds (prefill).")
    request_spread: float = option(
        default=0.0,
        min=0,
        max=1e6,
        help="How much requests differ in the experts they choose: batches are drawn around the load of a window. "
        "0 = not drawn; a trace with single steps needs none.",
    )
    expert_capacity: float | None = option(
        min=1, max=1e6, help="An expert takes at most so many times the mean of a batch: engine.expert_capacity."
    )
    over_capacity: str = option(default="next", help="Where the rest goes: next (other experts) or drop.")
    drafts: int = option(
        default=0, min=0, max=64, help="Drafts of tokens that a decode step verifies of each request; rows count them."
    )
    acceptance: float = option(
        default=0.0,
        min=0,
        max=1,
        help="Chance of a draft to be right, where those before it are. Published: 0.85 to 0.9 for the first one by "
        "DeepSeek-V3's own layer.",
    )

    def serving(self) -> "Serving":
        """Returns how the ranks serve. Raises ConfigError for values that cannot be."""
        from moe_serve.eplb.replay.costs import Serving

        if self.cache_hit and self.phase == "decode":
            raise ConfigError("--cache-hit is a share of prompts; give --phase prefill or mixed, or leave it out")
        if self.drafts and self.phase == "prefill":
            raise ConfigError("--drafts are verified where tokens are decoded; give another --phase, or leave it out")
        if self.acceptance and not self.drafts:
            raise ConfigError("--acceptance is the chance of drafts; give their number with --drafts, or leave it out")
        if self.over_capacity == "drop" and self.expert_capacity is None:
            raise ConfigError("--over-capacity is of a capacity; give it with --expert-capacity, or leave it out")
        # The names are checked by Serving, whose message says which there are.
        return Serving(
            self.phase,  # type: ignore[arg-type]
            self.context,
            self.overlap,  # type: ignore[arg-type]
            self.utilisation,
            self.cache_hit,
            self.request_spread,
            self.expert_capacity,
            self.over_capacity,  # type: ignore[arg-type]
            self.drafts,
            self.acceptance,
            self.answer,
        )

    def engine_profile(self) -> "EngineProfile":
        """Returns the profile of --engine."""
        from moe_serve.eplb.cost.profile_files import load_engine

        return load_engine(self.engine)


@dataclass(frozen=True, kw_only=True)
class CostOptions(ServingOptions):
    """What predicts times."""

    model: str | None = option(
        help="Model profile for predicted times: DeepSeek-V3, Qwen3-235B-A22B, … or a YAML file."
    )
    hardware: str | None = option(help="Hardware profile: H800, H100, H200, GB200, … or a YAML file.")

    def costs(self, topology: Topology) -> "ProfileCosts | None":
        """Returns the cost model; None without --model and --hardware."""
        if (self.model is None) != (self.hardware is None):
            raise ConfigError(
                "--model and --hardware belong together; give both, or neither for a replay without times"
            )
        if self.model is None or self.hardware is None:
            return None
        from moe_serve.eplb.cost.model import CostModel
        from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
        from moe_serve.eplb.replay.costs import ProfileCosts

        hardware, profile = load_hardware(self.hardware), load_model_profile(self.model)
        return ProfileCosts(CostModel(hardware, profile, topology, self.engine_profile()), self.serving())


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where a report goes, and when the command fails."""

    json_output: bool = option("--json", default=False, help="The report as JSON on stdout instead of tables.")
    fail_below: float | None = option(
        "--fail-below",
        min=0,
        max=1,
        help="Exit with 1 when the best balancedness is below this (for CI).",
        show_default=False,
    )

    def print(self, as_json: Callable[[], Any], as_table: Callable[[bool], str]) -> None:
        """Prints the report: plain JSON types, or a table. as_table: takes whether to colour it"""
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        typer.echo(json.dumps(as_json(), indent=1) if self.json_output else as_table(color), nl=self.json_output)

    def check(self, balance: float) -> None:
        """Ends the command with exit code 1 when the balancedness is below --fail-below."""
        if self.fail_below is not None and balance < self.fail_below:
            typer.echo(f"balancedness {balance:.4f} is below --fail-below {self.fail_below}", err=True)
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class PageOptions(ReportOptions):
    """A report that may also be an HTML page."""

    html: Path | None = option("--html", help="Also write one self-contained page with pictures.", show_default=False)

    def write_page(self, page: str) -> None:
        """Writes the page to --html."""
        assert self.html is not None
        self.html.write_text(page, encoding="utf-8")
        typer.echo(f"wrote {self.html}", err=True)
