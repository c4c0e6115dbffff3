"""Commands to the ranks, such as those of the load recorder, and the answers that are awaited.

A command goes to every rank that takes part; the lowest of them, the leader, answers once for all, or each for itself.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from moe_serve.engine.protocol.messages import (
    Answer,
    FlushCache,
    Message,
    Profile,
    Rebalance,
    RecordCommand,
    SetPlacement,
)
from moe_serve.errors import QueueFullError
from moe_serve.server.requests.open_request import UnavailableError

Command = RecordCommand | Rebalance | SetPlacement
_MAX_OPEN = 16  # commands that wait for their answers; they come from people and scripts


@dataclass(frozen=True)
class _Call:
    """answers: by the rank that is to answer"""

    name: str
    answers: dict[int, asyncio.Future[Answer]]

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, answer in self.answers.items() if not answer.done()]


class CommandBook:
    """The open commands.

    send:     sends a message to a rank
    first_id: of the commands; drawn at random, so that no answer to another front end is taken for one to this
    """

    def __init__(self, send: Callable[[int, Message], None], first_id: int = 0):
        self._send = send
        self._open: dict[int, _Call] = {}
        self._last_id = first_id

    async def call(self, command: Command, ranks: Sequence[int], deadline_s: float) -> Answer:
        """Returns the answer to a command, which is sent to ranks, ascending and not empty. Fills in its call_id.

        Raises QueueFullError when too many commands are open, and UnavailableError when the ranks end, the leader is
        lost or does not answer within deadline_s: whether the command was carried out is not known then.
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
        call = _Call(str(name), {rank: loop.create_future() for rank in answering})
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
        """Hands an answer to its caller; drops it where nobody waits any more."""
        call = self._open.get(answer.call_id)
        if call is None:
            return
        # The leader may be another rank by now than when the command was sent.
        future = call.answers.get(answer.rank) or next(iter(call.answers.values()))
        if not future.done():
            future.set_result(answer)

    def lose(self, masked: Collection[int]) -> None:
        """Fails the commands that a masked rank was to answer: the ranks that go on have dropped them."""
        for call in self._open.values():
            lost = [rank for rank in call.silent if rank in masked]
            if lost:
                self._fail(call, f"rank {_listed(lost)} was lost")

    def fail_all(self, reason: str) -> None:
        """Fails all commands: the launch or the server ends."""
        for call in self._open.values():
            self._fail(call, f"rank {_listed(call.silent)} will not answer ({reason})")

    def _fail(self, call: _Call, why: str) -> None:
        text = f"{why} before it answered the {call.name} command; send it again"
        for rank in call.silent:
            call.answers[rank].set_exception(UnavailableError(text))


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
