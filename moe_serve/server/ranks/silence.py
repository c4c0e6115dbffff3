"""When a rank that says nothing is lost. Pure but for its warnings: time is an argument. Torch-free.

A rank shows once a second that its process lives (`Pulse`, from a thread of its own), and after each step that it gets
on (`Status`, `Tokens`). A long step is no sign of death while it pulses, up to the deadline of a step. A front end that
did not run itself (starved, stopped) has heard nobody meanwhile: that time counts for no rank.
"""

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import ALIVE_PERIOD_S
from moe_serve.log import RareWarnings, get_logger
from moe_serve.server.ranks.rank_view import RankView
from moe_serve.server.ranks.workers import WorkerTable

log = get_logger(__name__)
_WARN_S = 5.0
_REGROUP_GRACE_S = 2.0


class Silence:
    """Looks for ranks that are silent for too long.

    limit_s: how long a rank may take for a step, and so be without a word from its steps
    """

    def __init__(self, config: ServeConfig):
        self._alive_s = config.server.worker_deadline_s
        self.limit_s = max(self._alive_s, config.engine.step_deadline_s)
        # The peers of a lost rank see the loss when they next wait for it, at the end of a step at the latest, and
        # agree within two deadlines.
        self._regroup_s = 3 * config.engine.step_deadline_s + _REGROUP_GRACE_S
        self._attach_s = config.server.attach_deadline_s
        self._warnings = RareWarnings(log)
        self._ran_s: float | None = None

    def discount_own(self, workers: WorkerTable, now_s: float) -> None:
        """Takes the time in which this process was late from what ranks seem silent. Called every ALIVE_PERIOD_S, or
        more often."""
        late_s = 0.0 if self._ran_s is None else max(0.0, now_s - self._ran_s - ALIVE_PERIOD_S)
        self._ran_s = now_s
        workers.excuse(late_s, now_s)
        if late_s > min(_WARN_S, self._alive_s / 2):
            self._warnings.warn(
                "own", "this process did not run for %.0f s: what is heard of ranks is late by as much", late_s
            )

    def look(self, workers: WorkerTable, now_s: float) -> tuple[str, int] | None:
        """Returns why a rank is lost, and which; None while none is. Warns of ranks that have been silent a while."""
        suspect = workers.long_suspected(now_s, self._regroup_s)
        if suspect is not None and suspect.suspicion is not None:
            why = f"{suspect.suspicion[1]}; its peers did not report within {self._regroup_s:g} s whether they go on"
            return why, suspect.rank
        extra_s = self._regroup_s if workers.goes_on else 0.0
        also = ", and time for its peers to go on without it" if workers.goes_on else ""
        for view in workers:
            if not view.serves:
                continue
            if view.pulse_s is not None and now_s - view.pulse_s > min(_WARN_S, self._alive_s / 2):
                self._warnings.warn(str(view.rank), "%s", self._silent(view, now_s - view.pulse_s))
            if view.pulse_s is not None and now_s - view.pulse_s > self._alive_s + extra_s:
                limit = f"(at most {self._alive_s + extra_s:g}: server.worker_deadline_s{also})"
                return f"{self._silent(view, now_s - view.pulse_s)} {limit}", view.rank
            if now_s - view.heard_s > self.limit_s + extra_s:
                larger = "the larger of server.worker_deadline_s and engine.step_deadline_s"
                return (
                    f"rank {view.rank} on {view.host} was not heard from for {now_s - view.heard_s:.0f} s (at most "
                    f"{self.limit_s + extra_s:g}: {larger}{also}); it hangs, or its host is gone; {view.last_phase}"
                ), view.rank
        return None

    def late_start(self, workers: WorkerTable, now_s: float) -> str | None:
        """Returns why the ranks take too long to start; None while they do not."""
        if workers.is_ready or now_s - workers.began_s <= self._attach_s:
            return None
        return (
            f"the ranks were not ready within server.attach_deadline_s = {self._attach_s:g} s ({workers.missing()}); "
            "start the missing ranks, or allow more time"
        )

    def _silent(self, view: RankView, silent_s: float) -> str:
        return (
            f"rank {view.rank} on {view.host} has shown no sign of life for {silent_s:.0f} s ({view.last_phase}); "
            "its process is stopped, or its host is gone"
        )
