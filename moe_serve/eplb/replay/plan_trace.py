"""One placement from a recorded load: what `moe-serve plan` does."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from moe_serve.eplb.files.placements import placement_to_json
from moe_serve.eplb.files.windows import PhaseLoad, load_by_phase, phase_weights
from moe_serve.eplb.load import LoadTrace, balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import Plan, PlanRules
from moe_serve.eplb.repair import fill_empty_slots
from moe_serve.eplb.replay.report import printed, text_console
from moe_serve.eplb.replay.settings import starting_placement
from moe_serve.eplb.split.limit import where_no_split_helps
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology

MAX_SERIES = 64  # windows; a plan takes time in proportion to them


@dataclass(frozen=True, eq=False)
class MadePlan:
    """A plan beside the placement that it replaces.

    before: experts in order where no placement is in use;  phases: those that it was planned for, one by one
    """

    plan: Plan
    before: Placement
    before_in_use: bool
    tokens: NDArray[np.int64]
    num_windows: int
    policy: str
    source: str
    phases: tuple[PhaseLoad, ...] = ()


@dataclass(frozen=True, eq=False)
class TracePlanSettings:
    """The settings of a plan from a trace.

    topology, num_slots: the cluster; num_slots is a multiple of its ranks
    current: placement in use; None = none yet
    last:    number of windows, counted from the end, to plan on; 0 = all
    by_phase: plan for each phase of these windows, not for their sum; with policy series
    fill:    leave no slot empty, for engines without empty slots
    """

    topology: Topology
    num_slots: int
    policy: str = "refined"
    current: Placement | None = None
    last: int = 0
    by_phase: bool = False
    fill: bool = False
    rules: PlanRules = field(default_factory=PlanRules)


def plan_from_trace(trace: LoadTrace, settings: TracePlanSettings) -> MadePlan:
    """Returns a plan for the sum of a trace's windows; policy series plans for each of the last ones, all alike, or for
    each phase, by its share of the time (of the steps, where the trace does not tell their time).

    Raises TraceError when the trace has none, or by_phase one phase only; ConfigError for policy series without 2 to
    MAX_SERIES windows, and for by_phase with another policy.
    """
    series, weights = None, None
    phases: tuple[PhaseLoad, ...] = ()
    if settings.by_phase:
        if settings.policy != "series":
            raise ConfigError(f"policy {settings.policy} plans for one load; use --by-phase with --policy series")
        phases = load_by_phase(trace, settings.last)
        series, weights = np.array([load.tokens for load in phases]), phase_weights(phases)
        tokens, num_windows = series.sum(axis=0), sum(load.num_windows for load in phases)
    elif settings.policy == "series":
        series = _last_windows(trace, settings.last)
        tokens, num_windows = series.sum(axis=0), len(series)
    else:
        tokens, num_windows = _summed(trace, settings.last)
    request = settings.rules.request(
        tokens,
        settings.topology,
        settings.num_slots,
        current=settings.current,
        series=series,
        series_weights=weights,
        moe_layer_ids=trace.moe_layer_ids,
    )
    chosen = make_policy(settings.policy)
    before = settings.current or starting_placement(trace, settings.topology, settings.num_slots)
    made = chosen.plan(request)
    if settings.fill:
        made = _filled(made, tokens, settings)
    return MadePlan(
        made, before, settings.current is not None, tokens, num_windows, settings.policy, trace.source, phases
    )


def _last_windows(trace: LoadTrace, last: int) -> NDArray[np.int64]:
    """Returns the tokens [W, L, E] of the last windows."""
    if not 2 <= last <= MAX_SERIES:
        raise ConfigError(
            "policy series plans for single windows; name how many of the last ones with --last, from 2 to "
            f"{MAX_SERIES}, or plan for phases with --by-phase"
        )
    recent = deque((record.tokens for record in trace), maxlen=last)
    if len(recent) < 2:
        raise TraceError(
            f"{trace.source or 'the trace'} has {len(recent)} windows, and policy series plans for at least 2; fold "
            "fewer steps into a window, or use policy refined"
        )
    return np.array(recent)


def _summed(trace: LoadTrace, last: int) -> tuple[NDArray[np.int64], int]:
    """Returns the tokens [L, E] of the last windows (0: of all), and how many windows these are."""
    recent: deque[NDArray[np.int64]] = deque()
    total = np.zeros((len(trace.moe_layer_ids), trace.num_logical), dtype=np.int64)
    count = 0
    for record in trace:
        total = total + record.tokens
        count += 1
        if last:
            recent.append(record.tokens)
            if len(recent) > last:
                total = total - recent.popleft()
    if not count:
        raise TraceError(f"{trace.source or 'the trace'} has no windows; record while requests run")
    return total, min(count, last) if last else count


def _filled(plan: Plan, tokens: NDArray[np.int64], settings: TracePlanSettings) -> Plan:
    placement = fill_empty_slots(
        plan.placement,
        tokens,
        settings.topology.num_nodes if settings.rules.off_home < 1 else 1,
        in_use=settings.current,
    )
    balance = balancedness(rank_load(tokens, placement))
    num_moves = 0
    if settings.current is not None:
        num_moves = int(count_moves(settings.current.by_rank, placement.by_rank).sum())
    return replace(plan, placement=placement, balancedness=balance, gap=plan.bound - balance, num_moves=num_moves)


def plan_to_json(made: MadePlan) -> dict[str, Any]:
    """Returns the plan as plain JSON types, its placement included."""
    before = balancedness(rank_load(made.tokens, made.before))
    layers = zip(
        made.plan.placement.moe_layer_ids, before, made.plan.balancedness, made.plan.bound, made.plan.gap, strict=True
    )
    return {
        "format": "moe_serve.plan",
        "source": made.source,
        "windows": made.num_windows,
        "policy": made.policy,
        "truncated": made.plan.truncated,
        "num_moves": made.plan.num_moves if made.before_in_use else None,
        "unkept": [str(unkept) for unkept in made.plan.unkept],
        "phases": {
            load.phase: {"windows": load.num_windows, "steps": load.steps}
            | {name: float(reached.mean()) for name, reached in _reached(made, load.tokens).items()}
            for load in made.phases
        },
        "where_no_split_helps": where_no_split_helps(made.tokens, made.plan.placement),
        "layers": [
            {"layer": layer, "before": float(b), "balancedness": float(p), "bound": float(u), "gap": float(g)}
            for layer, b, p, u, g in layers
        ],
        "placement": placement_to_json(made.plan.placement),
    }


def _reached(made: MadePlan, tokens: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Returns the balancedness of each layer with these tokens, before the plan and with it."""
    placements = {"before": made.before, "balancedness": made.plan.placement}
    return {name: balancedness(rank_load(tokens, placement)) for name, placement in placements.items()}


