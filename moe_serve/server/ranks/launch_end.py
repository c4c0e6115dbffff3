"""How a launch ends and the next one begins: a rank is silent, or was asked to end, or all are started again.

`Silence`: a rank shows once a second that its process lives (`Pulse`, from a thread of its own), and after each step
that it gets on (`Status`, `Tokens`). A long step is no sign of death while it pulses, up to the deadline of a step. A
front end that did not run itself (starved, stopped) has heard nobody meanwhile: that time counts for no rank.

`RankDrain`: what runs finishes, and new requests are refused. `RestartWait`: prompt, parameters, seed and output so far
of each open request are known here, so it goes on after the restart with the same tokens.
"""

import asyncio
import time
from collections.abc import Callable

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import ALIVE_PERIOD_S
from moe_serve.log import RareWarnings, get_logger
from moe_serve.server.ranks.rank_table import RankTable, RankView
from moe_serve.server.ranks.request_book import RequestBook

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

    def discount_own(self, workers: RankTable, now_s: float) -> None:
        """Takes the time in which this process was late from what ranks seem silent. Called every ALIVE_PERIOD_S, or
        more often."""
        late_s = 0.0 if self._ran_s is None else max(0.0, now_s - self._ran_s - ALIVE_PERIOD_S)
        self._ran_s = now_s
        workers.excuse(late_s, now_s)
        if late_s > min(_WARN_S, self._alive_s / 2):
            self._warnings.warn(
                "own", "this process did not run for %.0f s: what is heard of ranks is late by as much", late_s
            )

    def look(self, workers: RankTable, now_s: float) -> tuple[str, int] | None:
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

    def late_start(self, workers: RankTable, now_s: float) -> str | None:
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


_LOOK_S = 0.02  # between two looks whether the last request has ended


class RankDrain:
    """Ends a launch in order.

    fail: ends the open requests with an error, for this reason
    end:  asks the ranks to end
    """

    def __init__(
        self,
        workers: RankTable,
        book: RequestBook,
        deadline_s: float,
        fail: Callable[[str], None],
        end: Callable[[], None],
    ):
        self._workers = workers
        self._book = book
        self._deadline_s = deadline_s
        self._fail = fail
        self._end = end
        self._reason = ""
        self._launch_id: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str | None:
        """Why no request is taken; None where the ranks of this launch were not asked to end."""
        return self._reason if self._launch_id == self._workers.launch_id else None

    def begin(self, view: RankView) -> None:
        """A rank was asked to end: ends all of them when the open requests have ended, or at the deadline."""
        if self.reason is None:
            self._launch_id = self._workers.launch_id
            self._reason = f"rank {view.rank} on {view.host} was asked to end, so all ranks end"
            num_open = len(self._book)
            log.warning("%s; %d open requests have %g s to end", self._reason, num_open, self._deadline_s)
            self._task = asyncio.create_task(self._drain(self._launch_id))

    def close(self) -> None:
        """Waits for nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def _drain(self, launch_id: int) -> None:
        self._book.go_on()
        until_s = time.monotonic() + self._deadline_s
        while len(self._book) and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        if launch_id == self._workers.launch_id and self._workers.loss is None:
            if len(self._book):
                late = f"the request was open after server.drain_deadline_s = {self._deadline_s:g} s"
                self._fail(f"{self._reason}; {late}")
            self._end()


class RestartWait:
    """Keeps the requests of a lost launch for the next one, for a bounded time.

    deadline_s: how long they wait, counted from the first loss until ranks serve again
    """

    def __init__(self, workers: RankTable, book: RequestBook, deadline_s: float):
        self._workers = workers
        self._book = book
        self._deadline_s = deadline_s
        # Ids of launches: the last one that was ready, that was lost, and after which nobody waits any more.
        self._serving = self._lost = self._given_up = -1
        self._ends_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the launcher is expected to start the lost ranks again."""
        workers = self._workers
        return workers.loss is not None and workers.is_restarted and workers.launch_id != self._given_up

    def lose(self, lost_rank: int | None) -> None:
        """The launch is lost and will be restarted: its requests wait. lost_rank: the reason, None = not known"""
        if self._lost != self._workers.launch_id:
            self._lost = self._workers.launch_id
            self._book.wait_for_launch(lost_rank)
            self._ends_s = self._ends_s or time.monotonic() + self._deadline_s

    def serve(self) -> None:
        """Submits what has waited, once for each launch, as soon as its ranks serve."""
        limits = self._workers.limits
        if not self._workers.is_ready or limits is None or self._serving == self._workers.launch_id:
            return
        self._serving, self._ends_s = self._workers.launch_id, None
        num_again = self._book.begin_launch(limits.block_size, self._workers.masked)
        if num_again:
            log.warning("the ranks were started again; requests that go on: %d", num_again)

    def give_up(self) -> None:
        """Nobody starts the lost ranks again."""
        self._ends_s, self._given_up = None, self._workers.launch_id

    def overdue(self, now_s: float) -> str | None:
        """Returns why requests wait no longer, once; None while they may wait."""
        if self._ends_s is None or now_s < self._ends_s:
            return None
        self.give_up()
        why = self._workers.loss or self._workers.missing()
        return f"the ranks were not started again within server.restart_deadline_s = {self._deadline_s:g} s ({why})"
