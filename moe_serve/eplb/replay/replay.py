"""Replays a load trace through balancers: what would each have done, and how well would it have served?

Every policy plans on the past and is scored on the next window, which it has not seen. "do nothing" (the placement at
the start, kept) and "perfect" (every rank has the mean load) are always included as floor and ceiling. Windows pass one
at a time, so a trace may be larger than memory, and are scored from recorded data alone.

Shape words: L = layers, E = experts, R = ranks, P = slots.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.files.windows import cut_stretches
from moe_serve.eplb.load import Floats, LoadRecord, LoadTrace, balancedness, rank_load, rank_traffic, slot_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy, PlanRules, Unkept
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.parallel import Task, run_in_parallel, usable_jobs
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport
from moe_serve.eplb.replay.run import GATE, LIVE, Run, Served, StaticRun, make_runs
from moe_serve.eplb.replay.settings import NO_STEPS, EvenSteps, ReplaySettings
from moe_serve.eplb.split.policy import SplitPolicy
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import TraceError
from moe_serve.topology import Topology

_POINTS = 9  # of the redundancy curve
_CURVE_PAIRS = 4  # windows that each of its plans serves


def replay(
    trace: LoadTrace,
    policies: Sequence[str | PlacementPolicy],
    settings: ReplaySettings,
    progress: Callable[[int], None] | None = None,
    jobs: int = 1,
) -> ReplayReport:
    """Returns the report of all policies on a trace.

    policies: as in `make_runs`
    progress: called with the number of windows done, of `num_passes` times the windows of the trace
    jobs:     policies to replay at the same time, in processes of their own; the result is the same
    Raises TraceError when the trace has no window after the first plan, ConfigError for an unknown policy.
    """
    start = settings.start_of(trace)
    if settings.costs is not None:
        trace = settings.costs.of_model(trace)
    # Made here to refuse a wrong name now, not after the first pass.
    runs = [run for policy in policies for run in make_runs(policy, start, settings)]
    jobs = usable_jobs(jobs, len(runs))
    tick = _Ticks(progress)
    if jobs <= 1:
        frame, results = _replay_pass(trace, [StaticRun(FLOOR, start), *runs], settings, start, lambda _: tick())
    else:
        frame, results = _replay_pass(trace, [StaticRun(FLOOR, start)], settings, start, lambda _: tick())
        tasks = [_task(run, trace, settings, start) for run in runs]
        results[1:1] = run_in_parallel(tasks, jobs, tick)
    steps, num_steps, tokens, phases = zip(*frame.windows, strict=True)
    return ReplayReport(
        conditions=_conditions(trace, settings, frame.count),
        results=tuple(results),
        first_steps=np.array(steps, dtype=np.int64),
        num_steps=np.array(num_steps, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.float64),
        phases=phases,
        load=frame.load,
        moe_layer_ids=trace.moe_layer_ids,
        num_slots=settings.num_slots,
        num_ranks=settings.topology.num_ranks,
        num_nodes=settings.topology.num_nodes,
        missing=_missing(results[0], settings),
        expert_bytes=settings.costs.expert_bytes if settings.costs else None,
        utilisation=settings.costs.serving.utilisation if settings.costs else 1.0,
    )


def num_passes(policies: Sequence[str | PlacementPolicy], settings: ReplaySettings, jobs: int) -> int:
    """Returns how often `replay` goes through the windows of the trace, for a progress bar."""
    gated = sum(isinstance(policy, str) and policy.startswith((GATE, LIVE)) for policy in policies)
    num_runs = gated + (len(policies) - gated) * len(settings.intervals)
    return 1 if usable_jobs(jobs, num_runs) <= 1 else num_runs + 1


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
    """The windows and the load that all policies share. windows: (first step, steps, tokens, phase) of those scored"""

    load: np.ndarray
    windows: list[tuple[int, int, float, str]] = field(default_factory=list)
    count: int = 0


def _replay_pass(
    trace: LoadTrace,
    runs: Sequence[Run],
    settings: ReplaySettings,
    start: Placement,
    progress: Callable[[int], None],
) -> tuple[_Frame, list[PolicyResult]]:
    """Returns the results of these runs and of the ceiling, after one pass over the trace."""
    time = settings.planned_time(trace.num_logical)
    scorers = [
        Scorer(settings.topology, trace.topk, settings.costs, settings.split, settings.even_steps, time) for _ in runs
    ]
    rows = [_ResultRows(run.name) for run in runs]
    ceiling = _ResultRows(CEILING)
    frame = _Frame(np.zeros((len(trace.moe_layer_ids), trace.num_logical)))
    for record in trace:
        if record.by_source is not None and record.by_source.shape[1] != settings.topology.num_ranks:
            raise TraceError(
                f"by_source has {record.by_source.shape[1]} source ranks but the topology has "
                f"{settings.topology.num_ranks}; replay on the ranks it was recorded on, or convert the trace with "
                f"--counts-only"
            )
        # The first plan is made from `history` windows; all policies are scored on the windows after it.
        scored = frame.count >= settings.history
        for run, scorer, row in zip(runs, scorers, rows, strict=True):
            served = run.before(record.first_step, record.num_steps)
            if scored:
                row.add(served, scorer.score_served(record, served), settings.costs)
            run.after(record)
        if scored:
            ceiling.add(Served(start), scorers[0].perfect(record, start.slots_per_rank), settings.costs)
            tokens = scorers[0].tokens_per_step(record) * record.busy_steps if trace.topk else np.nan
            if settings.costs is not None:
                tokens = settings.costs.served_tokens(tokens, record.phase)
            frame.windows.append((record.first_step, record.busy_steps, tokens, record.phase))
            frame.load += record.tokens
        frame.count += 1
        progress(frame.count)
    if not frame.windows:
        raise TraceError(
            f"{trace.source or 'the trace'} has {frame.count} windows and plans are made from {settings.history}, so "
            f"none is left to score; fold fewer steps into a window (--window), or lower --history"
        )
    ends = [run.end() for run in runs]
    results = [row.result(run.decisions, end) for row, run, end in zip(rows, runs, ends, strict=True)]
    return frame, [*results, ceiling.result((), None)]


def _task(run: Run, trace: LoadTrace, settings: ReplaySettings, start: Placement) -> Task:
    return lambda progress: _replay_pass(trace, [run], settings, start, progress)[1][0]


def _conditions(trace: LoadTrace, settings: ReplaySettings, num_windows: int) -> dict[str, str]:
    """Returns what was replayed, in words, in the order to print."""
    topology = settings.topology
    words = {
        "trace": trace.source or "in memory",
        "model": f"{len(trace.moe_layer_ids)} MoE layers x {trace.num_logical} experts"
        + (f", top {trace.topk}" if trace.topk else ""),
        "cluster": f"{topology.num_ranks} ranks on {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}, "
        f"{settings.num_slots} slots ({settings.num_slots // topology.num_ranks} a rank, "
        f"{settings.num_slots - trace.num_logical} redundant)",
        "windows": f"{num_windows}, scored from the {_ordinal(settings.history + 1)} on",
        "plans": f"from the last {settings.history} window{'s' * (settings.history > 1)}, every "
        + ("window" if settings.intervals == (1,) else f"{' or '.join(map(str, settings.intervals))} windows"),
    }
    if settings.rules.off_home < 1:
        words["hierarchy"] = f"at most {settings.rules.off_home:.0%} of the load outside its home node"
    limits = _limits(settings.rules)
    if limits:
        words["moves"] = limits
    if settings.split != "window":
        chosen = settings.split in ("exact", "time") and any(settings.even_steps.phases)
        words["split"] = f"{settings.split}, every step" + (", even where the server chose so" if chosen else "")
        by_time = settings.planned_time(trace.num_logical) is not None
        words["split"] += "; plans and balancedness count time" if by_time else ""
    return words


def _limits(rules: PlanRules) -> str:
    """Returns the limits of moves in words; policies that plan anew do not keep to them."""
    limits = (
        (rules.max_moves, "at most {} a layer"),
        (rules.max_total_moves, "at most {} in all layers"),
        (rules.max_rank_moves, "at most {} to a rank of a layer"),
        (rules.min_gain, "each for at least {:g} of the mean rank load"),
    )
    return ", ".join(words.format(value) for value, words in limits if value is not None)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _missing(floor: PolicyResult, settings: ReplaySettings) -> dict[str, str]:
    """Returns what each empty column needs."""
    out: dict[str, str] = {}
    if not np.isfinite(floor.off_node).all():
        out["off-node"] = "tokens by source rank (by_source) in the trace"
    if not np.isfinite(floor.activated).all():
        out["active experts"] = "single steps, or activations, in the trace"
    if settings.costs is None:
        out["bytes"] = out["stall"] = out["step time"] = out["tokens/s"] = "--model and --hardware"
    elif not np.isfinite(floor.step_s).any():
        out["step time"] = out["tokens/s"] = "windows with steps in the trace"
    return out


@dataclass(frozen=True, eq=False)
class WindowScore:
    """One window on one placement.

    balancedness: [L], mean / max rank load
    ranks:        [R], load summed over layers
    off_node:     share of routes that leave the node of their token; None = sources not recorded
    traffic:      [R, R] routes from rank to rank; None likewise
    activated:    experts active in a step on the rank that has most, mean over layers; a replica is active when its
                  expert is. None = activations not recorded
    step_s:       predicted time of one step; None = no costs
    """

    balancedness: Floats
    ranks: Floats
    off_node: float | None = None
    traffic: Floats | None = None
    activated: float | None = None
    step_s: float | None = None


class Scorer:
    """Scores windows.

    split "window": replicas share an expert's tokens evenly, on the sums of the window. Others ("even", "nearest",
    "exact", "time", "fewest_activated") split every single step, which has to be in the trace, with its sources for
    "nearest"; balancedness and activated experts are then means over steps, and traffic is that of the split where the
    sources of single steps are known. even_steps: those that "exact" or "time" splits evenly, as the server did. "time"
    needs the times of experts: the server's, which even_steps knows, or those of costs.
    """

    def __init__(
        self,
        topology: Topology,
        topk: int | None,
        costs: ProfileCosts | None = None,
        split: str = "window",
        even_steps: EvenSteps = NO_STEPS,
        time: ExpertTime | None = None,
    ) -> None:
        """time: of experts, which ranks' load then counts, as plans do; None: tokens"""
        self.topology, self.topk, self.costs, self.split, self.even_steps = topology, topk, costs, split, even_steps
        self._time = time
        self._splitter: StepSplitter | None = None

    def score(self, record: LoadRecord, placement: Placement) -> WindowScore:
        """Returns the score of a window."""
        off_node, traffic = self._traffic(record, placement)
        if self.split == "window":
            load = rank_load(record.tokens, placement)
            balance, ranks, activated = balancedness(load), load.sum(axis=0), self._activated(record, placement)
        else:
            rows = self._splitter_of(placement).slot_rows(record)
            by_rank = rows.sum(axis=2).reshape(*rows.shape[:2], placement.num_ranks, -1)
            load = (by_rank if self._time is None else self._time.rows_of(by_rank)).sum(axis=3).astype(np.float64)
            balance, ranks = balancedness(load).mean(axis=0), load.sum(axis=(0, 1))
            activated = float((by_rank > 0).sum(axis=3).max(axis=2).mean())
            if rows.shape[2] == self.topology.num_ranks:
                traffic = rows.sum(axis=(0, 1)).reshape(*[placement.num_ranks] * 2, -1).sum(axis=2).astype(np.float64)
                off_node = self._off_node(traffic)
        return WindowScore(
            balance, ranks, off_node, traffic, activated, self._step(record, placement, placement.num_slots)
        )

    def score_served(self, record: LoadRecord, served: Served) -> WindowScore:
        """Returns the score of a window on what served it; where experts moved in it, the mean weighted by steps."""
        score = self.score(record, served.placement)
        if served.earlier is None:
            return score
        placement, share = served.earlier
        return _mean_score(self.score(record, placement), score, share)

    def perfect(self, record: LoadRecord, slots_per_rank: int) -> WindowScore:
        """Returns the score of perfect balance: every rank has the mean load of every layer."""
        num_layers, num_ranks = record.num_layers, self.topology.num_ranks
        step_s = self._step(record, None, slots_per_rank * num_ranks)
        ranks = np.full(num_ranks, record.tokens.sum() / num_ranks)
        return WindowScore(np.ones(num_layers), ranks, step_s=step_s)

    def tokens_per_step(self, record: LoadRecord) -> float:
        """Returns the tokens of a step with tokens, over all ranks; the layers agree on it up to dropped tokens."""
        assert self.topk is not None
        return float(record.tokens.sum(axis=1).max(initial=0)) / self.topk / max(record.busy_steps, 1)

    def _step(self, record: LoadRecord, placement: Placement | None, num_slots: int) -> float | None:
        if self.costs is None or not record.busy_steps or not self.topk:
            return None
        per_step = self.tokens_per_step(record)
        tokens, is_mean = self.costs.batch_of(record, per_step)
        split: Callable[[Floats], Floats] | None = None
        if placement is not None and self.split not in ("window", "nearest"):  # which needs the sources
            split = partial(self._splitter_of(placement).split_batch, record)
        if placement is None and self.split == "time":  # at best, each expert with tokens is read once
            ranks = self.topology.num_ranks
            num_slots, is_mean = ranks * ceil(max(float((tokens > 0).sum(axis=1).mean()), 1) / ranks), False
        is_mean = is_mean and split is None
        return self.costs.step_seconds(tokens, placement, num_slots, per_step, record.phase, is_mean, split)

    def _splitter_of(self, placement: Placement) -> "StepSplitter":
        if self._splitter is None or self._splitter.placement is not placement:
            time = None if self.costs is None else self.costs.expert_time
            self._splitter = StepSplitter(self.split, placement, self.topology, self.even_steps, time)
        return self._splitter

    def _activated(self, record: LoadRecord, placement: Placement) -> float | None:
        active = record.active_steps()
        if active is None or not record.busy_steps:
            return None
        slots = slot_load(active * placement.replica_count, placement)  # slot_load divides by the replicas again
        by_rank = slots.reshape(placement.num_layers, placement.num_ranks, -1).sum(axis=2)
        return float(by_rank.max(axis=1).mean()) / record.busy_steps

    def _traffic(self, record: LoadRecord, placement: Placement) -> tuple[float | None, Floats | None]:
        if record.by_source is None:
            return None, None
        traffic = rank_traffic(record.by_source, placement)
        return self._off_node(traffic), traffic

    def _off_node(self, traffic: Floats) -> float:
        """Returns the share of routes [R, R] that leave their node."""
        nodes, total = self.topology.num_nodes, traffic.sum()
        by_node = traffic.reshape(nodes, -1, nodes, self.topology.ranks_per_node).sum(axis=(1, 3))
        return float(1 - np.trace(by_node) / total) if total else 0.0


