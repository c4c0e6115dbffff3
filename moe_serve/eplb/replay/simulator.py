"""Clusters that do not exist yet: a model on a machine under a load, over a sweep of sizes.

A simulation is a replay of a drawn or recorded load on every combination of the swept values, priced by the cost model.
The policies, the scoring and the Rebalancer are those of replays and of the live system. Its report is a table with one
line per combination and policy, JSON, and the curve for a page.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import EngineProfile, HardwareProfile, ModelProfile
from moe_serve.eplb.files.windows import folded
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.replay import num_passes, replay
from moe_serve.eplb.replay.report import (
    MISSING,
    as_bytes,
    as_number,
    as_percent,
    as_seconds,
    missing_lines,
    printed,
    text_console,
    to_json,
    verdict,
)
from moe_serve.eplb.replay.result import CEILING, FLOOR, ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

_MOST_HANDED_OVER = 0.5  # of the network of a node
_SWEPT = (("ranks", "ranks"), ("num_slots", "slots"), ("window_steps", "window"))


@dataclass(frozen=True)
class Sweep:
    """The values to combine; all combinations run.

    nodes:        machines
    slots:        physical experts per layer; () = experts + redundant, rounded up to the ranks
    redundant:    used where slots is (): extra slots per layer
    window_steps: steps per window of load
    Raises ConfigError for impossible values.
    """

    nodes: tuple[int, ...] = (4,)
    slots: tuple[int, ...] = ()
    redundant: tuple[int, ...] = (32,)
    window_steps: tuple[int, ...] = (100,)

    def __post_init__(self) -> None:
        for name, least in (("redundant", 0), ("window_steps", 1)):
            for value in getattr(self, name):
                if value < least:
                    raise ConfigError(f"{name} holds {value}; give whole numbers of at least {least}")

    @property
    def num_cases(self) -> int:
        """The most combinations there can be: numbers of slots may be the same once rounded up."""
        return len(self.nodes) * len(self.slots or self.redundant) * len(self.window_steps)


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulation: a model on a machine under a load, and the sizes to try.

    sweep:           sizes, slots and windows to combine
    ranks_per_node:  None = as the hardware profile says
    load:            shape of the synthetic load; its layers, experts, topk and groups come from the model profile
    trace:           a recorded load instead; windows are folded to window_steps
    tokens_per_rank: tokens that one rank computes in one step (synthetic load)
    serving:         phase of the synthetic load, and how the ranks serve it
    engine:          None = the default of `CostModel`
    policies, history, intervals, split, rules: as in `replay`; rules.seed also draws the load
    plan_latency_s:  time from a request to its plan, for "gate:" policies
    """

    model: ModelProfile
    hardware: HardwareProfile
    sweep: Sweep = field(default_factory=Sweep)
    ranks_per_node: int | None = None
    load: SyntheticLoad = field(default_factory=SyntheticLoad)
    trace: LoadTrace | None = None
    tokens_per_rank: int = 128
    serving: Serving = field(default_factory=Serving)
    engine: EngineProfile | None = None
    policies: tuple[str, ...] = ("greedy", "refined")
    history: int = 1
    intervals: tuple[int, ...] = (1,)
    split: str = "window"
    rules: PlanRules = field(default_factory=PlanRules)
    plan_latency_s: float = 0.1


