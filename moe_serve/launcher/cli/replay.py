"""`moe-serve replay`."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.eplb.policies.names import POLICIES
from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar
from moe_serve.launcher.cli.plan import PlanOptions
from moe_serve.launcher.preflight import check_output

if TYPE_CHECKING:
    from moe_serve.config import ServeConfig
    from moe_serve.eplb.load import LoadTrace
    from moe_serve.eplb.placement import Placement
    from moe_serve.eplb.rebalance.settings import SystemFacts
    from moe_serve.eplb.replay.settings import EvenSteps, ReplaySettings, ServerReplay
    from moe_serve.eplb.split.make import ServedSplit

REPLAY_HELP = """Replay a load trace through balancers: what would each have moved, how well would it have served?

Every policy plans on the past and is scored on the window that comes next. "do nothing" and "perfect" are always in
the table as floor and ceiling.

\b
  moe-serve replay example:demo_unbalanced --ranks 8 --redundant 8
  moe-serve replay dump.pt --nodes 4 --slots 288 --html report.html
  moe-serve replay dump.pt --window 50 --model DeepSeek-V3 --hardware H800
  moe-serve replay load.jsonl --like-server server.yaml
  moe-serve replay load.jsonl --json >before.json
  moe-serve replay load.jsonl --slots 320 --against before.json
"""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(
    opt.PageOptions, opt.WindowOptions, opt.CostOptions, PlanOptions, opt.TraceOptions, opt.ClusterOptions
):
    """The options of `moe-serve replay`."""

    trace: opt.TracePath
    policy: list[str] | None = option(
        "--policy",
        "-p",
        help=f"{', '.join(POLICIES)}; series plans for each of --history windows, not for their sum; 'gate:NAME' "
        "moves only when it pays. Repeat the option.",
        show_default="deepseek greedy refined incremental",
    )
    latency_steps: int | None = option(
        min=0,
        help="Steps a plan takes to arrive (gated policies).",
        show_default="as recorded in a .jsonl trace, else 0",
    )
    like_server: Path | None = option(
        help="A server's configuration: also replay what its own balancer does with these settings (policy 'live'). "
        "Ranks and slots are those of the trace, and so are, with the settings it was recorded with, the steps at "
        "which plans were ready and rounds were live.",
        show_default=False,
    )
    topk: int | None = opt.topk()
    against: Path | None = option(help="Also compare with an earlier replay's --json report.", show_default=False)
    curve: bool = option(default=True, help="Also plan for other numbers of slots.")

    def settings(self, load: "LoadTrace") -> "ReplaySettings":
        """Returns how the trace is replayed."""
        from moe_serve.eplb.replay.settings import ReplaySettings
        from moe_serve.topology import Topology

        topology, server = self.topology(), None
        if self.like_server is None:
            start = self.read_current(topology, load)
        else:
            self._check_alone()
            trace_file = Path(self.trace) if _may_hold_events(self.trace) else None
            server, start = server_replay(self.like_server, trace_file, load, self.nodes)
            topology = Topology(server.facts.num_nodes, start.num_ranks // server.facts.num_nodes)
        costs = self.costs(topology)
        keeps_slots = start is not None and not self.slots and not self.redundant
        return ReplaySettings(
            topology,
            start.num_slots if start is not None and keeps_slots else self.num_slots(load.num_logical),
            start=start,
            history=self.history,
            intervals=self.intervals(),
            rules=self.rules(),
            split=self.split,
            even_steps=_recorded_even_steps(self.trace, self.split),
            costs=costs,
            gate_cost=costs.gate() if costs else None,
            latency_steps=_recorded_latency(self.trace) if self.latency_steps is None else self.latency_steps,
            server=server,
        )

    def _check_alone(self) -> None:
        """Raises ConfigError for options that contradict --like-server."""
        given = {
            "--ranks": self.ranks,
            "--slots": self.slots,
            "--redundant": self.redundant,
            "--current": self.current,
            "--window": self.window,
            "--only-phase": self.only_phase,
        }
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise ConfigError(
                f"--like-server takes ranks, slots and all windows from the trace; leave {', '.join(wrong)} out"
            )


@balancer_command(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replays a trace, or shows the balancedness in an engine's log."""
    from moe_serve.eplb.replay.replay import num_passes, with_redundancy_curve
    from moe_serve.eplb.replay.replay import replay as run_replay
    from moe_serve.eplb.replay.report import to_html, to_json, to_table
    from moe_serve.eplb.replay.report_against import against_page, against_to_json, against_to_table, read_report
    from moe_serve.eplb.replay.run import LIVE

    # Before the replay, so that a wrong file is refused at once.
    check_output(options.html, "--html")
    earlier = read_report(options.against) if options.against is not None else None
    if _is_log(Path(options.trace)):
        if earlier is not None:
            raise ConfigError(f"--against compares replays, and {options.trace} is a log; leave --against out")
        _show_log(Path(options.trace), options.json_output)
        return
    load = options.open_trace(options.trace, topk=options.topk)
    settings = options.settings(load)
    policies = options.policy or (["deepseek", "greedy", "refined", "incremental"] if settings.server is None else [])
    if settings.server is not None and LIVE not in policies:
        policies = [LIVE, *policies]
    jobs = options.jobs or os.cpu_count() or 1
    with progress_bar("replaying") as show:
        total = load.num_records * num_passes(policies, settings, jobs) if load.num_records else None
        report = run_replay(load, policies, settings, lambda done: show(done, total), jobs)
    if settings.costs is not None:
        conditions = {**report.conditions, "prices": settings.costs.words()}
        if options.expert_capacity is not None:
            conditions["capacity"] = settings.costs.capacity_words(settings.costs.of_model(load))
        report = replace(report, conditions=conditions)
    if options.curve:
        rules = replace(settings.rules, max_moves=None, max_total_moves=None, max_rank_moves=None)
        report = with_redundancy_curve(report, load, settings.topology, rules)
    compared = against_to_json(report, earlier) if earlier else None
    options.print(
        lambda: to_json(report) | ({"against": compared} if compared else {}),
        lambda color: (
            to_table(report, color=color) + (against_to_table(report, earlier, color=color) if earlier else "")
        ),
    )
    if options.html is not None:
        against = against_page(report, earlier) if earlier else None
        options.write_page(to_html(report, f"Replay of {Path(options.trace).name}", against=against))
    options.check(report.summary(report.best)["served_mean"])


