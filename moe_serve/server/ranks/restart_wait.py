"""Open requests between two launches: when all ranks are lost and their launcher starts them again, they wait.

Prompt, parameters, seed and output so far of each request are known here, so it goes on with the same tokens.
Torch-free.
"""

import time

from moe_serve.log import get_logger
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.ranks.workers import WorkerTable

log = get_logger(__name__)


class RestartWait:
    """Keeps the requests of a lost launch for the next one, for a bounded time.

    deadline_s: how long they wait, counted from the first loss until ranks serve again
    """

    def __init__(self, workers: WorkerTable, book: RequestBook, deadline_s: float):
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
