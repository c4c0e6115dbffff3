"""How long the steps of a rank took, by phase and by part of a step."""

from array import array
from bisect import bisect_left

from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, PhaseTimes
from moe_serve.engine.step import PHASES
from moe_serve.kernels.part_clock import BETWEEN, EXCHANGE, PARTS, PartClock

_IDLE = "idle"  # as in a plan; kept, and not reported


class StepTimes:
    """Totals since the start. A step lasts from the exchange to its end; voided and idle ones do not count.

    Parts are added up where one phase follows another, not in each step: a step of a small model takes 0.3 ms.

    clock:     of the parts; its turns during a step are the caller's
    has_parts: False: nothing is said of parts
    """

    def __init__(self, clock: PartClock, has_parts: bool):
        self._clock = clock
        self._has_parts = has_parts
        self._is_in_step = False
        self._began_ns = 0
        self._before_ns = self._since_ns = clock.sums_ns()  # at the begin of the step, of the run of its phase
        self._phase = _IDLE
        self._seconds = dict.fromkeys((*PHASES, _IDLE), 0.0)
        self._buckets = {phase: [0] * (len(STEP_BOUNDS_S) + 1) for phase in (*PHASES, _IDLE)}
        self._parts_ns = {phase: [0] * len(PARTS) for phase in (*PHASES, _IDLE)}

    def begin(self) -> int:
        """Begins a step, with its exchange. Returns when, in ns."""
        began_ns = self._began_ns = self._clock.turn(EXCHANGE)
        sums_ns = self._clock.sums_ns()
        if self._is_in_step:  # the step before was void
            self._add_parts(self._before_ns)
            self._since_ns = sums_ns
        self._before_ns, self._is_in_step = sums_ns, True
        return began_ns

    def end(self, phase: str) -> int:
        """Ends a step and counts it, unless nobody had rows; returns when, in ns. phase: of its plan"""
        ended_ns = self._clock.turn(BETWEEN)
        self._is_in_step = False
        if phase != self._phase:
            self._add_parts(self._before_ns)
            self._phase = phase
        step_s = (ended_ns - self._began_ns) / 1e9
        self._seconds[phase] += step_s
        self._buckets[phase][bisect_left(STEP_BOUNDS_S, step_s)] += 1
        return ended_ns

    def report(self) -> dict[str, PhaseTimes]:
        """Returns the totals by phase, between two steps; a phase without steps is left out."""
        self._add_parts(self._before_ns if self._is_in_step else self._clock.sums_ns())
        return {
            phase: PhaseTimes(self._seconds[phase], list(self._buckets[phase]), self._parts(phase))
            for phase in PHASES
            if any(self._buckets[phase])
        }

    def _add_parts(self, until_ns: "array[int]") -> None:
        """Adds the parts of all steps of the present phase up to these sums."""
        totals = zip(self._parts_ns[self._phase], until_ns, self._since_ns, strict=True)
        self._parts_ns[self._phase] = [total + now - then for total, now, then in totals]
        self._since_ns = until_ns

    def _parts(self, phase: str) -> dict[str, float]:
        if not self._has_parts:
            return {}
        totals = zip(PARTS, self._parts_ns[phase], strict=True)
        return {name: total / 1e9 for name, total in totals if name != PARTS[BETWEEN]}
