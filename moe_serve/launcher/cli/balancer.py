"""The balancer's commands: replay, simulate, plan, convert. They parse, call moe_serve.eplb, and print.

Results go to stdout, progress to stderr. Exit code 0 = done, 1 = --fail-below failed, 2 = bad input, said in one line.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology

REPLAY_HELP = """Replay a load trace through balancers: what would each have moved, how well would it have served?

Every policy plans on the past and is scored on the window that comes next. "do nothing" and "perfect" are always in
the table as floor and ceiling.

\b
  moe-serve replay example:demo_unbalanced --ranks 8 --redundant 8
  moe-serve replay dump.pt --nodes 4 --slots 288 --html report.html
  moe-serve replay dump.pt --window 50 --model DeepSeek-V3 --hardware H800
"""
SIMULATE_HELP = """Simulate a cluster that does not exist: model x hardware x size x load, swept over several values.

The load is drawn (--load; see --list-loads) or recorded (--trace). Options that say so take several values with
commas: all combinations run, priced by the cost model.

\b
  moe-serve simulate --nodes 4,9,18 --redundant 32
  moe-serve simulate --nodes 18 --redundant 32,176 --html sim.html
  moe-serve simulate --model Qwen3-235B-A22B --hardware H200 --load bursts
"""
PLAN_HELP = """Plan one placement from a load trace, and write it for the engine you run.

\b
  moe-serve plan dump.pt --nodes 4 --slots 288 -o p.json --for sglang
  moe-serve plan statistics/ --ranks 36 -o lb.yaml --for tensorrt_llm
  moe-serve plan dump.pt --slots 288 --current p.json --max-moves 8
"""
CONVERT_HELP = """Convert load traces and placements between formats. Traces go by suffix, placements by --for.

\b
  moe-serve convert dump.pt trace.npz
  moe-serve convert expert-load.json trace.jsonl --window 100
  moe-serve convert p.json lb.yaml --for tensorrt_llm --ranks 32
