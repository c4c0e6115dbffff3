"""`moe-serve simulate`."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar
from moe_serve.launcher.preflight import check_output

if TYPE_CHECKING:
    from moe_serve.eplb.cost.profile_files import HardwareProfile, ModelProfile
    from moe_serve.eplb.replay.simulator import Simulation
    from moe_serve.eplb.replay.synthetic import SyntheticLoad

SIMULATE_HELP = """Simulate a cluster that does not exist: model x hardware x size x load, swept over several values.

The load is drawn (--load; see --list-loads) or recorded (--trace). Options that say so take several values with
commas: all combinations run, priced by the cost model.

\b
  moe-serve simulate --nodes 4,9,18 --redundant 32
  moe-serve simulate --nodes 18 --redundant 32,176 --html sim.html
  moe-serve simulate --model Qwen3-235B-A22B --hardware H200 --load bursts
  moe-serve simulate --nodes 4 --phase prefill --cache-hit 0.563 --utilisation 0.5
  moe-serve simulate --nodes 4 --hardware H200 --fit engine.log --save-engine mine.yaml
"""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(opt.PageOptions, opt.WindowOptions, opt.ServingOptions):
    """The options of `moe-serve simulate`."""

    model: str = option(default="DeepSeek-V3", help="Model profile, or a YAML file.")
    hardware: str = option(default="H800", help="Hardware profile, or a YAML file.")
    nodes: str = option(default="4", help="Machines; several with commas.")
    ranks_per_node: int | None = option(min=1, help="GPUs of a machine.", show_default="of the hardware")
    slots: str | None = option(help="Physical experts per layer; several with commas.")
    redundant: str = option(default="32", help="Instead of --slots: slots above one per expert; several with commas.")
    window: str = option(default="100", help="Steps per window of load; several with commas.")
    policy: list[str] | None = option("--policy", "-p", help="As of replay.", show_default="greedy refined")
    load: str = option(default="lognormal", help="Synthetic load; see --list-loads.")
    skew: float | None = option(help="How skewed it is.", show_default="of the load")
    rho: float = option(default=0.98, min=0, max=1, help="Correlation of neighbouring windows (drift).")
    period: int = option(default=10, min=1, help="Windows between jumps, turns or bursts.")
    windows: int = option(default=40, min=2, help="Windows to draw.")
    domains: str | None = option(help="A trace whose records are the domains of --load bursts.")
    trace: str | None = option(help="A recorded load instead.")
    tokens_per_rank: int | None = option(
        min=1, help="Tokens that one rank computes in one step.", show_default="128 decode, 16384 prefill, 2048 mixed"
    )
    attention_tp: int = option(
        default=1,
        min=1,
        max=1024,
        help="Ranks of a node that share attention, each with a part of the heads (tensor parallel); 1: each rank "
        "computes that of its own tokens (data parallel). Experts stay whole.",
    )
    off_home: float = opt.off_home()
    plan_latency_ms: float = option(default=100, min=0, max=1e9, help="Time a plan takes to arrive (gated policies).")
    sources: bool = option(default=False, help="Also draw where tokens come from, for off-node traffic.")
    seed: int = opt.seed()
    fit: Path | None = option(
        help="Fit the prices to measured steps instead: a CSV (phase,tokens,step_s,context), or the log of vLLM "
        "(--enable-logging-iteration-details) or SGLang. For one of --nodes and --slots; with --trace of its load."
    )
    save_engine: Path | None = option(help="Write the fitted engine there, for --engine here and of advise.")
    list_loads: bool = option("--list-loads", default=False, help="Say what the synthetic loads are, and end.")

    def simulation(self) -> "Simulation":
        """Returns what to simulate."""
        from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
        from moe_serve.eplb.policies.policy import PlanRules
        from moe_serve.eplb.replay.simulator import Simulation, Sweep

        profile, hardware = load_model_profile(self.model), load_hardware(self.hardware)
        sweep = Sweep(
            opt.numbers(self.nodes, "--nodes"),
            opt.numbers(self.slots, "--slots") if self.slots else (),
            opt.numbers(self.redundant, "--redundant"),
            opt.numbers(self.window, "--window"),
        )
        return Simulation(
            profile,
            hardware,
            sweep,
            ranks_per_node=self.ranks_per_node,
            load=self._load(profile, hardware, sweep.nodes),
            trace=opt.TraceOptions().open_trace(self.trace) if self.trace else None,
            tokens_per_rank=self.tokens_per_rank or {"prefill": 16384, "mixed": 2048}.get(self.phase, 128),
            serving=replace(self.serving(), attention_tp=self.attention_tp),
            engine=self.engine_profile(),
            policies=tuple(self.policy or ("greedy", "refined")),
            history=self.history,
            intervals=self.intervals(),
            split=self.split,
            rules=PlanRules(off_home=self.off_home, seed=self.seed),
            plan_latency_s=self.plan_latency_ms / 1e3,
        )

    def _load(self, profile: "ModelProfile", hardware: "HardwareProfile", nodes: tuple[int, ...]) -> "SyntheticLoad":
        import numpy as np

        from moe_serve.eplb.replay.synthetic import SyntheticLoad

        load = SyntheticLoad(
            family=self.load, num_windows=self.windows, skew=self.skew, rho=self.rho, period=self.period, seed=self.seed
        )
        if self.domains is not None:
            records = opt.TraceOptions().open_trace(self.domains)
            load = replace(
                load,
                profiles=np.array([record.tokens for record in records], dtype=np.float64),
                num_layers=profile.num_moe_layers,
                num_logical=profile.num_logical,
                topk=profile.topk,
            )
        if self.sources:
            if len(nodes) > 1:
                raise ConfigError("--sources draws the tokens of one number of ranks; give one value for --nodes")
            load = replace(load, num_sources=nodes[0] * (self.ranks_per_node or hardware.ranks_per_node))
        return load


@balancer_command(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Runs all combinations, and reports them with the replay of the best."""
    from moe_serve.eplb.replay.replay import with_redundancy_curve
    from moe_serve.eplb.replay.report import to_html
    from moe_serve.eplb.replay.simulator import best_case, sweep_curves, sweep_to_json, sweep_to_table
    from moe_serve.eplb.replay.simulator import simulate as run_simulation
    from moe_serve.eplb.replay.synthetic import SyntheticLoad

    if options.list_loads:
        typer.echo((SyntheticLoad.__doc__ or "").partition("\n\n")[2])
        return
    check_output(options.html, "--html")
    if options.fit is not None:
        _fit(options, options.fit)
        return
    if options.save_engine is not None:
        raise ConfigError("--save-engine writes what --fit finds; give measured steps with --fit, or leave it out")
    simulation = options.simulation()
    with progress_bar("simulating") as show:
        show(0, simulation.sweep.num_cases)
        cases = run_simulation(simulation, show, options.jobs or os.cpu_count() or 1)
    options.print(lambda: sweep_to_json(cases), lambda color: sweep_to_table(cases, color=color))
    best = best_case(cases)
    if options.html is not None:
        report = with_redundancy_curve(best.report, best.trace, best.topology, simulation.rules)
        title = f"{simulation.model.name} on {best.topology.num_ranks} x {simulation.hardware.name}"
        options.write_page(to_html(report, title, sweep_curves(cases)))
    options.check(best.report.summary(best.report.best)["served_mean"])


