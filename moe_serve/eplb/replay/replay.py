"""Replays a load trace through balancers: what would each have done, and how well would it have served?

Every policy plans on the past and is scored on the window that comes next, which it has not seen. "do nothing" (the
placement at the start, kept) and "perfect" (every rank has the mean load) are always there as floor and ceiling.
Windows pass one at a time, so a trace may be larger than memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy
from moe_serve.eplb.rebalance.rebalancer import GateModel, RebalanceSettings
from moe_serve.eplb.replay.parallel import Task, run_beside, usable_jobs
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport
from moe_serve.eplb.replay.run import GatedRun, PlannedRun, PlanSettings, Run, Served, StaticRun
from moe_serve.eplb.replay.score import ReplayCosts, Scorer, WindowScore
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology

GATE = "gate:"


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """How to replay.

    topology, num_slots: the cluster; num_slots a multiple of its ranks
    start:      placement before the first window; None: experts in order, redundant slots round-robin
    history:    windows that a plan is made from;  interval: windows between two plans of an ungated policy
    num_groups, off_home, max_moves, objective, seed: passed on to the policies
    split:      how replicas share tokens when windows are scored, see Scorer
    costs:      prices of steps and moves; None: no times
    gate, gate_model, latency_steps: for policies named "gate:<policy>"
    """

    topology: Topology
    num_slots: int
    start: Placement | None = None
    history: int = 1
    interval: int = 1
    num_groups: int | None = None
    off_home: float = 1.0
    max_moves: int | None = None
    objective: str = "tokens"
    split: str = "window"
    seed: int = 0
    costs: ReplayCosts | None = None
    gate: RebalanceSettings = field(default_factory=RebalanceSettings)
    gate_model: GateModel | None = None
    latency_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("history", "interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)} windows; give a whole number of at least 1")
        if self.num_slots % self.topology.num_ranks or self.num_slots < 1:
            ranks = self.topology.num_ranks
            raise ConfigError(
                f"{self.num_slots} slots do not divide over {ranks} ranks; use {self.num_slots // ranks * ranks} or "
                f"{-(-self.num_slots // ranks) * ranks}"
            )


def replay(
    trace: LoadTrace,
    policies: Sequence[str | PlacementPolicy],
    settings: ReplaySettings,
    progress: Callable[[int], None] | None = None,
    jobs: int = 1,
) -> ReplayReport:
    """Returns the report of all policies on a trace.

    policies: names of `make_policy`, "gate:<name>" for a policy behind the Rebalancer's gate, or policies themselves
    progress: called with the number of windows done, of `num_passes` times the windows of the trace
    jobs:     policies to replay at the same time, in processes of their own; the result is the same
    Raises TraceError when the trace has no window after the first plan, ConfigError for an unknown policy.
    """
    start = settings.start or starting_placement(trace, settings.topology, settings.num_slots)
    _check_start(start, trace, settings)
    if settings.costs is not None:
        settings.costs.check(trace)
    for policy in policies:
        make_run(policy, start, settings)  # a wrong name ends it here, not after the first pass
    jobs = usable_jobs(jobs, len(policies))
    tick = _Ticks(progress)
    if jobs <= 1:
        runs: list[Run] = [StaticRun(FLOOR, start), *(make_run(policy, start, settings) for policy in policies)]
        frame, results = _replay_pass(trace, runs, settings, start, lambda _: tick())
    else:
        frame, results = _replay_pass(trace, [StaticRun(FLOOR, start)], settings, start, lambda _: tick())
        tasks = [_task(policy, trace, settings, start) for policy in policies]
        results[1:1] = run_beside(tasks, jobs, tick)
    return ReplayReport(
        conditions=_conditions(trace, settings, frame.count, start),
        results=tuple(results),
        first_steps=np.array([step for step, _, _ in frame.windows], dtype=np.int64),
        num_steps=np.array([steps for _, steps, _ in frame.windows], dtype=np.int64),
        tokens=np.array([tokens for _, _, tokens in frame.windows], dtype=np.float64),
        load=frame.load,
        moe_layer_ids=trace.moe_layer_ids,
        num_slots=settings.num_slots,
        num_ranks=settings.topology.num_ranks,
        num_nodes=settings.topology.num_nodes,
        missing=_missing(results[0], trace, settings),
        expert_bytes=settings.costs.expert_bytes if settings.costs else None,
    )


def num_passes(num_policies: int, jobs: int) -> int:
    """Returns how often `replay` goes through the windows of the trace, for a progress bar."""
    return 1 if usable_jobs(jobs, num_policies) <= 1 else num_policies + 1


@dataclass
class _Ticks:
    progress: Callable[[int], None] | None
    done: int = 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done)


@dataclass
class _Frame:
    """What all policies have in common. windows: (first step, steps, tokens) of the scored ones."""

    load: np.ndarray
    windows: list[tuple[int, int, float]] = field(default_factory=list)
    count: int = 0


def _replay_pass(
    trace: LoadTrace,
    runs: Sequence[Run],
    settings: ReplaySettings,
    start: Placement,
    progress: Callable[[int], None],
) -> tuple[_Frame, list[PolicyResult]]:
    """Returns the results of these runs and of the ceiling, after one pass over the trace."""
    scorers = [Scorer(settings.topology, trace.topk, settings.costs, settings.split) for _ in runs]
    columns = [_Columns(run.name) for run in runs]
    ceiling = _Columns(CEILING)
    frame = _Frame(np.zeros((len(trace.moe_layer_ids), trace.num_logical)))
    for record in trace:
        if record.by_source is not None and record.by_source.shape[1] != settings.topology.num_ranks:
            raise TraceError(
                f"by_source has {record.by_source.shape[1]} source ranks but the topology has "
                f"{settings.topology.num_ranks}; replay on the ranks it was recorded on, or convert the trace with "
                f"--counts-only"
            )
        # The first plan is made from `history` windows: all policies are scored after it.
        scored = frame.count >= settings.history
        for run, scorer, column in zip(runs, scorers, columns, strict=True):
            served = run.before(record.first_step)
            if scored:
                column.add(served, scorer.score(record, served.placement, served.shares), settings.costs)
            run.after(record)
        if scored:
            ceiling.add(Served(start), scorers[0].perfect(record, start.slots_per_rank), settings.costs)
            tokens = scorers[0].tokens_per_step(record) * record.num_steps if trace.topk else np.nan
            frame.windows.append((record.first_step, record.num_steps, tokens))
            frame.load += record.tokens
        frame.count += 1
        progress(frame.count)
    if not frame.windows:
        raise TraceError(
            f"{trace.source or 'the trace'} has {frame.count} windows and plans are made from {settings.history}, so "
            f"none is left to score; fold fewer steps into a window (--window), or lower --history"
        )
    results = [column.result(run.decisions, run.before(0).placement) for column, run in zip(columns, runs, strict=True)]
    return frame, [*results, ceiling.result((), None)]


def _task(policy: str | PlacementPolicy, trace: LoadTrace, settings: ReplaySettings, start: Placement) -> Task:
    def run(progress: Callable[[int], None]) -> PolicyResult:
        return _replay_pass(trace, [make_run(policy, start, settings)], settings, start, progress)[1][0]

    return run


def make_run(policy: str | PlacementPolicy, start: Placement, settings: ReplaySettings) -> Run:
    """Returns the run of a policy; see `replay` for the names."""
    gated = isinstance(policy, str) and policy.startswith(GATE)
    chosen = make_policy(policy.removeprefix(GATE)) if isinstance(policy, str) else policy
    if gated:
        if settings.gate_model is None:
            raise ConfigError(
                f"policy {policy!r} weighs gains against costs, which needs prices; name --model and --hardware"
            )
        name = f"{GATE}{chosen.name}"
        return GatedRun(
            name, chosen, start, settings.topology, settings.gate, settings.gate_model, settings.latency_steps
        )
    plan_settings = PlanSettings(
        settings.topology,
        settings.num_slots,
        settings.history,
        settings.interval,
        settings.num_groups,
        settings.off_home,
        settings.max_moves,
        settings.objective,
        "exact" if settings.split == "exact" else "even",
        settings.seed,
    )
    return PlannedRun(chosen.name, chosen, start, plan_settings)


def starting_placement(trace: LoadTrace, topology: Topology, num_slots: int) -> Placement:
    """Returns experts in order over the ranks, with the slots above them filled round-robin."""
    if num_slots < trace.num_logical:
        raise ConfigError(
            f"{num_slots} slots are fewer than the {trace.num_logical} experts; use at least "
            f"{-(-trace.num_logical // topology.num_ranks) * topology.num_ranks}"
        )
    return Placement.trivial(
        len(trace.moe_layer_ids), trace.num_logical, topology.num_ranks, num_slots - trace.num_logical,
        trace.moe_layer_ids,
    )  # fmt: skip


class _Columns:
    """Collects the windows of one row."""

    def __init__(self, name: str):
        self._name = name
        self._rows: dict[str, list[np.ndarray | float]] = {}
        self._traffic: np.ndarray | None = None

    def add(self, served: Served, score: WindowScore, costs: ReplayCosts | None) -> None:
        unknown = np.full(len(score.balancedness), np.nan)
        moved = served.moved
        stall = 0.0
        if moved is not None and moved.num_moves and served.stall_s is None:
            stall = costs.stall_seconds(moved) if costs else np.nan
        row: dict[str, np.ndarray | float] = {
            "served": score.balancedness,
            "fit": unknown if served.fit is None else served.fit,
            "bound": unknown if served.bound is None else served.bound,
            "rank_load": score.ranks,
            "moves": moved.num_moves if moved else 0,
            "moves_afar": int(moved.from_afar.sum()) if moved else 0,
            "num_rounds": served.num_rounds,
            "off_node": np.nan if score.off_node is None else score.off_node,
            "activated": np.nan if score.activated is None else score.activated,
            "step_s": np.nan if score.step_s is None else score.step_s,
            "stall_s": stall if served.stall_s is None else served.stall_s,
            "plan_s": served.plan_s,
        }
        small = {"served", "fit", "bound", "rank_load"}
        for name, value in row.items():
            self._rows.setdefault(name, []).append(np.asarray(value, dtype=np.float32) if name in small else value)
        if score.traffic is not None:
            self._traffic = score.traffic if self._traffic is None else self._traffic + score.traffic

    def result(self, decisions: tuple[tuple[int, str, str], ...], final: Placement | None) -> PolicyResult:
        whole = {"moves", "moves_afar", "num_rounds"}
        arrays = {
            name: np.array(values, dtype=np.int64 if name in whole else None) for name, values in self._rows.items()
        }
        traffic = np.full((1, 1), np.nan) if self._traffic is None else self._traffic
        return PolicyResult(self._name, **arrays, traffic=traffic, final=final, decisions=decisions)


def _check_start(start: Placement, trace: LoadTrace, settings: ReplaySettings) -> None:
    have = (start.num_layers, start.num_logical, start.num_ranks, start.num_slots)
    want = (len(trace.moe_layer_ids), trace.num_logical, settings.topology.num_ranks, settings.num_slots)
    if have != want:
        raise ConfigError(
            f"the current placement has (layers, experts, ranks, slots) = {have}, the replay needs {want}; give the "
            f"placement of this model and cluster"
        )


def _conditions(trace: LoadTrace, settings: ReplaySettings, count: int, start: Placement) -> dict[str, str]:
    topology = settings.topology
    words = {
        "trace": trace.source or "in memory",
        "model": f"{len(trace.moe_layer_ids)} MoE layers x {trace.num_logical} experts"
        + (f", top {trace.topk}" if trace.topk else ""),
        "cluster": f"{topology.num_ranks} ranks on {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}, "
        f"{settings.num_slots} slots ({start.slots_per_rank} a rank, "
        f"{settings.num_slots - trace.num_logical} redundant)",
        "windows": f"{count}, scored from the {_ordinal(settings.history + 1)} on",
        "plans": f"from the last {settings.history} window{'s' * (settings.history > 1)}, every "
        + (f"{settings.interval} windows" if settings.interval > 1 else "window"),
    }
    if settings.off_home < 1:
        words["hierarchy"] = f"at most {settings.off_home:.0%} of the load outside its home node"
    if settings.split != "window":
        words["split"] = f"{settings.split}, every step"
    return words


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _missing(floor: PolicyResult, trace: LoadTrace, settings: ReplaySettings) -> dict[str, str]:
    """Returns, for every column that cannot be filled, what would fill it."""
    out: dict[str, str] = {}
    if not np.isfinite(floor.off_node).all():
        out["off-node"] = "tokens by source rank (by_source) in the trace"
    if not np.isfinite(floor.activated).all():
        out["active experts"] = "single steps, or activations, in the trace"
    if settings.costs is None:
        out["bytes"] = out["stall"] = out["step time"] = out["tokens/s"] = "--model and --hardware"
    elif not trace.topk:
        out["step time"] = out["tokens/s"] = "experts per token (--topk)"
    return out