def plan_to_table(made: MadePlan, color: bool = False) -> str:
    """Returns the plan for a terminal."""
    plan, placement = made.plan, made.plan.placement
    before = balancedness(rank_load(made.tokens, made.before))
    console = text_console(120, color)
    console.print(f"{made.policy} on {made.num_windows} windows of {made.source}", soft_wrap=True)
    redundant = placement.num_slots - placement.num_logical
    console.print(
        f"{placement.num_layers} layers x {placement.num_logical} experts on {placement.num_ranks} ranks: "
        f"{placement.num_slots} slots, {placement.slots_per_rank} a rank, {redundant} redundant"
    )
    console.print()
    table = Table(box=None)
    table.add_column("balancedness", style="bold")
    for name in ("mean layer", "worst layer", "worst is layer"):
        table.add_column(name, justify="right")
    rows = [
        ("in use" if made.before_in_use else "in order", before),
        ("plan", plan.balancedness),
        ("bound", plan.bound),
    ]
    for name, values in rows:
        table.add_row(
            name, f"{values.mean():.4f}", f"{values.min():.4f}", str(placement.moe_layer_ids[values.argmin()])
        )
    for load in made.phases:
        for name, values in _reached(made, load.tokens).items():
            words = f"{load.phase}, {'plan' if name == 'balancedness' else rows[0][0]}"
            table.add_row(
                words, f"{values.mean():.4f}", f"{values.min():.4f}", str(placement.moe_layer_ids[values.argmin()])
            )
    console.print(table)
    console.print()
    if made.before_in_use:
        share = plan.num_moves / (placement.num_slots * placement.num_layers)
        console.print(f"{plan.num_moves:,} experts move ({share:.1%} of all slots)")
    if int(placement.num_duplicates.sum()):
        console.print(
            f"{int(placement.num_duplicates.sum())} slots repeat an expert of their rank: more slots than uses"
        )
    no_split = where_no_split_helps(made.tokens, placement)
    if no_split is not None:
        console.print(no_split, soft_wrap=True)
    for unkept in plan.unkept:
        console.print(f"{unkept}.", soft_wrap=True)
    if plan.truncated:
        console.print("The time budget ended the search early.")
    return printed(console)
