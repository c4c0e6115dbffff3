"""Which lost ranks are started anew alone, beside the others. Pure: time is an argument. Torch-free.

A rank is started anew once its process has ended and the others have reported that they go on without it, or wait for
it. It is back when they report that it takes part. Where its new process ends before that, or is too late, all ranks
are started again.
"""

from dataclasses import dataclass

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher.local import Death


@dataclass(frozen=True)
class FailedStart:
    """A rank that was started anew in vain. death: None where it is late"""

    rank: int
    death: Death | None
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
        self._ended: dict[int, Death] = {}  # not yet started anew
        self._started_s: dict[int, float] = {}
        self._failed: FailedStart | None = None
        self.others_wait = False

    def regrouped(self, message: Members) -> bool:
        """Notes which ranks take part; returns whether that is news: several front ends may pass it on."""
        if message.group_epoch <= self._group_epoch:
            return False
        self._group_epoch, self.others_wait = message.group_epoch, message.waits
        self._masked = set(range(self._num_ranks)) - set(message.members)
        for rank in set(self._started_s) - self._masked:
            del self._started_s[rank]
        return True

    def ended(self, death: Death) -> None:
        """Notes that a rank's process has ended."""
        if self._started_s.pop(death.rank, None) is not None:
            self._failed = FailedStart(death.rank, death, f"{death} before it took part again")
        else:
            self._ended[death.rank] = death

    def due(self) -> list[Death]:
        """Returns the ends of the ranks to be started anew now, each once."""
        return [self._ended.pop(rank) for rank in sorted(self._masked & set(self._ended))]

    def started(self, rank: int, now_s: float) -> None:
        """Notes that a rank has been started anew."""
        self._started_s[rank] = now_s

    def failed(self, now_s: float) -> FailedStart | None:
        """Returns the new start that was in vain; None where there is none."""
        late = [rank for rank, started_s in self._started_s.items() if now_s - started_s > self._deadline_s]
        if self._failed is None and late:
            return FailedStart(
                late[0],
                None,
                f"rank {late[0]} was started anew and did not take part within server.attach_deadline_s = "
                f"{self._deadline_s:g} s",
            )
        return self._failed
