"""Replays a load trace through balancers: what would each have done, and how well would it have served?

Every policy plans on the past and is scored on the next window, which it has not seen. "do nothing" (the placement at
the start, kept) and "perfect" (every rank has the mean load) are always included as floor and ceiling. Windows pass one
at a time, so a trace may be larger than memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlacementPolicy
from moe_serve.eplb.replay.conditions import conditions, missing
from moe_serve.eplb.replay.make_run import make_run
from moe_serve.eplb.replay.parallel import Task, run_in_parallel, usable_jobs
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport
from moe_serve.eplb.replay.rows import ResultRows
from moe_serve.eplb.replay.run import Run, Served, StaticRun
from moe_serve.eplb.replay.score import Scorer
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import TraceError


def replay(
    trace: LoadTrace,
    policies: Sequence[str | PlacementPolicy],
    settings: ReplaySettings,
    progress: Callable[[int], None] | None = None,
    jobs: int = 1,
) -> ReplayReport:
    """Returns the report of all policies on a trace.

    policies: as in `make_run`
    progress: called with the number of windows done, of `num_passes` times the windows of the trace
    jobs:     policies to replay at the same time, in processes of their own; the result is the same
    Raises TraceError when the trace has no window after the first plan, ConfigError for an unknown policy.
    """
    start = settings.start_of(trace)
    if settings.costs is not None:
        trace = settings.costs.of_model(trace)
    for policy in policies:
        make_run(policy, start, settings)  # refuse a wrong name now, not after the first pass
    jobs = usable_jobs(jobs, len(policies))
    tick = _Ticks(progress)
    if jobs <= 1:
        runs: list[Run] = [StaticRun(FLOOR, start), *(make_run(policy, start, settings) for policy in policies)]
        frame, results = _replay_pass(trace, runs, settings, start, lambda _: tick())
    else:
        frame, results = _replay_pass(trace, [StaticRun(FLOOR, start)], settings, start, lambda _: tick())
        tasks = [_task(policy, trace, settings, start) for policy in policies]
        results[1:1] = run_in_parallel(tasks, jobs, tick)
    return ReplayReport(
        conditions=conditions(trace, settings, frame.count),
        results=tuple(results),
        first_steps=np.array([step for step, _, _ in frame.windows], dtype=np.int64),
        num_steps=np.array([steps for _, steps, _ in frame.windows], dtype=np.int64),
        tokens=np.array([tokens for _, _, tokens in frame.windows], dtype=np.float64),
        load=frame.load,
        moe_layer_ids=trace.moe_layer_ids,
        num_slots=settings.num_slots,
        num_ranks=settings.topology.num_ranks,
        num_nodes=settings.topology.num_nodes,
        missing=missing(results[0], settings),
        expert_bytes=settings.costs.expert_bytes if settings.costs else None,
        utilisation=settings.costs.serving.utilisation if settings.costs else 1.0,
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
    """What all policies share. windows: (first step, steps, tokens) of the scored ones."""

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
    scorers = [Scorer(settings.topology, trace.topk, settings.costs, settings.split, settings.even_steps) for _ in runs]
    rows = [ResultRows(run.name) for run in runs]
    ceiling = ResultRows(CEILING)
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
            frame.windows.append((record.first_step, record.busy_steps, tokens))
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


def _task(policy: str | PlacementPolicy, trace: LoadTrace, settings: ReplaySettings, start: Placement) -> Task:
    def run(progress: Callable[[int], None]) -> PolicyResult:
        return _replay_pass(trace, [make_run(policy, start, settings)], settings, start, progress)[1][0]

    return run