def _mean_score(first: WindowScore, last: WindowScore, share: float) -> WindowScore:
    """Returns the mean of two scores of one window; share: weight of the first."""
    mean: dict[str, Any] = {}
    for name in ("balancedness", "ranks", "off_node", "traffic", "activated", "step_s"):
        one, other = getattr(first, name), getattr(last, name)
        mean[name] = None if one is None or other is None else share * one + (1 - share) * other
    return WindowScore(**mean)


class StepSplitter:
    """Splits every single step of a window over the replicas of one placement, as a server does batch by batch."""

    def __init__(
        self,
        split: str,
        placement: Placement,
        topology: Topology,
        even_steps: EvenSteps = NO_STEPS,
        time: ExpertTime | None = None,
    ) -> None:
        """split: of `make_split`

        even_steps: those that "exact" or "time" splits evenly
        time:       for "time", where even_steps does not know the server's own
        """
        from moe_serve.eplb.split.make import SEARCHED_SPLITS, make_splits
        from moe_serve.eplb.split.policy import find_library

        self.split, self.placement = split, placement
        self._even_steps = even_steps if split in SEARCHED_SPLITS else NO_STEPS
        self._layers = make_splits(split, placement, topology, find_library(), self._even_steps.time or time)
        self._even_layers = make_splits("even", placement, topology, find_library()) if self._even_steps.steps else []

    def split_batch(self, record: LoadRecord, tokens: Floats) -> Floats:
        """Returns the rows of each slot [L, P] where a batch of this window has these tokens of all ranks, [L, E]."""
        layers, whole = self._layers_at(record.first_step, record.phase), np.rint(tokens).astype(np.int64)
        return np.array([layer.split(counts) for layer, counts in zip(layers, whole, strict=True)], dtype=np.float64)

    def slot_rows(self, record: LoadRecord) -> NDArray[np.int64]:
        """Returns the rows that each source sends to each slot in every step: [steps, L, S, P].

        S: source ranks, where the window is one step and its sources are known: then this is the server's own split;
        else 1
        Raises TraceError when the record does not hold single steps, or lacks the sources that the split needs.
        """
        if record.num_steps == 1 and record.by_source is not None:
            steps = record.by_source[None]
        elif self.split == "nearest":
            raise TraceError(
                f"the window of step {record.first_step} lacks what the nearest split needs: one step, with its tokens "
                "by source rank (by_source); record that, draw it (--window 1 --sources), or use --split window"
            )
        elif record.per_step is not None:
            steps = record.per_step
        elif record.num_steps == 1:
            steps = record.tokens[None]
        else:
            raise TraceError(
                f"the window of step {record.first_step} sums {record.num_steps} steps, and a split per batch works on "
                f"single ones; record per_step, draw windows of one step (--window 1), or use --split window"
            )
        rows = []
        for number, step in enumerate(steps):
            layers = self._layers_at(record.first_step + number, record.phase)
            rows.append([np.atleast_2d(layer.split(counts)) for layer, counts in zip(layers, step, strict=True)])
        return np.array(rows)

    def _layers_at(self, step: int, phase: str) -> list[SplitPolicy]:
        return self._even_layers if (step, phase) in self._even_steps else self._layers


