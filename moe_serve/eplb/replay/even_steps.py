"""Which steps a server split evenly by its own choice, because the exact split did not pay in their phase.

A trace holds the choice as events, {"event": "split_changed", "step", "phases"}: from this step on, batches of these
phases are split evenly, others exactly. A server with the exact split writes one when it begins and one at each change.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.eplb.load import PHASES
from moe_serve.errors import TraceError

SPLIT_CHANGED = "split_changed"  # the event


@dataclass(frozen=True)
class EvenSteps:
    """Steps that are split evenly where the exact split is asked for. Without changes: none.

    steps:  of the changes, ascending
    phases: of each change, those that are split evenly from that step on
    """

    steps: tuple[int, ...] = ()
    phases: tuple[frozenset[str], ...] = ()

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> "EvenSteps":
        """Returns the steps that the events of a trace name. Raises TraceError for a change without step or phases."""
        changes: dict[int, frozenset[str]] = {}
        for event in events:
            if event.get("event") != SPLIT_CHANGED:
                continue
            step, phases = event.get("step"), event.get("phases")
            if not isinstance(step, int) or not isinstance(phases, list) or not all(name in PHASES for name in phases):
                raise TraceError(
                    f"event {SPLIT_CHANGED} has step {step!r} and phases {phases!r}; expected a whole number and names "
                    f"among {', '.join(PHASES)}"
                )
            changes[step] = frozenset(phases)
        steps = sorted(changes)
        return cls(tuple(steps), tuple(changes[step] for step in steps))

    def __contains__(self, step_and_phase: tuple[int, str]) -> bool:
        step, phase = step_and_phase
        index = bisect_right(self.steps, step) - 1
        return index >= 0 and phase in self.phases[index]


NO_STEPS = EvenSteps()
