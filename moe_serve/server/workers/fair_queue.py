"""A semaphore that is fair to clients: each has a line of its own, and the lines take turns.

So a client with slow work waits for itself, and delays other clients by one piece of work at most.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moe_serve.errors import QueueFullError


class FairQueue:
    """Lets a few pieces of work run at once. Each line is bounded, since clients may leave while their work waits."""

    def __init__(self, what: str, max_waiting: int = 2048, at_once: int = 1):
        """what: names the work in errors;  max_waiting: in the line of one client;  at_once: pieces that run"""
        self._what = what
        self._max_waiting = max_waiting
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # none is empty; who is next comes first
        self._num_free = at_once

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for the client's turn, which ends with the block. Raises QueueFullError if its line is full."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        line = self._lines.setdefault(client, deque())
        if len(line) >= self._max_waiting:
            raise QueueFullError(f"{len(line)} {self._what} of this client wait already; try again later")
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had just come
                self._pass_on()
            elif turn in line:
                line.remove(turn)
                if not line:
                    del self._lines[client]
            raise

    def _pass_on(self) -> None:
        self._num_free += 1
        while self._lines and self._num_free:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            turn = line.popleft()
            if line:
                self._lines[client] = line  # behind the others
            if not turn.done():  # or it was cancelled, and is about to leave
                turn.set_result(None)
                self._num_free -= 1
