"""Other views of a trace: longer windows, counts alone, the windows of one phase, the load of each phase. All stream.

A record without tokens says nothing of a phase, whatever it is called, and counts for none.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import PHASES, DecodeCounts, LoadRecord, LoadTrace
from moe_serve.errors import ConfigError, TraceError


def folded(trace: LoadTrace, window_steps: int) -> LoadTrace:
    """Returns the trace with consecutive records summed until a window holds at least window_steps steps.

    Activations are kept where every record is a single step or has them; per_step is dropped. A shorter window at the
    end is kept. Windows never mix phases; records of idle steps belong to any.
    """
    if window_steps < 1:
        raise TraceError(f"window is {window_steps} steps; give a whole number of at least 1")

    def open_records() -> Iterator[LoadRecord]:
        pending: list[LoadRecord] = []
        for record in trace:
            if pending and pending[0].phase != record.phase and not (_is_idle(pending[0]) or _is_idle(record)):
                yield _merged(pending)
                pending = []
            # Reduce at once: a long record would keep its large optional parts in memory until the window closes.
            pending = [_merged([*pending, record])]
            if pending[0].num_steps >= window_steps:
                yield pending.pop()
        if pending:
            yield _merged(pending)

    return replace(trace, open_records=open_records, num_records=None)


def cut_stretches(trace: LoadTrace, num_windows: int, length: int) -> list[list[LoadRecord]]:
    """Returns stretches of length + 1 neighbouring records, evenly over the trace, in memory.

    The first record of each is to plan from, the others, about num_windows in all, are to be served. A trace of at most
    num_windows + 1 records, or of too few for two stretches, is one stretch.
    """
    total = trace.num_records if trace.num_records is not None else sum(1 for _ in trace)
    size = length + 1
    count = min(max(num_windows // length, 1), total // size)
    starts = [0]
    if count < 2 or total <= num_windows + 1:
        size = min(total, num_windows + 1)
    else:
        starts = np.linspace(0, total - size, count).round().astype(int).tolist()
    stretches: list[list[LoadRecord]] = [[] for _ in starts]
    for index, record in enumerate(trace):
        if index >= starts[-1] + size:
            break
        for stretch, start in zip(stretches, starts, strict=True):
            if start <= index < start + size:
                stretch.append(record)
    return stretches


def _is_idle(record: LoadRecord) -> bool:
    return record.step_time_s is None and not record.tokens.any()


def _merged(records: list[LoadRecord]) -> LoadRecord:
    first = records[0]
    busy = [record for record in records if not _is_idle(record)] or records
    active = [part for part in (record.active_steps() for record in records) if part is not None]
    sources = [record.by_source for record in records]
    known = [part for part in sources if part is not None]
    times = [(record.step_time_s, record.busy_steps) for record in busy]
    timed_steps = sum(record.busy_steps for record in busy)
    decodes = [record.decodes for record in records if record.decodes is not None]
    counts_forwards = any(record.num_forwards is not None for record in records)
    return replace(
        first,
        num_steps=sum(record.num_steps for record in records),
        phase=busy[0].phase,
        tokens=np.sum([record.tokens for record in records], axis=0),
        per_step=None,
        activations=np.sum(active, axis=0) if len(active) == len(records) else None,
        by_source=np.sum(known, axis=0) if len(known) == len(sources) else None,
        num_forwards=sum(record.busy_steps for record in records) if counts_forwards else None,
        decodes=_sum_of(decodes) if len(decodes) == len(records) else None,
        step_time_s=None
        if any(t is None for t, _ in times) or not timed_steps
        else sum((t or 0) * n for t, n in times) / timed_steps,
    )


def _sum_of(decodes: list[DecodeCounts]) -> DecodeCounts:
    return DecodeCounts.of(map(sum, zip(*(each.numbers for each in decodes), strict=True)))


def without_details(trace: LoadTrace) -> LoadTrace:
    """Returns the trace with the counts of its records only."""

    def open_records() -> Iterator[LoadRecord]:
        for record in trace:
            yield LoadRecord(record.first_step, record.num_steps, record.phase, record.tokens, model_id=record.model_id)

    return replace(trace, open_records=open_records)


@dataclass(frozen=True, eq=False)
class PhaseLoad:
    """The windows of one phase, those with tokens.

    tokens:  [L, E] of all of them
    steps:   that ran a forward, as far as the records tell
    seconds: these took; None where a record does not tell
    """

    phase: str
    tokens: NDArray[np.int64]
    num_windows: int
    steps: int
    seconds: float | None


def of_phase(trace: LoadTrace, phase: str) -> LoadTrace:
    """Returns the trace with the records of one phase, those with tokens.

    Iterating it raises TraceError where there is none; the message names the phases that the trace has. Raises
    ConfigError for a phase that is none of PHASES.
    """
    if phase not in PHASES:
        raise ConfigError(f"phase is {phase!r}; give one of {', '.join(PHASES)}")

    def open_records() -> Iterator[LoadRecord]:
        seen: Counter[str] = Counter()
        for record in trace:
            if not record.tokens.any():
                continue
            seen[record.phase] += 1
            if record.phase == phase:
                yield record
        if not seen[phase]:
            raise TraceError(
                f"{trace.source or 'the trace'} has no {phase} windows with tokens, but {_words(seen)}; choose a phase "
                "that it has"
            )

    words = f"{trace.source or 'trace'}, {phase} windows"
    return replace(trace, open_records=open_records, source=words, num_records=None)


def load_by_phase(trace: LoadTrace, last: int = 0) -> tuple[PhaseLoad, ...]:
    """Returns the load of each phase of the last windows with tokens (0: of all), in the order of PHASES.

    Raises TraceError where these are of fewer than two phases.
    """
    # The last windows are kept in memory, so without the optional parts of a record, which may be large.
    windows: Iterable[PhaseLoad] = (_window(record) for record in trace if record.tokens.any())
    loads: dict[str, PhaseLoad] = {}
    for window in deque(windows, maxlen=last) if last else windows:
        loads[window.phase] = _added(loads[window.phase], window) if window.phase in loads else window
    if len(loads) < 2:
        seen = Counter({name: load.num_windows for name, load in loads.items()})
        raise TraceError(
            f"{trace.source or 'the trace'} has {_words(seen)}, and a plan by phase needs windows of two phases; plan "
            "without --by-phase"
        )
    return tuple(loads[phase] for phase in PHASES if phase in loads)


def phase_weights(loads: tuple[PhaseLoad, ...]) -> tuple[float, ...]:
    """Returns the share of each phase in the time of all steps; in their number, where a time is not known."""
    seconds = [load.seconds for load in loads if load.seconds is not None]
    timed = len(seconds) == len(loads) and any(seconds)
    amounts = seconds if timed else [float(load.steps) for load in loads]
    whole = sum(amounts)
    return tuple(amount / whole if whole else 1 / len(loads) for amount in amounts)


def _window(record: LoadRecord) -> PhaseLoad:
    seconds = None if record.step_time_s is None else record.step_time_s * record.busy_steps
    return PhaseLoad(record.phase, record.tokens, 1, record.busy_steps, seconds)


def _added(one: PhaseLoad, other: PhaseLoad) -> PhaseLoad:
    return PhaseLoad(
        one.phase,
        one.tokens + other.tokens,
        one.num_windows + other.num_windows,
        one.steps + other.steps,
        None if one.seconds is None or other.seconds is None else one.seconds + other.seconds,
    )


def _words(num_windows: Counter[str]) -> str:
    return " and ".join(f"{num_windows[name]} {name} windows" for name in PHASES if num_windows[name]) or "no windows"
