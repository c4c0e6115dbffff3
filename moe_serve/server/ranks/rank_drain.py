"""Ranks that were asked to end, such as by torchrun: what runs finishes, new requests are refused. Torch-free."""

import asyncio
import time
from collections.abc import Callable

from moe_serve.log import get_logger
from moe_serve.server.ranks.rank_view import RankView
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.ranks.workers import WorkerTable

log = get_logger(__name__)
_LOOK_S = 0.02  # between two looks whether the last request has ended


class RankDrain:
    """Ends a launch in order.

    fail: ends the open requests with an error, for this reason
    end:  asks the ranks to end
    """

    def __init__(
        self,
        workers: WorkerTable,
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
