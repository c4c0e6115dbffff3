"""Calls that wait for answers: commands to the ranks, and actions of all front ends of a port.

A command goes to every rank that takes part. The lowest of them, the leader, answers for all, or each answers for
itself.

Front ends have no connections to each other; the ranks pass messages on between them. A rank tells a newly started
front end of the last pause, or of its end; front ends tell a new rank. A rank that was masked meanwhile may know an
older one, so a call that is not newer than the last one is ignored. Calls are numbered by the clock of the front end's
host, and from the highest number that it has seen on where that is ahead: clocks of hosts differ.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from moe_serve.engine.protocol.messages import (
    Answer,
    FlushCache,
    ForFrontEnds,
    Message,
    Profile,
    Rebalance,
    RecordCommand,
    SetPlacement,
)
from moe_serve.errors import QueueFullError
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.requests.open_request import UnavailableError

Command = RecordCommand | Rebalance | SetPlacement
_MAX_OPEN = 16  # commands that wait for their answers; they come from people and scripts


@dataclass(frozen=True)
class _Command:
    """A command that waits. answers: by the rank that is to answer"""

    name: str
    answers: dict[int, asyncio.Future[Answer]]

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, answer in self.answers.items() if not answer.done()]


class CommandBook:
    """Sends commands to the ranks and hands out their answers.

    send:     sends a message to a rank
    first_id: of the commands; random, so that an answer to another front end is never mistaken for one to this
    """

    def __init__(self, send: Callable[[int, Message], None], first_id: int = 0):
        self._send = send
        self._open: dict[int, _Command] = {}
        self._last_id = first_id

    async def call(self, command: Command, ranks: Sequence[int], deadline_s: float) -> Answer:
        """Sends a command to ranks, ascending and not empty, and returns the leader's answer. Fills in its call_id.

        Raises QueueFullError if too many commands are open, and UnavailableError if the ranks end, or the leader is
        lost or does not answer within deadline_s. Then it is not known whether the command was carried out.
        """
        return (await self._ask(command, ranks, ranks[:1], deadline_s))[0]

    async def call_each(self, command: FlushCache | Profile, ranks: Sequence[int], deadline_s: float) -> list[Answer]:
        """Returns the answers of all ranks to a command; otherwise as `call`."""
        return await self._ask(command, ranks, ranks, deadline_s)

    async def _ask(
        self, command: Command | FlushCache | Profile, ranks: Sequence[int], answering: Sequence[int], deadline_s: float
    ) -> list[Answer]:
        if len(self._open) >= _MAX_OPEN:
            raise QueueFullError(f"{_MAX_OPEN} commands wait for the ranks already; try again later")
        self._last_id += 1
        call_id, name = self._last_id, command.__struct_config__.tag
        loop = asyncio.get_running_loop()
        call = _Command(str(name), {rank: loop.create_future() for rank in answering})
        self._open[call_id] = call
        message = msgspec.structs.replace(command, call_id=call_id)
        for rank in ranks:
            self._send(rank, message)
        try:
            await asyncio.wait(call.answers.values(), timeout=deadline_s)
            if call.silent:
                raise UnavailableError(
                    f"rank {_listed(call.silent)} did not answer the {name} command within {deadline_s:g} s; send it "
                    "again, and see the ranks' logs if that does not help"
                )
            return await asyncio.gather(*call.answers.values())
        finally:
            del self._open[call_id]

    def take(self, answer: Answer) -> None:
        """Hands an answer to its caller, if that still waits."""
        call = self._open.get(answer.call_id)
        if call is None:
            return
        # The leader may be another rank by now than when the command was sent.
        future = call.answers.get(answer.rank) or next(iter(call.answers.values()))
        if not future.done():
            future.set_result(answer)

    def lose(self, masked: Collection[int]) -> None:
        """Fails the commands that masked ranks should answer, since the others have dropped them."""
        for call in self._open.values():
            lost = [rank for rank in call.silent if rank in masked]
            if lost:
                self._fail(call, f"rank {_listed(lost)} was lost")

    def fail_all(self, reason: str) -> None:
        """Fails all commands, since the launch or the server ends."""
        for call in self._open.values():
            self._fail(call, f"rank {_listed(call.silent)} will not answer ({reason})")

    def _fail(self, call: _Command, why: str) -> None:
        text = f"{why} before it answered the {call.name} command; send it again"
        for rank in call.silent:
            call.answers[rank].set_exception(UnavailableError(text))


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))


What = Literal["pause", "abort_and_pause", "resume", "abort"]
_LASTING = ("pause", "abort_and_pause", "resume")
_DONE = "done"
_DEADLINE_S = 10.0
_ASK_AGAIN_S = 0.5


@dataclass
class _Shared:
    """A call to the other front ends. unconfirmed: without an answer;  told: by rank, the front ends it reaches"""

    unconfirmed: set[int]
    told: dict[int, set[int]] = field(default_factory=dict)

    def awaited(self, ranks: Sequence[int]) -> set[int]:
        """Returns the front ends without an answer that may live, since a serving rank may reach them."""
        return {each for each in self.unconfirmed if any(each in self.told.get(rank, (each,)) for rank in ranks)}


class ApiServers:
    """All front ends of a system, on one host or several. Does on all of them what one is asked to do.

    number, num: this one's number, and how many there are
    num_on_host: front ends with numbers in a row, which read one clock
    send:        sends a message to a rank
    serving:     returns the ranks that serve, which pass messages on
    book:        the requests of this one
    """

    def __init__(
        self,
        number: int,
        num: int,
        num_on_host: int,
        send: Callable[[int, Message], None],
        serving: Callable[[], Sequence[int]],
        book: RequestBook,
    ):
        self.number = number
        self.num = num
        self._num_on_host = num_on_host
        self._send = send
        self._serving = serving
        self._book = book
        self._calls: dict[int, _Shared] = {}  # wait for the others
        self._answered = asyncio.Event()
        self._since = self._highest = time.monotonic_ns()
        self._newest: ForFrontEnds | None = None  # the newest pause, or end of one, that was done here
        self._seen: deque[tuple[int, int]] = deque(maxlen=256)  # (front end, call): every rank passes each on

    @property
    def label(self) -> int | None:
        """This front end's number if there are several, else None."""
        return self.number if self.num > 1 else None

    async def pause(self, abort: bool) -> None:
        """Takes all requests from the ranks, and sends none until `resume`. abort: open ones end with what they have

        This call and the next two run on all live front ends. One that no rank reaches has ended and is not awaited:
        when it starts again, the ranks tell it before it may send a request. Raises UnavailableError if no rank serves,
        or if a live front end does not confirm in time.
        """
        await self._do_everywhere("abort_and_pause" if abort else "pause")

    async def resume(self) -> None:
        """Sends requests to the ranks again."""
        await self._do_everywhere("resume")

    async def cut_short(self, rid: str | None) -> None:
        """Ends the open requests with this id of their client, with their output so far. rid: None = all"""
        await self._do_everywhere("abort", rid)

    async def _do_everywhere(self, what: What, rid: str | None = None) -> None:
        call_id = self._next_id()
        message = ForFrontEnds(self.number, call_id, what, rid, lasts=what in _LASTING)
        self._seen.append((self.number, call_id))
        self._act(message)
        if self.num == 1:
            return
        call = self._calls[call_id] = _Shared({number for number in range(self.num) if number != self.number})
        try:
            await self._tell(message, call)
        finally:
            del self._calls[call_id]

    def _next_id(self) -> int:
        """Returns a number above all that have been seen here, which no other front end gives."""
        least = max(time.monotonic_ns(), self._highest + 1)
        self._highest = least + (self.number - least) % self.num
        return self._highest

    async def _tell(self, message: ForFrontEnds, call: _Shared) -> None:
        """Tells the ranks, repeatedly, until all front ends have answered: a rank may end or reconnect meanwhile."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            ranks = self._serving()
            if not ranks:
                raise UnavailableError(
                    f"it is done at front end {self.number} of {self.num} alone, since no rank serves that would tell "
                    "the others; send it again when the ranks are ready"
                )
            for rank in ranks:
                self._send(rank, message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_ASK_AGAIN_S, deadline_s - time.monotonic())):
                    while call.awaited(self._serving()):
                        self._answered.clear()
                        await self._answered.wait()
                    return
        raise UnavailableError(self._why_late(call, self._serving()))

    def _why_late(self, call: _Shared, ranks: Sequence[int]) -> str:
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
        elif self._is_of_this_host(message) and message.call_id < self._since:
            return  # from a rank that was stopped since: it is not about requests of today
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

    def _is_of_this_host(self, message: ForFrontEnds) -> bool:
        return message.front_end // self._num_on_host == self.number // self._num_on_host

    def tell_again(self, rank: int) -> None:
        """Tells a rank that gets ready, and may be new, of the last pause or its end."""
        if self.num > 1 and self._newest is not None:
            self._send(rank, self._newest)

    def take(self, message: ForFrontEnds, answer_by: int) -> None:
        """Handles a message that a rank has passed on. answer_by: the rank that passes on the answer"""
        own, self._highest = self._calls.get(message.call_id), max(self._highest, message.call_id)
        if message.what == _DONE:
            if own is not None:
                own.unconfirmed.discard(message.front_end)
                self._answered.set()
            return
        if own is not None and message.front_end == self.number:
            own.told[answer_by] = set(message.told)
            self._answered.set()
            return
        call = message.front_end, message.call_id
        if call not in self._seen:  # its own are; those of an earlier process of this number are not
            self._seen.append(call)
            self._act(message)
        if message.front_end != self.number:  # each time: the rank that passed on an answer may be lost
            self._send(answer_by, ForFrontEnds(self.number, message.call_id, _DONE))
