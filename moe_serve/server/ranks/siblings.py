"""The other front ends of the same port (server.api_workers): what an admin asks of one is done by all.

They have no connections to each other: the ranks, which all of them reach, pass messages on. A rank tells the newest
pause, or its end, to a front end that starts anew; a new rank hears of it from the front ends. A rank that was masked
meanwhile knows an older one, so calls are numbered by the time of their host, which all front ends share: what is not
newer than what was done last is not done.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_serve.engine.protocol.messages import ForFrontEnds, Message
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.requests.open_request import UnavailableError

What = Literal["pause", "abort_and_pause", "resume", "abort"]
_LASTING = ("pause", "abort_and_pause", "resume")
_DONE = "done"
_DEADLINE_S = 10.0
_ASK_AGAIN_S = 0.5


@dataclass
class _Call:
    """What was asked of the others. unconfirmed: who has not answered;  told: by rank, whom it reaches"""

    unconfirmed: set[int]
    told: dict[int, set[int]] = field(default_factory=dict)

    def awaited(self, ranks: Sequence[int]) -> set[int]:
        """Returns who may live and has not answered: some serving rank reaches it, or has not said whom it reaches."""
        return {each for each in self.unconfirmed if any(each in self.told.get(rank, (each,)) for rank in ranks)}


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
        self._calls: dict[int, _Call] = {}  # that wait for the others
        self._news = asyncio.Event()
        self._since = time.monotonic_ns()
        self._newest: ForFrontEnds | None = None  # of the pauses, and their ends, that were done here
        self._seen: deque[tuple[int, int]] = deque(maxlen=256)  # (front end, call): every rank passes each on

    async def do_everywhere(self, what: What, rid: str | None, serving: Callable[[], Sequence[int]]) -> None:
        """Does something here and at the others that live. serving: returns the ranks that serve, which pass it on

        A front end that no rank reaches has ended, and needs not be waited for: when it is started again, the ranks
        tell it before it may send a request. Raises UnavailableError where no rank serves, or a front end that lives
        does not confirm it in time.
        """
        call_id = time.monotonic_ns()
        message = ForFrontEnds(self.number, call_id, what, rid, lasts=what in _LASTING)
        self._seen.append((self.number, call_id))
        self._act(message)
        if self.num == 1:
            return
        call = self._calls[call_id] = _Call({number for number in range(self.num) if number != self.number})
        try:
            await self._tell(message, call, serving)
        finally:
            del self._calls[call_id]

    async def _tell(self, message: ForFrontEnds, call: _Call, serving: Callable[[], Sequence[int]]) -> None:
        """Tells the ranks until nobody is left to wait for: by then one may have ended, or be connected again."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            ranks = serving()
            if not ranks:
                raise UnavailableError(
                    f"it is done at front end {self.number} of {self.num} alone, since no rank serves that would tell "
                    "the others; send it again when the ranks are ready"
                )
            for rank in ranks:
                self._send(rank, message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_ASK_AGAIN_S, deadline_s - time.monotonic())):
                    while call.awaited(serving()):
                        self._news.clear()
                        await self._news.wait()
                    return
        raise UnavailableError(self._why_late(call, serving()))

    def _why_late(self, call: _Call, ranks: Sequence[int]) -> str:
        late, silent = call.awaited(ranks), [rank for rank in ranks if rank not in call.told]
        if silent and not any(late & told for told in call.told.values()):
            return (
                f"rank {', '.join(map(str, silent))} did not say within {_DEADLINE_S:g} s which front ends it reaches; "
                f"front end {', '.join(map(str, sorted(late)))} of {self.num} has not confirmed it, if it lives: send "
                "it again"
            )
        return (
            f"front end {', '.join(map(str, sorted(late)))} of {self.num} is connected to the ranks, but did not "
            f"confirm within {_DEADLINE_S:g} s that it has done the same: send it again, or end that process"
        )

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
        own = self._calls.get(message.call_id)
        if message.what == _DONE:
            if own is not None:
                own.unconfirmed.discard(message.front_end)
                self._news.set()
            return
        if own is not None and message.front_end == self.number:
            own.told[answer_by] = set(message.told)
            self._news.set()
            return
        call = message.front_end, message.call_id
        if call not in self._seen:  # its own, too; but one of a process before it is news
            self._seen.append(call)
            self._act(message)
        if message.front_end != self.number:  # each time: the rank that passed on an answer may be lost
            self._send(answer_by, ForFrontEnds(self.number, message.call_id, _DONE))
