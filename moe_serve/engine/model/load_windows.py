"""The load records of one rank: their begin and end, their steps, the moment they are final, and their trace file.

A call of all ranks closes a record. The next exchange makes it final: a rank that completes the exchange knows that all
ranks have completed the call. If a rank is lost before that, all remaining ranks drop the record and its counts go into
the next one. So every token is in exactly one record, whichever rank writes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_serve.dispatch.membership import Membership
from moe_serve.engine.step.plan import StepPlan
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.eplb.files.trace_jsonl import RollingTrace
from moe_serve.eplb.load import DecodeCounts, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import TraceError
from moe_serve.log import get_logger

log = get_logger(__name__)
Listener = Callable[[LoadRecord], None]


@dataclass
class _Window:
    """The steps of one record. placement: at its beginning;  phases, num_forwards, forward_s: of steps with rows"""

    first_step: int
    placement: Placement
    phases: set[str] = field(default_factory=set)
    num_forwards: int = 0
    forward_s: float = 0.0

    def count(self, phase: str, seconds: float) -> None:
        self.phases.add(phase)
        self.num_forwards += 1
        self.forward_s += seconds

    def append(self, later: "_Window") -> None:
        """Goes on over the steps of a later window."""
        self.phases |= later.phases
        self.num_forwards += later.num_forwards
        self.forward_s += later.forward_s

    @property
    def phase(self) -> str:
        """The phase of all steps with rows; "mixed" where they differ, and where there is none."""
        return next(iter(self.phases)) if len(self.phases) == 1 else "mixed"

    @property
    def step_time_s(self) -> float | None:
        """Mean time of a step with rows, its tokens included; None where there is none."""
        return self.forward_s / self.num_forwards if self.num_forwards else None


class LoadWindows:
    """The record that is being counted, and those that are closed but not yet final.

    placement: where experts are now
    listeners: each is called with each record once it is final, in this order, on every rank at the same step
    at_end:    called after the last record, when the engine ends
    decodes:   returns the counts of decode steps of this rank since its start, as DecodeCounts.numbers; none: nobody
               counts them
    """

    def __init__(self, recorder: LoadRecorder | None, placement: Placement, model_id: str):
        """recorder: None: no load is recorded, so there are no records"""
        self._placement = placement
        self.listeners: list[Listener] = []
        self.at_end: list[Callable[[], None]] = []
        self.decodes: Callable[[], Sequence[int]] = tuple
        self._recorder = recorder
        self._model_id = model_id
        self._closed: list[tuple[_Window, LoadRecord]] = []
        self._window = _Window(0, placement)

    @property
    def placement(self) -> Placement:
        return self._placement

    @placement.setter
    def placement(self, placement: Placement) -> None:
        self._placement = placement
        if not self._window.num_forwards:
            self._window.placement = placement  # its record has no steps with another one

    def begin_step(self, plan: StepPlan) -> None:
        """Confirms the closed records, and closes the running one where the group changes. Collective in that case.

        Raises PeerError when a peer does not take part: the record goes on.
        """
        self.confirm()
        if plan.regrouped or plan.rejoining:
            self.close(plan.step)
        if plan.rejoining:
            self.confirm()  # a rank that could not close it does not regroup, so no rank rejoins now

    def end_step(self, plan: StepPlan, step_s: float) -> None:
        """Counts the step, and closes the record after it where the plan says so. Collective then; raises as above.

        step_s: seconds of its forward and its tokens: activating a round and reading experts do not count
        """
        if plan.runs_forward and self._recorder is not None:
            self._window.count(plan.phase, step_s)
        if plan.close_window:
            self.close(plan.step + 1)
        if plan.stop:
            self.confirm()
            for end in self.at_end:
                end()

    def close(self, step: int) -> None:
        """Closes the record, whose last step is the one before `step`. Collective; raises as `begin_step`."""
        if self._recorder is None:
            return
        window = self._window
        num_steps = step - window.first_step
        by_source, decodes = self._recorder.take(begins_anew=num_steps > 0, beside=self.decodes())
        if num_steps == 0:
            return  # this rank has just begun its record, and others close theirs
        record = LoadRecord(
            first_step=window.first_step,
            num_steps=num_steps,
            phase=window.phase,
            tokens=by_source.sum(1),
            by_source=by_source,
            step_time_s=window.step_time_s,
            num_forwards=window.num_forwards,
            model_id=self._model_id,
            placement_version=window.placement.version,
            placement=window.placement,
            decodes=DecodeCounts.of(decodes.sum(0).tolist()) if decodes.size else None,
        )
        self._closed.append((window, record))
        self._window = _Window(step, self.placement)

    def confirm(self) -> None:
        """Passes the closed records on: all ranks have completed them."""
        if self._recorder is None or not self._closed:
            return
        self._recorder.confirm()
        closed, self._closed = self._closed, []
        for _, record in closed:
            for listener in self.listeners:
                listener(record)

    def void(self) -> None:
        """Drops the records closed since `confirm`, whose counts LoadRecorder.void_step puts back into the next one."""
        if self._closed:
            later = [*(window for window, _ in self._closed[1:]), self._window]
            self._window = self._closed[0][0]
            for window in later:
                self._window.append(window)
            self._closed = []

    def begin_anew(self, rank: int) -> None:
        """A new process takes the place of a lost rank: it counts from 0 on."""
        if self._recorder is not None:
            self._recorder.begin_anew(rank)

    def rejoin(self, first_step: int) -> None:
        """Begins the record of a rank that rejoins at first_step, where the other ranks' record begins."""
        if self._recorder is not None:
            self._recorder.rejoin()
        self._closed = []  # closed with a group that has gone on without this rank
        self._window = _Window(first_step, self.placement)


class TraceWriter:
    """Appends records and events to a trace. When a write fails, the trace ends and serving continues.

    Every rank has a writer and hears of all records; the lowest rank that takes part writes, so that the trace
    continues when rank 0 is masked.
    """

    def __init__(self, trace: RollingTrace, rank: int, membership: Membership | None):
        """membership: None where no rank can be masked"""
        self._trace = trace
        self._rank = rank
        self._membership = membership
        self._group_epoch = 0
        self._next_step = 0  # after the last record, whichever rank has written it
        self._has_failed = False

    def add(self, record: LoadRecord) -> None:
        """Writes a record if this rank is the one that writes."""
        self._next_step = record.first_step
        self._write(lambda: self._trace.add(record))
        self._next_step = record.first_step + record.num_steps

    def rejoin(self, step: int) -> None:
        """Goes on at a step, because this rank has missed the records before."""
        self._next_step = step

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Writes an event of a step if this rank is the one that writes. fields: JSON values"""
        self._write(lambda: self._trace.event(name, step, **fields))

    def close(self) -> None:
        """Closes the file and gives up its lock; the next record opens it again."""
        self._trace.close()

    def _write(self, append: Callable[[], None]) -> None:
        membership = self._membership
        first, group_epoch = (0, 0) if membership is None else (membership.members[0], membership.epoch)
        if self._has_failed or first != self._rank:
            return
        try:
            if not self._trace.is_open or group_epoch != self._group_epoch:
                self._trace.open(self._next_step)
                self._group_epoch = group_epoch
            append()
        except (OSError, TraceError) as error:
            self._has_failed = True  # the last line may be incomplete, so nothing may follow it
            reason = error.strerror if isinstance(error, OSError) else error
            log.error("eplb.record_path: the trace %s ends here (%s); serving continues", self._trace.path, reason)
