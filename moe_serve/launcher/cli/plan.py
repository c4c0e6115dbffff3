"""`moe-serve plan`, and the options that every plan has, also those of `moe-serve replay`: its limits and its start."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.eplb.policies.names import POLICIES
from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar
from moe_serve.launcher.preflight import check_output
from moe_serve.topology import Topology

if TYPE_CHECKING:
    from moe_serve.eplb.load import LoadTrace
    from moe_serve.eplb.placement import Placement
    from moe_serve.eplb.policies.policy import PlanRules

PLAN_HELP = """Plan one placement from a load trace, and write it for the engine you run.

\b
  moe-serve plan dump.pt --nodes 4 --slots 288 -o p.json --for sglang
  moe-serve plan statistics/ --ranks 36 -o lb.yaml --for tensorrt_llm
  moe-serve plan dump.pt --slots 288 -p incremental --current p.json --max-moves 8
  moe-serve plan load.jsonl --slots 288 --only-phase decode -o decode.json
  moe-serve plan load.jsonl --slots 288 -p series --by-phase -o both.json
  moe-serve plan load.jsonl --ranks 4 --redundant 8 --planned-split exact -o placement.json
"""


# Which limits a policy keeps to; those that are not here plan anew.
LIMITS_OF = {
    "incremental": ("max_moves", "max_moves_total", "max_moves_per_rank", "min_gain"),
    "series": ("max_moves", "max_moves_total", "max_moves_per_rank", "min_gain"),
    "milp": ("max_moves", "max_moves_per_rank"),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What every plan keeps to."""

    groups: int | None = option(min=1, help="Expert groups of the router (DeepSeek-V3: 8).")
    off_home: float = opt.off_home()
    max_moves: int | None = option(
        min=0, help="Slots per layer a plan may move (incremental, series, milp).", show_default=False
    )
    max_moves_total: int | None = option(
        min=0,
        help="Slots of all layers together a plan may move, where they gain most (incremental, series).",
        show_default=False,
    )
    max_moves_per_rank: int | None = option(
        min=0, help="Experts that one rank may receive in a layer (incremental, series, milp).", show_default=False
    )
    min_gain: float | None = option(
        min=0,
        help="A move evens its layer by at least this share of the mean rank load (incremental, series).",
        show_default="0.0003",
    )
    current: Path | None = option(help="Placement in use at the start.", show_default="experts in order")
    seed: int = opt.seed()

    def check_limits(self, policy: str) -> None:
        """Raises ConfigError where a limit is given that one plan of the policy does not keep to."""
        if policy not in POLICIES:
            return  # `make_policy` names those that there are
        kept = LIMITS_OF.get(policy, ())
        given = [name for name in LIMITS_OF["incremental"] if getattr(self, name) is not None]
        wrong = _words(name for name in given if name not in kept)
        if wrong and not kept:
            raise ConfigError(f"policy {policy} plans anew, and {wrong} would have no effect; use -p incremental")
        if wrong:
            raise ConfigError(f"policy {policy} does not know these limits; drop {wrong}, or use -p incremental")
        counted = _words(name for name in given if name != "min_gain")
        if counted and self.current is None:
            raise ConfigError(
                f"{counted} counts moves from a placement in use; give it with --current, or drop {counted}"
            )

    def rules(self) -> "PlanRules":
        """Returns the fields that every request shares."""
        from moe_serve.eplb.policies.policy import PlanRules

        return PlanRules(
            num_groups=self.groups,
            off_home=self.off_home,
            max_moves=self.max_moves,
            max_total_moves=self.max_moves_total,
            max_rank_moves=self.max_moves_per_rank,
            min_gain=self.min_gain,
            seed=self.seed,
        )

    def read_current(self, topology: Topology, load: "LoadTrace") -> "Placement | None":
        """Returns the placement of --current, checked against the trace and the cluster."""
        if self.current is None:
            return None
        from moe_serve.eplb.files.placements import read_placement
        from moe_serve.eplb.policies.make import plan_counts

        return read_placement(
            self.current, topology.num_ranks, load.num_logical, load.moe_layer_ids, plan_counts=plan_counts
        )


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(opt.ReportOptions, PlanOptions, opt.TraceOptions, opt.ClusterOptions):
    """The options of `moe-serve plan`."""

    trace: opt.TracePath
    output: Path | None = option("--output", "-o", help="Where to write it.", show_default=False)
    target: str = option("--for", default="moe_serve", help="moe_serve, sglang, tensorrt_llm, vllm or vllm_ascend.")
    policy: str = option("--policy", "-p", default="refined", help=f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}.")
    last: int = option(
        default=0, min=0, help="Plan on the last so many windows only; 0 = on all; 2 to 64 for -p series."
    )
    by_phase: bool = option(
        "--by-phase",
        default=False,
        help="With -p series: one placement that is good in prefill and in decode (and in windows of both), not for "
        "their sum.",
    )
    planned_split: str = option(
        "--planned-split",
        default="even",
        help="How the server will share an expert's tokens over its replicas: even, or exact, for our own server with "
        "eplb.split exact or time (-p refined or incremental).",
    )
    num_model_layers: int | None = opt.model_layers()

    def rules(self) -> "PlanRules":
        """Returns the fields of the request. Raises ConfigError for a split that the policy does not plan for."""
        if self.planned_split != "even" and self.target != "moe_serve":
            raise ConfigError(
                f"--planned-split {self.planned_split} is for our own server; the engine of --for {self.target} shares "
                "an expert's tokens evenly over its replicas, so drop --planned-split"
            )
        if self.planned_split != "even" and self.policy not in ("refined", "incremental"):
            raise ConfigError(
                f"policy {self.policy} plans for the even split alone; use -p refined or incremental, or drop "
                "--planned-split"
            )
        return replace(super().rules(), planned_split=self.planned_split)


@balancer_command(PlanCommandOptions)
def plan(options: PlanCommandOptions) -> None:
    """Plans on a trace's windows, prints what it gains, and writes the placement."""
    from moe_serve.eplb.files.placements import write_placement
    from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace, plan_to_json, plan_to_table

    check_output(options.output, "--output")
    topology = options.topology()
    options.check_limits(options.policy)
    with progress_bar("reading") as show:
        load = options.open_trace(options.trace, show)
        settings = TracePlanSettings(
            topology,
            options.num_slots(load.num_logical),
            policy=options.policy,
            current=options.read_current(topology, load),
            last=options.last,
            by_phase=options.by_phase,
            fill=options.target != "moe_serve",
            rules=options.rules(),
        )
        made = plan_from_trace(load, settings)
    if options.output is not None:
        write_placement(made.plan.placement, options.output, options.target, num_model_layers=options.num_model_layers)
    options.print(lambda: plan_to_json(made), lambda color: plan_to_table(made, color=color))
    if options.output is not None:
        typer.echo(f"wrote {options.output} for {options.target}", err=True)
    options.check(float(made.plan.balancedness.mean()))


def _words(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
