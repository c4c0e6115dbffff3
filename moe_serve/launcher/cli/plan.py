"""`moe-serve plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.launcher.cli.command import balancer_command, progress_bar
from moe_serve.launcher.cli.plan_options import PlanOptions

PLAN_HELP = """Plan one placement from a load trace, and write it for the engine you run.

\b
  moe-serve plan dump.pt --nodes 4 --slots 288 -o p.json --for sglang
  moe-serve plan statistics/ --ranks 36 -o lb.yaml --for tensorrt_llm
  moe-serve plan dump.pt --slots 288 -p incremental --current p.json --max-moves 8
  moe-serve plan load.jsonl --slots 288 --only-phase decode -o decode.json
  moe-serve plan load.jsonl --slots 288 -p series --by-phase -o both.json
"""


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(opt.ReportOptions, PlanOptions, opt.TraceOptions, opt.ClusterOptions):
    """The options of `moe-serve plan`."""

    trace: opt.TracePath
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it.", show_default=False)] = None
    target: Annotated[str, typer.Option("--for", help="moe_serve, sglang, tensorrt_llm, vllm or vllm_ascend.")] = (
        "moe_serve"
    )
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="deepseek, greedy, refined, incremental, series, milp or static.")
    ] = "refined"
    last: Annotated[
        int, typer.Option(min=0, help="Plan on the last so many windows only; 0 = on all; 2 to 64 for -p series.")
    ] = 0
    by_phase: Annotated[
        bool,
        typer.Option("--by-phase", help="With -p series: one placement that is good in prefill and in decode (and in "
                     "windows of both), not for their sum."),
    ] = False  # fmt: skip
    num_model_layers: opt.ModelLayers = None


@balancer_command(PlanCommandOptions)
def plan(options: PlanCommandOptions) -> None:
    """Plans on a trace's windows, prints what it gains, and writes the placement."""
    from moe_serve.eplb.files.placements import write_placement
    from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace, plan_to_json, plan_to_table

    opt.check_output(options.output, "--output")
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