"""


def _split_numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; give whole numbers with commas between them, like 1,4,18") from None


@opt.one_line_errors
def replay(
    trace: opt.Trace,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="deepseek, greedy, refined, incremental, static; 'gate:NAME' moves only when it pays. "
            "Repeat the option.",
            show_default="deepseek greedy refined incremental",
        ),
    ] = None,
    ranks: opt.Ranks = None,
    nodes: opt.Nodes = 1,
    slots: opt.Slots = None,
    redundant: opt.Redundant = 0,
    window: opt.Window = 0,
    history: Annotated[int, typer.Option(min=1, help="Windows that a plan is made from.")] = 1,
    interval: Annotated[int, typer.Option(min=1, help="Windows between plans (not of gated policies).")] = 1,
    current: Annotated[
        Path | None, typer.Option(help="Placement at the start.", show_default="experts in order")
    ] = None,
    model: opt.Model = None,
    hardware: opt.Hardware = None,
    context: opt.Context = 4096,
    phase: opt.Phase = "decode",
    groups: opt.Groups = None,
    off_home: opt.OffHome = 1.0,
    max_moves: Annotated[
        int | None, typer.Option(min=0, help="Slots per layer a plan may move.", show_default=False)
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="window: replicas share evenly, on window sums; even, nearest, exact, fewest_activated: split every "
            "single step as a server does (steps must be in the trace; for nearest by source rank)."
        ),
    ] = "window",
    latency_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps a plan takes to arrive (gated policies).",
            show_default="as recorded in a .jsonl trace, else 0",
        ),
    ] = None,
    topk: opt.Topk = None,
    experts: opt.Experts = None,
    max_pt_gib: opt.MaxPt = 1.0,
    seed: opt.Seed = 0,
    curve: Annotated[bool, typer.Option(help="Also plan for other numbers of slots.")] = True,
    jobs: Annotated[int | None, typer.Option(min=1, help="Policies to replay at once.", show_default="CPUs")] = None,
    json_output: opt.JsonOut = False,
    html: opt.HtmlOut = None,
    fail_below: opt.FailBelow = None,
) -> None:
    from moe_serve.eplb.files.balance_log import is_balance_log
    from moe_serve.eplb.rebalance.rebalancer import RebalanceSettings
    from moe_serve.eplb.replay.replay import ReplaySettings, num_passes
    from moe_serve.eplb.replay.replay import replay as run_replay
    from moe_serve.eplb.replay.report import to_json, to_table
    from moe_serve.eplb.replay.report_curve import with_redundancy_curve
    from moe_serve.eplb.replay.report_html import to_html

    if Path(trace).is_file():
        with Path(trace).open("rb") as file:
            if is_balance_log(file.read(1 << 16)):
                _show_log(Path(trace), json_output)
                return
    topology = opt.cluster(ranks, nodes)
    with opt.progress_bar("reading") as show:
        load = opt.open_trace(trace, show, window, topk, experts, max_pt_gib)
    num_slots = opt.slots_of(slots, redundant, load.num_logical, topology)
    costs = _costs(model, hardware, topology, phase, context)
    start = _read_current(current, topology, load)
    gate = RebalanceSettings(num_groups=groups, off_home=off_home, max_moves=max_moves, seed=seed)
    settings = ReplaySettings(
        topology,
        start.num_slots if start and not slots and not redundant else num_slots,
        start=start,
        history=history,
        interval=interval,
        num_groups=groups,
        off_home=off_home,
        max_moves=max_moves,
        split=split,
        seed=seed,
        costs=costs,
        gate=replace(gate, bytes_per_expert=costs.expert_bytes) if costs else gate,
        gate_model=costs.gate() if costs else None,
        latency_steps=_latency(trace) if latency_steps is None else latency_steps,
    )
    policies = policy or ["deepseek", "greedy", "refined", "incremental"]
    jobs = jobs or os.cpu_count() or 1
    with opt.progress_bar("replaying") as show:
        total = load.num_records * num_passes(len(policies), jobs) if load.num_records else None
        report = run_replay(load, policies, settings, lambda done: show(done, total), jobs)
    if costs is not None:
        report = replace(report, conditions={**report.conditions, "prices": costs.words()})
    if curve:
        report = with_redundancy_curve(report, topology, groups, off_home, seed)
    typer.echo(
        json.dumps(to_json(report), indent=1) if json_output else to_table(report, color=_color()), nl=json_output
    )
    if html is not None:
        html.write_text(to_html(report, f"Replay of {Path(trace).name}"), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    _check(report.summary(report.best)["served_mean"], fail_below)


@opt.one_line_errors
def simulate(
    model: Annotated[str, typer.Option(help="Model profile, or a YAML file.")] = "DeepSeek-V3",
    hardware: Annotated[str, typer.Option(help="Hardware profile, or a YAML file.")] = "H800",
    nodes: Annotated[str, typer.Option(help="Machines; several with commas.")] = "4",
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a machine.", show_default="of the hardware")
    ] = None,
    slots: Annotated[str | None, typer.Option(help="Physical experts per layer; several with commas.")] = None,
    redundant: Annotated[
        str, typer.Option(help="Instead of --slots: slots above one per expert; several with commas.")
    ] = "32",
    window: Annotated[str, typer.Option(help="Steps per window of load; several with commas.")] = "100",
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="As of replay.", show_default="greedy refined")
    ] = None,
    load: Annotated[str, typer.Option(help="Synthetic load; see --list-loads.")] = "lognormal",
    skew: Annotated[float | None, typer.Option(help="How skewed it is.", show_default="of the load")] = None,
    rho: Annotated[float, typer.Option(min=0, max=1, help="Correlation of neighbouring windows (drift).")] = 0.98,
    period: Annotated[int, typer.Option(min=1, help="Windows between jumps, turns or bursts.")] = 10,
    windows: Annotated[int, typer.Option(min=2, help="Windows to draw.")] = 40,
    domains: Annotated[str | None, typer.Option(help="A trace whose records are the domains of --load bursts.")] = None,
    trace: Annotated[str | None, typer.Option(help="A recorded load instead.")] = None,
    tokens_per_rank: Annotated[int, typer.Option(min=1, help="Tokens of one step of one rank.")] = 128,
    context: opt.Context = 4096,
    phase: opt.Phase = "decode",
    history: Annotated[int, typer.Option(min=1, help="Windows that a plan is made from.")] = 1,
    interval: Annotated[int, typer.Option(min=1, help="Windows between plans (not of gated policies).")] = 1,
    off_home: opt.OffHome = 1.0,
    plan_latency_ms: Annotated[float, typer.Option(min=0, help="Time a plan takes to arrive (gated policies).")] = 100,
    sources: Annotated[bool, typer.Option(help="Also draw where tokens come from, for off-node traffic.")] = False,
    seed: opt.Seed = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Policies at once.", show_default="CPUs")] = None,
    list_loads: Annotated[
        bool, typer.Option("--list-loads", help="Say what the synthetic loads are, and end.")
    ] = False,
    json_output: opt.JsonOut = False,
    html: opt.HtmlOut = None,
    fail_below: opt.FailBelow = None,
) -> None:
    from moe_serve.eplb.cost.model import load_hardware, load_model_profile
    from moe_serve.eplb.replay.report_curve import with_redundancy_curve
    from moe_serve.eplb.replay.report_html import to_html
    from moe_serve.eplb.replay.report_sweep import sweep_curves, sweep_to_json, sweep_to_table
    from moe_serve.eplb.replay.simulator import Simulation, best_case, num_cases
    from moe_serve.eplb.replay.simulator import simulate as run_simulation
    from moe_serve.eplb.replay.synthetic import SyntheticLoad

    if list_loads:
        typer.echo((SyntheticLoad.__doc__ or "").partition("\n\n")[2])
        return
    profile = load_model_profile(model)
    shape = SyntheticLoad(family=load, num_windows=windows, skew=skew, rho=rho, period=period, phase=phase, seed=seed)
    if domains is not None:
        shape = replace(
            shape,
            profiles=_profiles(domains),
            num_layers=profile.num_moe_layers,
            num_logical=profile.num_logical,
            topk=profile.topk,
        )
    node_counts = _split_numbers(nodes, "--nodes")
    if sources:
        if len(node_counts) > 1:
            raise ConfigError("--sources draws the tokens of one number of ranks; give one value for --nodes")
        per_node = ranks_per_node or load_hardware(hardware).ranks_per_node
        shape = replace(shape, num_sources=node_counts[0] * per_node)
    simulation = Simulation(
        profile,
        load_hardware(hardware),
        load=shape,
        trace=opt.open_trace(trace, None) if trace else None,
        nodes=node_counts,
        ranks_per_node=ranks_per_node,
        slots=_split_numbers(slots, "--slots") if slots else (),
        redundant=_split_numbers(redundant, "--redundant"),
        window_steps=_split_numbers(window, "--window"),
        policies=tuple(policy or ("greedy", "refined")),
        tokens_per_rank=tokens_per_rank,
        context=context,
        history=history,
        interval=interval,
        off_home=off_home,
        plan_latency_s=plan_latency_ms / 1e3,
        seed=seed,
    )
    with opt.progress_bar("simulating") as show:
        show(0, num_cases(simulation))
        cases = run_simulation(simulation, show, jobs or os.cpu_count() or 1)
    typer.echo(json.dumps(sweep_to_json(cases), indent=1) if json_output else sweep_to_table(cases, color=_color()),
               nl=json_output)  # fmt: skip
    best = best_case(cases)
    if html is not None:
        report = with_redundancy_curve(best.report, best.topology, None, off_home, seed)
        title = f"{profile.name} on {best.topology.num_ranks} x {simulation.hardware.name}"
        html.write_text(to_html(report, title, sweep_curves(cases)), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)
    _check(best.report.summary(best.report.best)["served_mean"], fail_below)


@opt.one_line_errors
def plan(
    trace: opt.Trace,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it.", show_default=False)
    ] = None,
    target: Annotated[str, typer.Option("--for", help="moe_serve, sglang, tensorrt_llm or vllm_ascend.")] = "moe_serve",
    policy: Annotated[str, typer.Option("--policy", "-p", help="Balancer.")] = "refined",
    ranks: opt.Ranks = None,
    nodes: opt.Nodes = 1,
    slots: opt.Slots = None,
    redundant: opt.Redundant = 0,
    last: Annotated[int, typer.Option(min=0, help="Plan on the last so many windows only; 0 = on all.")] = 0,
    window: opt.Window = 0,
    current: Annotated[Path | None, typer.Option(help="Placement in use: moves are counted, and made few.")] = None,
    max_moves: Annotated[
        int | None, typer.Option(min=0, help="Slots per layer to move at most.", show_default=False)
    ] = None,
    groups: opt.Groups = None,
    off_home: opt.OffHome = 1.0,
    num_model_layers: Annotated[
        int | None,
        typer.Option(
            "--model-layers",
            min=1,
            help="All layers of the model, dense ones too (sglang).",
            show_default="up to the last MoE layer",
        ),
    ] = None,
    experts: opt.Experts = None,
    max_pt_gib: opt.MaxPt = 1.0,
    seed: opt.Seed = 0,
    json_output: opt.JsonOut = False,
    fail_below: opt.FailBelow = None,
) -> None:
    from moe_serve.eplb.files.placements import write_placement
    from moe_serve.eplb.replay.plan_trace import plan_from_trace, plan_to_json, plan_to_table

    topology = opt.cluster(ranks, nodes)
    with opt.progress_bar("reading") as show:
        load = opt.open_trace(trace, show, window, None, experts, max_pt_gib)
        made = plan_from_trace(
            load,
            topology,
            opt.slots_of(slots, redundant, load.num_logical, topology),
            policy=policy,
            current=_read_current(current, topology, load),
            last=last,
            max_moves=max_moves,
            num_groups=groups,
            off_home=off_home,
            seed=seed,
            fill=target != "moe_serve",
        )
    if output is not None:
        write_placement(made.plan.placement, output, target, num_model_layers=num_model_layers)
    typer.echo(
        json.dumps(plan_to_json(made), indent=1) if json_output else plan_to_table(made, color=_color()), nl=json_output
    )
    if output is not None:
        typer.echo(f"wrote {output} for {target}", err=True)
    _check(float(made.plan.balancedness.mean()), fail_below)


@opt.one_line_errors
def convert(
    source: Annotated[str, typer.Argument(help="A load trace or a placement, recognised by content.")],
    output: Annotated[Path, typer.Argument(help="Target file; traces by suffix .npz, .jsonl, .csv.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--for", help="For placements: moe_serve, sglang, tensorrt_llm or vllm_ascend.", show_default="moe_serve"
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of a placement that does not say it.")] = None,
    window: opt.Window = 0,
    counts_only: Annotated[bool, typer.Option("--counts-only", help="Leave out all but the expert counts.")] = False,
    topk: opt.Topk = None,
    experts: opt.Experts = None,
    num_model_layers: Annotated[int | None, typer.Option("--model-layers", min=1, help="All layers (sglang).")] = None,
    moe_layers: Annotated[
        str | None, typer.Option(help="First and last MoE layer of a placement with rows for all layers, like 3-60.")
    ] = None,
    max_pt_gib: opt.MaxPt = 1.0,
) -> None:
    from moe_serve.eplb.files.placements import read_placement, write_placement
    from moe_serve.eplb.files.traces import write_trace
    from moe_serve.eplb.planner import plan_counts

    limit = int(max_pt_gib * 2**30)
    if output.suffix in (".npz", ".jsonl", ".csv"):
        if target is not None:
            raise ConfigError(
                f"--for {target} is for placements, but {output} is a load trace by its suffix; drop --for"
            )
        with opt.progress_bar("converting") as show:
            load = opt.open_trace(source, show, window, topk, experts, max_pt_gib)
            number = write_trace(load, output, counts_only=counts_only)
        typer.echo(
            f"{output}: {number} records, {len(load.moe_layer_ids)} layers x {load.num_logical} experts, "
            f"from {load.source}"
        )
        return
    placement = read_placement(
        source, ranks, experts, _layer_range(moe_layers), plan_counts=plan_counts, max_torch_bytes=limit
    )
    write_placement(placement, output, target or "moe_serve", num_model_layers=num_model_layers)
    typer.echo(
        f"{output}: {placement.num_layers} layers x {placement.num_slots} slots on {placement.num_ranks} ranks, "
        f"for {target or 'moe_serve'}"
    )


def add_balancer_commands(app: typer.Typer) -> None:
    """Registers replay, simulate, plan and convert."""
    app.command("replay", help=REPLAY_HELP)(replay)
    app.command("simulate", help=SIMULATE_HELP)(simulate)
    app.command("plan", help=PLAN_HELP)(plan)
    app.command("convert", help=CONVERT_HELP)(convert)


def _costs(model: str | None, hardware: str | None, topology: Any, phase: str, context: float) -> Any:
    if (model is None) != (hardware is None):
        raise ConfigError("--model and --hardware belong together; give both, or neither for a replay without times")
    if model is None or hardware is None:
        return None
    from moe_serve.eplb.cost.model import CostModel, load_hardware, load_model_profile
    from moe_serve.eplb.replay.costs import ProfileCosts

    if phase not in ("prefill", "decode"):
        raise ConfigError(f"--phase is {phase!r}; give prefill or decode")
    return ProfileCosts(CostModel(load_hardware(hardware), load_model_profile(model), topology), phase, context)  # type: ignore[arg-type]


def _read_current(path: Path | None, topology: Topology, load: LoadTrace) -> Placement | None:
    """Returns the placement of --current, which fits the trace and the cluster."""
    if path is None:
        return None
    from moe_serve.eplb.files.placements import read_placement
    from moe_serve.eplb.planner import plan_counts

    return read_placement(path, topology.num_ranks, load.num_logical, load.moe_layer_ids, plan_counts=plan_counts)


def _latency(trace: str) -> int:
    from moe_serve.eplb.files.trace_jsonl import recorded_latency

    recorded = recorded_latency(Path(trace)) if trace.endswith(".jsonl") and Path(trace).is_file() else None
    return recorded or 0


def _profiles(path: str) -> Any:
    import numpy as np

    return np.array([record.tokens for record in opt.open_trace(path, None)], dtype=np.float64)


def _layer_range(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise PlacementError(f"--moe-layers is {text!r}; give the first and the last layer, like 3-60")
    return tuple(range(int(first), int(last) + 1))


def _show_log(path: Path, json_output: bool) -> None:
    from moe_serve.eplb.replay.report_log import log_to_json, log_to_table

    typer.echo(json.dumps(log_to_json(path), indent=1) if json_output else log_to_table(path), nl=json_output)


def _check(balance: float, fail_below: float | None) -> None:
    if fail_below is not None and balance < fail_below:
        typer.echo(f"balancedness {balance:.4f} is below --fail-below {fail_below}", err=True)
        raise typer.Exit(1)


def _color() -> bool:
    import sys

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
