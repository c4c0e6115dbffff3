"""How often and how soon lost processes are started again, and the report when that is over. Torch-free."""

import time
from collections import deque
from collections.abc import Callable

from moe_serve.config import LauncherConfig

_FIRST_PAUSE_S = 5.0
_MOST_PAUSE_S = 60.0


def pause_s(num_in_vain: int) -> float:
    """Returns how long to wait before the next start, after so many in a row that came to nothing.

    What served is started again at once. A start that fails for want of memory, say, may succeed a little later: the
    restarts that are left should not be used up within seconds.
    """
    return min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (num_in_vain - 1)) if num_in_vain else 0.0


def in_a_while(seconds: float) -> str:
    """Returns when that is, to be put behind "again"."""
    return f" in {seconds:g} s" if seconds else ""


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
        self._num_in_vain = 0  # starts in a row

    @property
    def pause_s(self) -> float:
        """How long to wait before the restart that follows the last loss."""
        return pause_s(self._num_in_vain)

    def note_loss(self, reason: str, had_served: bool = True) -> bool:
        """Notes that a rank, or all, were lost; returns whether they are to be started again.

        had_served: False: their start came to nothing
        """
        self._num_in_vain = 0 if had_served else self._num_in_vain + 1
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