def _recorded_latency(trace: str) -> int:
    from moe_serve.eplb.files.trace_jsonl import recorded_latency

    return (recorded_latency(Path(trace)) if _may_hold_events(trace) else None) or 0


def _recorded_even_steps(trace: str, split: str) -> "EvenSteps":
    from moe_serve.eplb.files.trace_jsonl import read_events
    from moe_serve.eplb.replay.settings import EvenSteps

    return EvenSteps.of(read_events(Path(trace)) if split in ("exact", "time") and _may_hold_events(trace) else ())


def _may_hold_events(trace: str) -> bool:
    return trace.endswith(".jsonl") and Path(trace).is_file()


def _is_log(path: Path) -> bool:
    from moe_serve.eplb.files.balance_log import is_balance_log

    return os.path.isfile(path) and is_balance_log(path)


def _show_log(path: Path, json_output: bool) -> None:
    from moe_serve.eplb.files.balance_log import log_to_json, log_to_table

    typer.echo(json.dumps(log_to_json(path), indent=1) if json_output else log_to_table(path), nl=json_output)


# --like-server: what a server's own file says about a replay of its load


def server_replay(
    file: Path, trace_file: Path | None, load: "LoadTrace", nodes: int
) -> "tuple[ServerReplay, Placement]":
    """Returns what the server's balancer began with, and the placement at its start.

    file:       the configuration of the server
    trace_file: where the events of its balancer are recorded; None = nowhere
    nodes:      machines, where the trace does not tell
    Raises ConfigError where the file does not fit the trace, TraceError where an event holds no facts of a server.
    """
    import msgspec

    from moe_serve.config import load_config
    from moe_serve.eplb.files.trace_jsonl import events_between_records
    from moe_serve.eplb.rebalance.events import STARTED
    from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
    from moe_serve.eplb.replay.settings import ServerReplay

    config = load_config(file)
    events: list[tuple[int, dict[str, Any]]] = [] if trace_file is None else list(events_between_records(trace_file))
    starts = [fields for _, fields in events if fields["event"] == STARTED]
    for fields in starts:
        if "split" not in fields:  # as in older traces
            fields["split"] = _split_of(config)
    start = _start(config, file, load)
    facts = SystemFacts.from_event(starts[0]) if starts else facts_of(config, nodes, start)
    if start.num_ranks % facts.num_nodes:
        raise ConfigError(
            f"{start.num_ranks} ranks do not divide over {facts.num_nodes} nodes; give the server's --nodes"
        )
    settings = msgspec.convert(config.eplb, BalancerSettings, from_attributes=True)
    return ServerReplay.of(settings, facts, events), start