@dataclass(frozen=True, eq=False)
class Case:
    """One combination: its cluster, slots and window, the load, and what its replay found.

    memory_bytes: expert weights of one rank.   fits: they fit into its memory with a tenth to spare
    handed_over_bytes: of the KV cache of a token that a prefill rank computes, and hands over; 0 where ranks decode
    network_bytes_per_s: of a node, in one direction
    """

    topology: Topology
    num_slots: int
    window_steps: int
    report: ReplayReport
    trace: LoadTrace
    memory_bytes: int
    fits: bool
    handed_over_bytes: int
    network_bytes_per_s: float

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a row per policy: the summary of the replay and the swept values."""
        for result in self.report.results:
            summary = self.report.summary(result)
            rate = summary["tokens_per_s"]
            sent = None if rate is None else rate / self.topology.num_nodes * self.handed_over_bytes
            yield {
                "ranks": self.topology.num_ranks,
                "nodes": self.topology.num_nodes,
                "num_slots": self.num_slots,
                "window_steps": self.window_steps,
                "memory_bytes": self.memory_bytes,
                "fits": self.fits,
                "handed_over_bytes_per_s": sent,  # of a node
                "handed_over_of_network": None if sent is None else sent / self.network_bytes_per_s,
                **summary,
            }


def simulate(
    simulation: Simulation, progress: Callable[[float, int], None] | None = None, jobs: int = 1
) -> tuple[Case, ...]:
    """Returns the cases in the order of the sweep: nodes, then slots, then windows.

    progress: called with (cases done, cases), after each window where it is known how many the load has
    Raises ConfigError for combinations that cannot be, before anything runs.
    """
    batches: dict[str, str] = {}
    if simulation.trace is not None:
        costs = _costs(simulation, topologies_of(simulation)[0])
        costs, batches = costs.with_spread(costs.of_model(simulation.trace))
        simulation = replace(simulation, serving=costs.serving)
    combinations = [
        (topology, slots, window)
        for topology in topologies_of(simulation)
        for slots, window in itertools.product(slots_of(simulation, topology), simulation.sweep.window_steps)
    ]
    cases = []
    for index, (topology, slots, window) in enumerate(combinations):

        def show(share: float, index: int = index) -> None:
            if progress is not None:
                progress(index + share, len(combinations))

        cases.append(_run(simulation, topology, slots, window, jobs, batches, show))
        show(1.0)
    return tuple(cases)


def topologies_of(simulation: Simulation) -> list[Topology]:
    """Returns the clusters of the sweep."""
    per_node = simulation.ranks_per_node or simulation.hardware.ranks_per_node
    return [Topology(nodes, per_node) for nodes in simulation.sweep.nodes]


def slots_of(simulation: Simulation, topology: Topology) -> Sequence[int]:
    """Returns the slots per layer to try on a cluster. Raises ConfigError for numbers that cannot be."""
    ranks, experts = topology.num_ranks, simulation.model.num_logical
    if simulation.sweep.slots:
        for slots in simulation.sweep.slots:
            if slots % ranks or not experts <= slots <= ranks * experts:
                least = math.ceil(experts / ranks) * ranks
                raise ConfigError(
                    f"{slots} slots on {ranks} ranks for {experts} experts; use a multiple of {ranks} from {least} on "
                    f"to {ranks * experts}, or --redundant, which is rounded up"
                )
        return simulation.sweep.slots
    found = list(dict.fromkeys(-(-(experts + extra) // ranks) * ranks for extra in simulation.sweep.redundant))
    if max(found) > ranks * experts:
        raise ConfigError(
            f"{max(found)} slots on {ranks} ranks are more than {experts} a rank, which is every expert; lower "
            "--redundant"
        )
    return found


def _costs(simulation: Simulation, topology: Topology) -> ProfileCosts:
    model = CostModel(simulation.hardware, simulation.model, topology, simulation.engine)
    return ProfileCosts(model, simulation.serving)


def _run(
    simulation: Simulation,
    topology: Topology,
    num_slots: int,
    window_steps: int,
    jobs: int,
    batches: dict[str, str],
    show: Callable[[float], None],
) -> Case:
    """show: called with the share of the case that is done"""
    model, costs = simulation.model, _costs(simulation, topology)
    trace = costs.of_model(_trace(simulation, costs, window_steps))
    step_s = _first_step_seconds(trace, costs, num_slots) if simulation.plan_latency_s else 1.0
    settings = ReplaySettings(
        topology,
        num_slots,
        history=simulation.history,
        intervals=simulation.intervals,
        split=simulation.split,
        rules=simulation.rules,
        costs=costs,
        gate_cost=costs.gate(),
        latency_steps=math.ceil(simulation.plan_latency_s / step_s),
    )
    num_windows = (trace.num_records or 0) * num_passes(simulation.policies, settings, jobs)

    def tick(done: int) -> None:
        if num_windows:
            show(done / num_windows)

    report = replay(trace, simulation.policies, settings, tick, jobs)
    conditions = {**report.conditions, "prices": costs.words(), **batches}
    if simulation.serving.expert_capacity is not None:
        recorded = trace if simulation.trace is None else costs.of_model(simulation.trace)  # not folded: single steps
        conditions["capacity"] = costs.capacity_words(recorded)
    report = replace(report, conditions=conditions)
    memory = num_slots // topology.num_ranks * model.num_moe_layers * costs.expert_bytes
    hardware = simulation.hardware
    fits = memory <= 0.9 * hardware.hbm_bytes
    handed_over = model.kv_token_bytes if simulation.serving.phase == "prefill" else 0
    network = min(hardware.node_nic_bytes_per_s, topology.ranks_per_node * hardware.nic_bytes_per_s)
    return Case(topology, num_slots, window_steps, report, trace, memory, fits, handed_over, network)


def _trace(simulation: Simulation, costs: ProfileCosts, window_steps: int) -> LoadTrace:
    if simulation.trace is not None:
        return folded(simulation.trace, window_steps)
    model, serving = simulation.model, simulation.serving
    tokens = simulation.tokens_per_rank * costs.model.topology.num_ranks
    return synthetic_trace(
        replace(
            simulation.load,
            request_spread=serving.request_spread,
            requests_per_step=max(costs.requests(tokens, serving.phase), 1.0),
            num_layers=model.num_moe_layers,
            num_logical=model.num_logical,
            topk=model.topk,
            num_groups=model.num_groups if model.num_groups > 1 else simulation.load.num_groups,
            tokens_per_step=tokens,
            steps_per_window=window_steps,
            phase=serving.phase,
            seed=simulation.rules.seed,
        )
    )


def _first_step_seconds(trace: LoadTrace, costs: ProfileCosts, num_slots: int) -> float:
    for record in trace:
        if not record.busy_steps:
            continue
        tokens = record.tokens / record.busy_steps
        per_step = float(tokens.sum(axis=1).max(initial=0)) / costs.model.model.topk
        return max(costs.step_seconds(tokens, None, num_slots, per_step, record.phase), 1e-6)
    return 1.0


def are_timed(cases: Sequence[Case]) -> bool:
    """Whether all cases have times, so that they can be compared by tokens per second."""
    return all(row["tokens_per_s"] is not None for case in cases for row in case.rows())


def best_case(cases: Sequence[Case]) -> Case:
    """Returns the case with most tokens per second and rank among those that fit, or of all where none does.

    Without times it is the best balanced one.
    """
    fitting = [case for case in cases if case.fits] or list(cases)
    timed = are_timed(cases)

    def rate(case: Case) -> float:
        rows = [row for row in case.rows() if row["policy"] != CEILING]
        if timed:
            return float(max(row["tokens_per_s"] for row in rows)) / case.topology.num_ranks
        return float(max(row["served_mean"] for row in rows))

    return max(fitting, key=rate)


def sweep_to_table(cases: Sequence[Case], color: bool = False) -> str:
    """Returns the cases for a terminal: common conditions first, then a line for each combination and policy."""
    console = text_console(160, color)
    for name, words in cases[0].report.conditions.items():
        if name in ("cluster", "windows") and len(cases) > 1:
            continue
        console.print(Text(f"{name:>10}", style="bold"), "", words, soft_wrap=True)
    console.print()
    table = Table(box=None)
    columns, rows = sweep_cells(cases)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if column == "policy" else "right", style="bold" if index == 0 else "")
    best = best_case(cases)
    for case, cells in rows:
        table.add_row(*cells, style="dim" if cells[4] in (FLOOR, CEILING) else "green" if case is best else "")
    console.print(table)
    for line in missing_lines({name: needs for name, needs in best.report.missing.items() if name in columns}):
        console.print(line, style="dim")
    console.print()
    for sentence in sweep_verdict(cases):
        console.print(sentence, soft_wrap=True)
    return printed(console)


def sweep_cells(cases: Sequence[Case]) -> tuple[list[str], list[tuple[Case, list[str]]]]:
    """Returns the columns, and the cells of each line beside its case."""
    columns = ["ranks", "slots", "window", "expert memory", "policy", "served", "min layer", "fit", "of slots", "stall",
               "step time", "tokens/s", "tokens/s/rank"]  # fmt: skip
    rows = []
    for case in cases:
        for row in case.rows():
            rate = row["tokens_per_s"]
            rows.append(
                (
                    case,
                    [
                        str(row["ranks"]),
                        str(row["num_slots"]),
                        str(row["window_steps"]),
                        as_bytes(row["memory_bytes"]) + ("" if row["fits"] else " !"),
                        row["policy"],
                        as_number(row["served_mean"]),
                        as_number(row["served_min"]),
                        as_number(row["fit_mean"]),
                        as_percent(row["moved_share"]) if row["num_rebalances"] else "-",
                        as_seconds(row["stall_s"]),
                        as_seconds(row["step_s"]),
                        MISSING if rate is None else f"{rate:,.0f}",
                        MISSING if rate is None else f"{rate / row['ranks']:,.0f}",
                    ],
                )
            )
    return columns, rows


def sweep_verdict(cases: Sequence[Case]) -> list[str]:
    """Returns which combination to take, and the verdict of its replay."""
    best = best_case(cases)
    out = []
    if len(cases) > 1:
        words = (
            f"{best.topology.num_ranks} ranks, {best.num_slots} slots, windows of {best.window_steps} steps, "
            f"{best.report.best.name}"
        )
        if are_timed(cases):
            out.append(f"Most tokens per second and rank: {words}.")
        else:
            out.append(f"Times are not known, so no combination is named as the fastest. Best balanced: {words}.")
    tight = [case for case in cases if not case.fits]
    if tight:
        worst = max(tight, key=lambda case: case.memory_bytes)
        out.append(
            f"{len(tight)} of {len(cases)} combinations do not fit (!): {worst.num_slots} slots on "
            f"{worst.topology.num_ranks} ranks need {as_bytes(worst.memory_bytes)} for experts alone on each rank."
        )
    return [*out, *_handed_over(best), *verdict(best.report)]


def _handed_over(case: Case) -> Iterator[str]:
    """Yields what prefill ranks hand over to nodes that decode, by the best policy, where times are known."""
    row = next(row for row in case.rows() if row["policy"] == case.report.best.name)
    sent, share = row["handed_over_bytes_per_s"], row["handed_over_of_network"]
    if not sent:
        return
    end = "sent while layers compute, and no part of the step time"
    if share > _MOST_HANDED_OVER:
        end = "for which it would wait, which is no part of the step time"
    yield (
        f"Where other nodes decode, each hands over {as_bytes(round(sent))}/s of KV cache at most, "
        f"{as_percent(share)} of its network, {end}."
    )


def sweep_to_json(cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the cases as plain JSON types: every line, and the whole report of the best case."""
    return {
        "format": "moe_serve.simulation",
        "rows": [row for case in cases for row in case.rows()],
        "verdict": sweep_verdict(cases),
        "best": to_json(best_case(cases).report),
    }


def sweep_curves(cases: Sequence[Case]) -> dict[str, Any] | None:
    """Returns what a page draws: the swept number against tokens/s/rank, or balancedness; None for one case."""
    if len(cases) < 2:
        return None
    rows = [row for case in cases for row in case.rows()]
    key, label = max(_SWEPT, key=lambda swept: len({row[swept[0]] for row in rows}))
    others = [(name, words) for name, words in _SWEPT if name != key and len({row[name] for row in rows}) > 1]
    timed = are_timed(cases)
    series: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = ", ".join([row["policy"], *(f"{words} {row[other]}" for other, words in others)])
        role = {FLOOR: "floor", CEILING: "ceiling"}.get(row["policy"], "policy")
        line = series.setdefault(name, {"name": name, "role": role, "x": [], "y": []})
        line["x"].append(row[key])
        line["y"].append(row["tokens_per_s"] / row["ranks"] if timed else row["served_mean"])
    columns, cells = sweep_cells(cases)
    return {
        "xLabel": label,
        "yLabel": "predicted tokens/s per rank, moves paid" if timed else "served balancedness",
        "digits": 0 if timed else 3,
        "series": list(series.values()),
        "columns": columns,
        "rows": [line for _, line in cells],
    }
