"""When lost processes are restarted: how often and how soon, and which lost ranks are replaced beside the others.

Time is an argument, or a clock. Nothing is started here.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.config import LauncherConfig, ServeConfig
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher.local import Death

_FIRST_PAUSE_S = 5.0
_MOST_PAUSE_S = 60.0


def pause_s(num_failed: int) -> float:
    """Returns how long to wait before the next start, after so many in a row that failed.

    A process that had served is restarted at once. A start that fails for want of memory, say, may succeed a little
    later: the restarts that are left should not be used up within seconds.
    """
    return min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (num_failed - 1)) if num_failed else 0.0


def in_a_while(seconds: float) -> str:
    """Returns when that is, to be put behind "again"."""
    return f" in {seconds:g} s" if seconds else ""


def left_out(who: str, code: int) -> str:
    """Returns the end of a line that says why a process is not restarted. code: with which it exited"""
    why = "a setting must be corrected first" if code == 2 else "it was lost too often"
    return f"{who} is not started again: {why}; the others serve on"


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
        self._num_failed = 0  # starts in a row

    @property
    def pause_s(self) -> float:
        """How long to wait before the restart that follows the last loss."""
        return pause_s(self._num_failed)

    def note_loss(self, reason: str, had_served: bool = True) -> bool:
        """Notes that a rank, or all, were lost; returns whether they are to be restarted.

        had_served: False: their start failed
        """
        self._num_failed = 0 if had_served else self._num_failed + 1
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


@dataclass
class _Failed:
    """Starts of a rank that failed, in a row. reason: of the last one"""

    number: int
    reason: str


class Replacements:
    """The lost ranks of one launch, and the processes that replace them.

    A rank is replaced once its process has ended and the others have reported that they go on without it, or wait for
    it. It is back when they report that it takes part, for which it has `server.attach_deadline_s`. Its new process may
    end before that, or be late. Where the others serve on, another start follows after a pause, which grows; where they
    wait, all ranks are restarted.

    restarts:    counts the replacements, beside the restarts of all ranks
    others_wait: whether the other ranks compute nothing until the lost one is back
    """

    def __init__(self, config: ServeConfig, restarts: Restarts):
        self._restarts = restarts
        self._num_ranks = config.parallel.num_ranks
        self._deadline_s = config.server.attach_deadline_s
        self._group_epoch = 0
        self._masked: set[int] = set()
        self._ended: dict[int, tuple[Death, float]] = {}  # not yet replaced; not before that time
        self._started_s: dict[int, float] = {}
        self._failed: dict[int, _Failed] = {}
        self.others_wait = False

    def regrouped(self, message: Members) -> bool:
        """Notes which ranks take part; returns False for old news: several front ends may pass it on."""
        if message.group_epoch <= self._group_epoch:
            return False
        self._group_epoch, self.others_wait = message.group_epoch, message.waits
        self._masked = set(range(self._num_ranks)) - set(message.members)
        for rank in {*self._started_s, *self._failed} - self._masked:
            self._started_s.pop(rank, None)
            self._failed.pop(rank, None)
        return True

    def ended(self, death: Death, now_s: float) -> str | None:
        """Notes that a rank's process has ended; returns a line about it where it was a replacement."""
        if self._started_s.pop(death.rank, None) is None:
            self._ended[death.rank] = death, now_s
            return None
        failed = self._failed.setdefault(death.rank, _Failed(0, ""))
        failed.number, failed.reason = failed.number + 1, f"{death} before it took part again"
        wait_s = 0.0 if death.code == 2 else pause_s(failed.number)
        self._ended[death.rank] = death, now_s + wait_s
        return f"{failed.reason}; the next start is due{in_a_while(wait_s) or ' now'}"

    def due(self, now_s: float) -> list[Death]:
        """Returns the ends of the ranks to be replaced now, each once."""
        ranks = [rank for rank in sorted(self._masked & set(self._ended)) if self._ended[rank][1] <= now_s]
        return [self._ended.pop(rank)[0] for rank in ranks]

    def may_replace(self, death: Death) -> bool:
        """Returns whether a rank that is due is replaced, which counts as a restart: not for a wrong setting."""
        if death.code == 2 or not self._restarts.is_one_left:
            return False
        self._restarts.note_loss(str(death))
        return True

    def started(self, rank: int, now_s: float) -> None:
        """Notes that a replacement has been started."""
        self._started_s[rank] = now_s

    def late(self, now_s: float) -> dict[int, str]:
        """Returns the ranks whose replacements are late, and a line about each."""
        said = f"was restarted alone and did not take part within server.attach_deadline_s = {self._deadline_s:g} s"
        late = [rank for rank, started_s in self._started_s.items() if now_s - started_s > self._deadline_s]
        return {rank: f"rank {rank} {said}" for rank in late}

    def failed(self, now_s: float) -> str | None:
        """Returns why all ranks must be restarted: the others wait for one whose replacement failed. Else None."""
        if not self.others_wait:
            return None
        reasons = [each.reason for each in self._failed.values()] + list(self.late(now_s).values())
        return reasons[0] if reasons else None
