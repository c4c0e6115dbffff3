"""Traces with longer windows, or with counts alone. Both stream."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError


def folded(trace: LoadTrace, window_steps: int) -> LoadTrace:
    """Returns the trace with consecutive records summed until a window holds at least window_steps steps.

    Activations are kept where every record is a single step or has them; per_step is dropped. A shorter window at the
    end is kept. Windows never mix phases; records of idle steps belong to any.
    """
    if window_steps < 1:
        raise TraceError(f"window is {window_steps} steps; give a whole number of at least 1")
    return replace(trace, open_records=_Folding(trace, window_steps), num_records=None)


@dataclass(frozen=True)
class _Folding:
    trace: LoadTrace
    window_steps: int

    def __call__(self) -> Iterator[LoadRecord]:
        pending: list[LoadRecord] = []
        for record in self.trace:
            if pending and pending[0].phase != record.phase and not (_is_idle(pending[0]) or _is_idle(record)):
                yield _merged(pending)
                pending = []
            # Reduce at once: a long record would keep its large optional parts in memory until the window closes.
            pending = [_merged([*pending, record])]
            if pending[0].num_steps >= self.window_steps:
                yield pending.pop()
        if pending:
            yield _merged(pending)


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
        step_time_s=None
        if any(t is None for t, _ in times) or not timed_steps
        else sum((t or 0) * n for t, n in times) / timed_steps,
    )


def without_details(trace: LoadTrace) -> LoadTrace:
    """Returns the trace with the counts of its records only."""

    def open_records() -> Iterator[LoadRecord]:
        for record in trace:
            yield LoadRecord(record.first_step, record.num_steps, record.phase, record.tokens, model_id=record.model_id)

    return replace(trace, open_records=open_records)
