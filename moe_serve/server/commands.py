"""Commands to the ranks, such as those of the load recorder, and the answers that are awaited. Torch-free.

A command goes to every rank that takes part; the lowest of them, the leader, answers once for all.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from moe_serve.engine.messages import Answer, Message, Rebalance, RecordCommand, SetPlacement
from moe_serve.errors import QueueFullError
from moe_serve.server.open_request import UnavailableError

Command = RecordCommand | Rebalance | SetPlacement
_MAX_OPEN = 16  # commands that wait for their answers; they come from people and scripts


@dataclass(frozen=True)
class _Call:
    leader: int
    name: str
    answer: asyncio.Future[Answer]


class CommandBook:
    """The open commands. send: sends a message to a rank"""

    def __init__(self, send: Callable[[int, Message], None]):
        self._send = send
        self._open: dict[int, _Call] = {}
        self._num_calls = 0

    async def call(self, command: Command, ranks: Sequence[int], deadline_s: float) -> Answer:
        """Returns the answer to a command, which is sent to ranks, ascending and not empty. Fills in its call_id.

        Raises QueueFullError when too many commands are open, and UnavailableError when the ranks end, the leader is
        lost or does not answer within deadline_s: whether the command was carried out is not known then.
        """
        if len(self._open) >= _MAX_OPEN:
            raise QueueFullError(f"{_MAX_OPEN} commands wait for the ranks already; try again later")
        self._num_calls += 1
        call_id, name = self._num_calls, command.__struct_config__.tag
        call = _Call(ranks[0], str(name), asyncio.get_running_loop().create_future())
        self._open[call_id] = call
        message = msgspec.structs.replace(command, call_id=call_id)
        for rank in ranks:
            self._send(rank, message)
        try:
            async with asyncio.timeout(deadline_s):
                return await call.answer
        except TimeoutError:
            raise UnavailableError(
                f"rank {call.leader} did not answer the {name} command within {deadline_s:g} s; send it again, and see "
                "the ranks' logs if that does not help"
            ) from None
        finally:
            del self._open[call_id]

    def take(self, answer: Answer) -> None:
        """Hands an answer to its caller; drops it where nobody waits any more."""
        call = self._open.get(answer.call_id)
        if call is not None and not call.answer.done():
            call.answer.set_result(answer)

    def lose(self, masked: Collection[int]) -> None:
        """Fails the commands whose leader is masked: the ranks that go on have dropped them."""
        self._fail([call for call in self._open.values() if call.leader in masked], "was lost")

    def fail_all(self, reason: str) -> None:
        """Fails all commands: the launch or the server ends."""
        self._fail(self._open.values(), f"will not answer ({reason})")

    def _fail(self, calls: Collection[_Call], why: str) -> None:
        for call in calls:
            if not call.answer.done():
                text = f"rank {call.leader} {why} before it answered the {call.name} command; send it again"
                call.answer.set_exception(UnavailableError(text))
