"""Watches the phases of one rank from a separate thread: warns of a long phase, and writes the stacks of all threads.

Each rank watches itself. When a collective hangs, every rank of the launch logs its own phase and step, and then its
own stacks, so that the logs together show who waits for whom.
"""

import faulthandler
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.log import get_logger

log = get_logger(__name__)
_TICK_S = 0.25


@dataclass(frozen=True)
class WatchLimits:
    """Limits of one phase, in seconds.

    warn_s:    until the first warning, which is repeated at 4, 16, … times of it
    stack_s:   until the stacks are written
    give_up_s: until `Watchdog.give_up` is called; None: never
    """

    warn_s: float
    stack_s: float
    give_up_s: float | None = None


class Watchdog:
    """Knows the phase of its rank and when it began. Ends when nothing refers to it any more.

    who:     name for the log, such as "rank 3"
    detail:  returns more about a long phase; "" where nothing is known
    give_up: ends the process; called from the watching thread
    """

    def __init__(
        self,
        who: str,
        limits: WatchLimits,
        detail: Callable[[], str] = lambda: "",
        give_up: Callable[[str], None] = lambda text: None,
    ):
        self._who = who
        self._limits = limits
        self._detail = detail
        self._give_up = give_up
        self._phase: tuple[str, int] | None = None
        self._watched: tuple[str, int] | None = None
        self._ticks = 0
        self._next_warning_s = limits.warn_s
        self._wrote_stacks = False

    def start(self) -> None:
        """Starts to watch."""
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int = -1) -> None:
        """Begins a phase, or shows progress in it. step: -1 = of no step"""
        self._phase = (phase, step)  # a new object each time: by it the watching thread sees progress

    def leave(self) -> None:
        """Ends the phase: nothing is watched until the next one."""
        self._phase = None

    @property
    def phase(self) -> str:
        """The phase of a step, "" between steps. Safe to call from any thread."""
        now = self._phase
        return "" if now is None else now[0]

    def tick(self) -> None:
        """Checks the phase, every quarter of a second. Counts ticks, since a process that was stopped was not slow."""
        phase = self._phase
        if phase is None or phase is not self._watched:
            self._watched = phase
            self._ticks, self._next_warning_s, self._wrote_stacks = 0, self._limits.warn_s, False
            return
        self._ticks += 1
        lasted_s = self._ticks * _TICK_S
        limits = self._limits
        if lasted_s >= self._next_warning_s:
            self._next_warning_s *= 4
            log.warning("%s", self._describe(phase, lasted_s))
        if lasted_s >= limits.stack_s and not self._wrote_stacks:
            self._wrote_stacks = True
            log.error("%s; the stacks of its threads follow", self._describe(phase, lasted_s))
            faulthandler.dump_traceback()
        if limits.give_up_s is not None and lasted_s >= limits.give_up_s:
            self._give_up(self._describe(phase, lasted_s))

    def _describe(self, phase: tuple[str, int], lasted_s: float) -> str:
        name, step = phase
        where = f"{name} of step {step}" if step >= 0 else f"the phase '{name}' of the start"
        detail = self._detail()
        return f"{self._who} has been in {where} for {lasted_s:.0f} s" + (f": {detail}" if detail else "")


def _watch(reference: "weakref.ref[Watchdog]") -> None:
    while True:
        time.sleep(_TICK_S)
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.tick()
        del watchdog