class _ResultRows:
    """Collects what a policy did and how it served, window by window."""

    def __init__(self, name: str):
        self._name = name
        self._rows: dict[str, list[np.ndarray | float]] = {}
        self._traffic: np.ndarray | None = None
        self._received: np.ndarray | None = None
        self._unkept: dict[tuple[str, str], list[Unkept]] = {}

    def add(self, served: Served, score: WindowScore, costs: ProfileCosts | None) -> None:
        for unkept in served.unkept:
            self._unkept.setdefault((unkept.rule, unkept.because), []).append(unkept)
        unknown = np.full(len(score.balancedness), np.nan)
        moved = served.moved
        if self._received is None:
            self._received = np.zeros_like(served.placement.replica_count, dtype=np.int64)
        if moved is not None:
            self._received += moved.by_expert
        stall = 0.0
        if moved is not None and moved.num_moves and served.stall_s is None:
            stall = costs.stall_seconds(moved) if costs else np.nan
        row: dict[str, np.ndarray | float] = {
            "served": score.balancedness,
            "fit": unknown if served.fit is None else served.fit,
            "bound": unknown if served.bound is None else served.bound,
            "rank_load": score.ranks,
            "moves": moved.num_moves if moved else 0,
            "moves_off_node": int(moved.off_node.sum()) if moved else 0,
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

    def result(self, decisions: tuple[Decision, ...], final: Placement | None) -> PolicyResult:
        whole = {"moves", "moves_off_node", "num_rounds"}
        arrays = {
            name: np.array(values, dtype=np.int64 if name in whole else None) for name, values in self._rows.items()
        }
        traffic = np.full((1, 1), np.nan) if self._traffic is None else self._traffic
        assert self._received is not None  # a result has at least one window
        arrays |= {"traffic": traffic, "received": self._received}
        unkept = tuple(self._said(plans) for plans in self._unkept.values())
        return PolicyResult(self._name, **arrays, final=final, decisions=decisions, unkept=unkept)

    def _said(self, plans: list[Unkept]) -> str:
        """Returns the sentence about a rule that some plans did not keep."""
        worst = max(plans, key=lambda one: one.reached)
        return (
            f"{self._name} does not keep {worst.rule} in {len(plans)} plan{'s' * (len(plans) != 1)} (up to "
            f"{worst.reached:.4g} in a layer): {worst.because}."
        )


def with_redundancy_curve(
    report: ReplayReport, trace: LoadTrace, topology: Topology, rules: PlanRules | None = None
) -> ReplayReport:
    """Returns the report with the redundancy curve of its trace, from the fewest slots to twice as many."""
    slots = curve_slots(trace.num_logical, topology.num_ranks, report.num_slots)
    stretches = cut_stretches(trace, _CURVE_PAIRS, 1)
    return replace(report, redundancy=redundancy_curve(stretches, topology, slots, rules or PlanRules()))


def redundancy_curve(
    stretches: Sequence[Sequence[LoadRecord]], topology: Topology, slots: Iterable[int], rules: PlanRules
) -> tuple[tuple[int, float, float], ...]:
    """Returns (slots, mean, worst) for each number of slots, ascending: balancedness over layers, as *served*.

    stretches: neighbouring windows; each but the first of a stretch is served by a plan made from the one before
    """
    # Without annealing: a curve needs many good plans rather than one optimal plan.
    policy = make_policy("refined", rounds=0)
    pairs = [pair for stretch in stretches for pair in pairwise(stretch)]
    rows = []
    for num_slots in sorted(set(slots)):
        served = [
            balancedness(rank_load(after.tokens, plan.placement))
            for before, after in pairs
            for plan in [policy.plan(rules.request(before.tokens, topology, num_slots))]
        ]
        by_layer = np.mean(served, axis=0)
        rows.append((num_slots, float(by_layer.mean()), float(by_layer.min())))
    return tuple(rows)


def curve_slots(num_logical: int, num_ranks: int, in_use: int) -> list[int]:
    """Returns the numbers of slots to try, ascending; the number in use is one of them."""
    least = -(-num_logical // num_ranks)
    most = max(2 * least, least + 2, in_use // num_ranks)
    step = max(1, round((most - least) / (_POINTS - 1)))
    return sorted({per_rank * num_ranks for per_rank in range(least, most + 1, step)} | {in_use})
