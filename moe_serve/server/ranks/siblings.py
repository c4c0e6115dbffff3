"""The other front ends of the same port (server.api_workers): what an admin asks of one is done by all. Torch-free.

They have no connections to each other: the ranks, which all of them reach, pass messages on. A rank tells the newest
pause, or its end, to a front end that starts anew; a new rank hears of it from the front ends. A rank that was masked
meanwhile knows an older one, so calls are numbered by the time of their host, which all front ends share: what is not
newer than what was done last is not done.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from moe_serve.engine.protocol.messages import ForFrontEnds, Message
from moe_serve.server.open_request import UnavailableError
from moe_serve.server.ranks.request_book import RequestBook

What = Literal["pause", "abort_and_pause", "resume", "abort"]
_LASTING = ("pause", "abort_and_pause", "resume")
_DONE = "done"
_DEADLINE_S = 10.0


class Siblings:
    """Tells the other front ends what to do, and does what they tell.

    number, num: this front end's, and how many there are
    send:        sends a message to a rank
    book:        this front end's requests
    """

    def __init__(self, number: int, num: int, send: Callable[[int, Message], None], book: RequestBook):
        self.number = number
        self.num = num
        self._send = send
        self._book = book
        self._missing: dict[int, set[int]] = {}  # by call: who has not answered
        self._news = asyncio.Event()
        self._since = time.monotonic_ns()
        self._newest: ForFrontEnds | None = None  # of the pauses, and their ends, that were done here
        self._seen: deque[tuple[int, int]] = deque(maxlen=256)  # (front end, call): every rank passes each on

    async def do_everywhere(self, what: What, rid: str | None, ranks: Sequence[int]) -> None:
        """Does something here and at the others; ranks: those that pass it on.

        Raises UnavailableError where no rank serves, or a front end does not confirm it in time: it is being started,
        perhaps.
        """
        call_id = time.monotonic_ns()
        message = ForFrontEnds(self.number, call_id, what, rid, lasts=what in _LASTING)
        self._seen.append((self.number, call_id))
        self._act(message)
        if self.num == 1:
            return
        if not ranks:
            raise UnavailableError(
                f"it is done at front end {self.number} of {self.num} alone, since no rank serves that would tell the "
                "others; send it again when the ranks are ready"
            )
        self._missing[call_id] = missing = {number for number in range(self.num) if number != self.number}
        for rank in ranks:
            self._send(rank, message)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while missing:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise UnavailableError(
                f"front end {', '.join(map(str, sorted(missing)))} of {self.num} did not confirm within "
                f"{_DEADLINE_S:g} s that it has done the same; it is being started, perhaps: send it again"
            ) from None
        finally:
            del self._missing[call_id]

    def _act(self, message: ForFrontEnds) -> None:
        if message.what in _LASTING:
            if self._newest is not None and message.call_id <= self._newest.call_id:
                return
            self._newest = message
        elif message.call_id < self._since:  # a rank was stopped since then: it is not about requests of today
            return
        match message.what:
            case "pause":
                self._book.hold()
            case "abort_and_pause":
                self._book.hold()
                self._book.cut_short_all(None)
            case "resume":
                self._book.go_on()
            case "abort":
                self._book.cut_short_all(message.rid)

    def tell_again(self, rank: int) -> None:
        """Tells a rank that gets ready of the newest pause, or its end: it is new, perhaps."""
        if self.num > 1 and self._newest is not None:
            self._send(rank, self._newest)

    def take(self, message: ForFrontEnds, answer_by: int) -> None:
        """Takes a message that a rank has passed on. answer_by: the rank that passes on the answer"""
        if message.what == _DONE:
            self._missing.get(message.call_id, set()).discard(message.front_end)
            self._news.set()
            return
        call = message.front_end, message.call_id
        if call in self._seen:  # its own, too; but one of a process before it is news
            return
        self._seen.append(call)
        self._act(message)
        self._send(answer_by, ForFrontEnds(self.number, message.call_id, _DONE))
