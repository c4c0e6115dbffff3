"""Reads connections in batches while calls that generate are refused.

An event loop wakes up for every request that arrives. At ten times the load that can be served these are thousands of
wakeups a second, and each takes a core from a rank in the middle of its step. So a connection whose call was refused is
taken out of the loop: what its client sends next is read with all that others have sent, a hundred times a second. So
are connections that were answered meanwhile; otherwise those would always be the first to get a free place.
"""

import asyncio
import os
import select
import time
from collections import deque
from typing import Literal, Protocol

_PERIOD_S = 0.01  # between two batches
_LASTS_S = 1.0  # after the last refusal connections go back into the event loop
# A turn of the event loop reads so many connections, for so long: others have the next turn.
_TURN_CONNECTIONS = 64
_TURN_S = 0.002
_READ_BYTES = 1 << 16


class BatchedConnection(Protocol):
    """What a connection must offer: asyncio's protocol over a transport of a plain socket, or TLS."""

    transport: asyncio.Transport
    scheme: Literal["http", "https"] | None

    def data_received(self, data: bytes) -> None: ...


class BatchReader:
    """The connections that are read in batches. One for each front end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, BatchedConnection] = {}  # by descriptor
        self._numbers: dict[BatchedConnection, int] = {}  # their descriptors
        self._ready: deque[int] = deque()  # descriptors of the batch that is being read; some may be closed by now
        self._until_s = 0.0
        self._next: asyncio.Handle | None = None  # batch; None where there is no connection

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def is_active(self) -> bool:
        """Whether calls have been refused lately."""
        return time.monotonic() < self._until_s

    def count_refusal(self) -> None:
        """Notes that a call was refused: connections are read in batches from now on, for a while."""
        self._until_s = time.monotonic() + _LASTS_S

    async def next_one(self) -> None:
        """Waits as long as a batch does while calls are refused: newcomers come in batches too, and others first."""
        if self.is_active:
            await asyncio.sleep(_PERIOD_S)

    def add(self, connection: BatchedConnection) -> None:
        """Takes a connection out of the event loop, unless it has TLS, whose bytes only the loop can read."""
        if connection in self._numbers or connection.scheme == "https" or connection.transport.is_closing():
            return
        number = connection.transport.get_extra_info("socket").fileno()
        connection.transport.pause_reading()
        self._connections[number], self._numbers[connection] = connection, number
        self._epoll.register(number, select.EPOLLIN)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(_PERIOD_S, self._read)

    def release(self, connection: BatchedConnection) -> None:
        """Gives a connection back to the event loop; nothing where it is not here."""
        if self.remove(connection):
            connection.transport.resume_reading()

    def remove(self, connection: BatchedConnection) -> bool:
        """Forgets a connection, whose descriptor is still open; returns whether it was here."""
        number = self._numbers.pop(connection, None)
        if number is None:
            return False
        del self._connections[number]
        self._epoll.unregister(number)
        return True

    def has_bytes_of(self, connection: BatchedConnection) -> bool:
        """Returns whether something of a connection waits for the next batch."""
        number = self._numbers.get(connection)
        if number is None:
            return False
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Forgets all connections."""
        if self._next is not None:
            self._next.cancel()
        self._connections.clear()
        self._numbers.clear()
        self._ready.clear()
        self._epoll.close()

    def _read(self) -> None:
        is_left = True
        try:
            is_left = self._read_turn()
        finally:  # a mistake with one connection must not keep the others waiting for ever
            loop = asyncio.get_running_loop()
            if not self._connections:
                self._next = None
            else:
                self._next = loop.call_soon(self._read) if is_left else loop.call_later(_PERIOD_S, self._read)

    def _read_turn(self) -> bool:
        """Reads a few connections of the batch; returns whether some are left."""
        ends_s = time.monotonic() + _TURN_S
        if not self._ready:
            self._ready.extend(number for number, _ in self._epoll.poll(0))
        for _ in range(min(len(self._ready), _TURN_CONNECTIONS)):
            self._read_one(self._ready.popleft())
            if time.monotonic() >= ends_s:
                break
        if not self.is_active:
            for connection in list(self._numbers)[:_TURN_CONNECTIONS]:
                self.release(connection)
        return bool(self._ready)

    def _read_one(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None or connection.transport.is_closing():
            return
        try:
            data = os.read(number, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.release(connection)  # the event loop finds its end
            return
        try:
            connection.data_received(data)
        except Exception:
            connection.transport.abort()  # as the event loop would
            raise
