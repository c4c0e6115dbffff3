"""How long the steps of a rank took, by phase and by part of a step."""

from array import array
from bisect import bisect_left

from moe_serve.engine.messages import STEP_BOUNDS_S, PhaseTimes
from moe_serve.engine.step import PHASES
from moe_serve.kernels.part_clock import BETWEEN, EXCHANGE, PARTS, PartClock


class StepTimes:
    """Totals since the start. A step lasts from the exchange to its end; voided and idle ones do not count.

    clock:     of the parts; its turns during a step are the caller's
    has_parts: False: nothing is said of parts
    """

    def __init__(self, clock: PartClock, has_parts: bool):
        self._clock = clock
        self._has_parts = has_parts
        self._began_ns = 0
        self._sums_ns = clock.sums_ns()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._buckets = {phase: [0] * (len(STEP_BOUNDS_S) + 1) for phase in PHASES}
        self._parts_ns = {phase: [0] * len(PARTS) for phase in PHASES}

    def begin(self) -> int:
        """Begins a step, with its exchange. Returns when, in ns."""
        self._began_ns = self._clock.turn(EXCHANGE)
        self._sums_ns = self._clock.sums_ns()
        return self._began_ns

    def end(self, phase: str) -> int:
        """Ends a step and counts it, unless nobody had rows; returns when, in ns. phase: of its plan"""
        ended_ns = self._clock.turn(BETWEEN)
        if phase not in PHASES:
            return ended_ns
        step_s = (ended_ns - self._began_ns) / 1e9
        self._seconds[phase] += step_s
        self._buckets[phase][bisect_left(STEP_BOUNDS_S, step_s)] += 1
        before: array[int] = self._sums_ns
        self._parts_ns[phase] = [
            total + now - then
            for total, now, then in zip(self._parts_ns[phase], self._clock.sums_ns(), before, strict=True)
        ]
        return ended_ns

    def report(self) -> dict[str, PhaseTimes]:
        """Returns the totals by phase; a phase without steps is left out."""
        return {
            phase: PhaseTimes(self._seconds[phase], self._buckets[phase], self._parts(phase))
            for phase in PHASES
            if any(self._buckets[phase])
        }

    def _parts(self, phase: str) -> dict[str, float]:
        if not self._has_parts:
            return {}
        totals = zip(PARTS, self._parts_ns[phase], strict=True)
        return {name: total / 1e9 for name, total in totals if name != PARTS[BETWEEN]}
