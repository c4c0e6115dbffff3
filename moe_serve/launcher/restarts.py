"""How often lost ranks are started again, and the report when that is over. Torch-free."""

import time
from collections import deque
from collections.abc import Callable

from moe_serve.config import LauncherConfig


class Restarts:
    """Counts losses, of one rank or of all: after `max_restarts` restarts within the window, the next loss is the end.

    what:  processes, for the report
    clock: seconds, in which the window is measured
    """

    def __init__(
        self, config: LauncherConfig, what: str = "the ranks were", clock: Callable[[], float] = time.monotonic
    ):
        self._what = what
        self._config = config
        self._clock = clock
        self._losses: deque[tuple[float, str, str]] = deque(maxlen=config.max_restarts + 1)  # (seconds, at, reason)

    def note_loss(self, reason: str) -> bool:
        """Notes that a rank, or all, were lost; returns whether they are to be started again."""
        now_s = self._clock()
        self._losses.append((now_s, time.strftime("%H:%M:%S"), reason))
        return self.num_recent <= self._config.max_restarts

    @property
    def is_one_left(self) -> bool:
        """Whether another loss within the window is followed by a restart."""
        return self.num_recent < self._config.max_restarts

    @property
    def num_recent(self) -> int:
        """The losses within the window."""
        since_s = self._clock() - self._config.restart_window_s
        return sum(at_s >= since_s for at_s, _, _ in self._losses)

    def describe(self) -> str:
        """Returns which restart this is."""
        return f"restart {self.num_recent} of {self._config.max_restarts} within {self._config.restart_window_s:g} s"

    def report(self) -> list[str]:
        """Returns the lines that say what was lost when, and what to do."""
        if not self._config.max_restarts:
            return [f"launcher.max_restarts is 0: {self._what.removesuffix(' were')} are not started again"]
        lines = [f"{self._what} lost {self.num_recent} times within {self._config.restart_window_s:g} s:"]
        lines += [f"  {at}  {reason}" for _, at, reason in self._losses]
        lines.append("correct the cause and start again, or raise launcher.max_restarts")
        return lines