def facts_of(config: "ServeConfig", nodes: int, start: "Placement") -> "SystemFacts":
    """Returns the facts of the system that the configuration describes, as far as it tells.

    Experts have the size that the server's ranks give them; on CPUs, with the compiled kernels unless the file says
    otherwise.
    """
    import torch

    from moe_serve.config import model_dir
    from moe_serve.engine.model.model_plan import checkpoint_folder, compute_dtype, expert_form
    from moe_serve.eplb.rebalance.settings import SystemFacts, planned_time
    from moe_serve.eplb.split.time import ExpertTime
    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.weight_share import StoredWeights, WeightShare

    spec = read_spec(model_dir(config.model))
    device = _device_of(config)
    place = torch.device(device)
    dtype = compute_dtype(config, place)
    is_compiled = device == "cpu" and dtype == torch.float32 and config.engine.cpu_kernels != "torch"
    stored = StoredWeights.of(spec, checkpoint_folder(config)) if is_compiled else None
    form = expert_form(config, spec, place, stored)
    num_bytes = WeightShare(spec, start, 0, dtype, place, form, stored).slot_form.num_bytes
    survives_loss = config.engine.on_lost_rank == "mask" and config.parallel.num_ranks > 2 and device == "cpu"
    facts = SystemFacts.of_model(spec.expert_parameters, num_bytes, device, nodes, survives_loss, _split_of(config))
    if facts.split != "time":
        return facts
    time = ExpertTime.of_cpu(num_bytes, spec.expert_parameters)
    return replace(facts, expert_time=planned_time(time, start.num_ranks, start.num_slots, start.num_logical))


def _device_of(config: "ServeConfig") -> str:
    return "cuda" if config.parallel.device == "cuda" else "cpu"


def _split_of(config: "ServeConfig") -> "ServedSplit":
    import torch

    from moe_serve.engine.model.model_plan import choose_split

    return choose_split(config, torch.device(_device_of(config)))


def _start(config: "ServeConfig", file: Path, load: "LoadTrace") -> "Placement":
    """Returns the placement of the first record; where records have none, experts in order as the server begins."""
    from moe_serve.eplb.placement import Placement

    first = next(iter(load), None)
    if first is not None and first.placement is not None:
        return first.placement
    if config.eplb.init_expert_location != "trivial":
        raise ConfigError(
            f"the trace does not say where experts were, and {file} begins with {config.eplb.init_expert_location}; "
            "replay a trace that the server has recorded (eplb.record_path)"
        )
    ranks, redundant = config.parallel.num_ranks, config.eplb.num_redundant_experts
    return Placement.trivial(len(load.moe_layer_ids), load.num_logical, ranks, redundant, load.moe_layer_ids)