def _fit(options: SimulateOptions, file: Path) -> None:
    """Fits the prices to measured steps, and reports how well they fit."""
    from moe_serve.eplb.cost.model import CostModel
    from moe_serve.eplb.cost.profile_files import load_engine
    from moe_serve.eplb.files.step_times import read_step_times
    from moe_serve.eplb.replay.costs import ProfileCosts
    from moe_serve.eplb.replay.fit import fit, to_json, to_table, to_yaml
    from moe_serve.eplb.replay.simulator import slots_of, topologies_of

    check_output(options.save_engine, "--save-engine")
    simulation = options.simulation()
    topologies = topologies_of(simulation)
    slots = slots_of(simulation, topologies[0])
    if len(topologies) > 1 or len(slots) > 1:
        raise ConfigError("--fit is for the cluster that was measured; give one value for --nodes, and for --slots")
    model = CostModel(simulation.hardware, simulation.model, topologies[0], load_engine("ideal"))
    with progress_bar("fitting") as show:
        costs = ProfileCosts(model, simulation.serving)
        found = fit(read_step_times(file), costs, slots[0], options.rho, simulation.trace, show)
    if options.save_engine is not None:
        options.save_engine.write_text(to_yaml(found, options.save_engine.stem, file.name), encoding="utf-8")
    options.print(lambda: to_json(found), lambda color: to_table(found, options.save_engine, color))
