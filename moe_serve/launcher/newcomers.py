"""Which lost ranks are started anew alone, beside the others, and when. Pure: time is an argument. Torch-free.

A rank is started anew once its process has ended and the others have reported that they go on without it, or wait for
it. It is back when they report that it takes part. Its new process may end before that, or be too late. Where the
others serve on, it is tried again after a pause, which grows; where they wait for it, all ranks are started again.
"""

from dataclasses import dataclass

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher.local import Death
from moe_serve.launcher.restarts import in_a_while, pause_s


@dataclass
class _InVain:
    """Starts of a rank that came to nothing, in a row. reason: of the last one"""

    number: int
    reason: str


def left_out(death: Death) -> str:
    """Returns the line that says why a rank is not started anew, where the others serve on."""
    why = "a setting must be corrected first" if death.code == 2 else "it was lost too often"
    return f"rank {death.rank} is not started again: {why}; the others serve on"


class Newcomers:
    """The lost ranks of one launch.

    A rank may take `server.attach_deadline_s` from its new start until it takes part.

    others_wait: whether the other ranks compute nothing until it is back
    """

    def __init__(self, config: ServeConfig):
        self._num_ranks = config.parallel.num_ranks
        self._deadline_s = config.server.attach_deadline_s
        self._group_epoch = 0
        self._masked: set[int] = set()
        self._ended: dict[int, tuple[Death, float]] = {}  # not yet started anew; not before that time
        self._started_s: dict[int, float] = {}
        self._in_vain: dict[int, _InVain] = {}
        self.others_wait = False

    def regrouped(self, message: Members) -> bool:
        """Notes which ranks take part; returns whether that is news: several front ends may pass it on."""
        if message.group_epoch <= self._group_epoch:
            return False
        self._group_epoch, self.others_wait = message.group_epoch, message.waits
        self._masked = set(range(self._num_ranks)) - set(message.members)
        for rank in {*self._started_s, *self._in_vain} - self._masked:
            self._started_s.pop(rank, None)
            self._in_vain.pop(rank, None)
        return True

    def ended(self, death: Death, now_s: float) -> str | None:
        """Notes that a rank's process has ended; returns what there is to say where it was a new one."""
        if self._started_s.pop(death.rank, None) is None:
            self._ended[death.rank] = death, now_s
            return None
        failed = self._in_vain.setdefault(death.rank, _InVain(0, ""))
        failed.number, failed.reason = failed.number + 1, f"{death} before it took part again"
        wait_s = 0.0 if death.code == 2 else pause_s(failed.number)
        self._ended[death.rank] = death, now_s + wait_s
        return f"{failed.reason}; the next start is due{in_a_while(wait_s) or ' now'}"

    def due(self, now_s: float) -> list[Death]:
        """Returns the ends of the ranks to be started anew now, each once."""
        ranks = [rank for rank in sorted(self._masked & set(self._ended)) if self._ended[rank][1] <= now_s]
        return [self._ended.pop(rank)[0] for rank in ranks]

    def started(self, rank: int, now_s: float) -> None:
        """Notes that a rank has been started anew."""
        self._started_s[rank] = now_s

    def late(self, now_s: float) -> dict[int, str]:
        """Returns the ranks whose new processes are too late to be waited for, and what there is to say."""
        said = f"was started anew and did not take part within server.attach_deadline_s = {self._deadline_s:g} s"
        late = [rank for rank, started_s in self._started_s.items() if now_s - started_s > self._deadline_s]
        return {rank: f"rank {rank} {said}" for rank in late}

    def failed(self, now_s: float) -> str | None:
        """Returns why all ranks are to be started again: the others wait for one whose new start came to nothing."""
        if not self.others_wait:
            return None
        reasons = [each.reason for each in self._in_vain.values()] + list(self.late(now_s).values())
        return reasons[0] if reasons else None
