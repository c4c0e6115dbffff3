"""The messages of one rank: requests from the front end, wakes from its peers, events back. Never blocks a step.

`ZmqMailbox` is that of the live system; tests and benchmarks bring one without sockets. One thread drives a mailbox,
the engine's. Torch-free.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from moe_serve.engine.greeting import Greeting
from moe_serve.engine.messages import (
    ALIVE_PERIOD_S,
    Alive,
    Message,
    Pulse,
    ToRank,
    Wake,
    decode_to_rank,
    decode_wake,
    encode,
)
from moe_serve.errors import LaunchError
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.log import RareWarnings, get_logger

log = get_logger(__name__)

# One poll takes at most so many messages from a socket, for at most so long: a step must not wait for a flood.
_TURN_MESSAGES = 256
_TURN_S = 0.005
_WAKE_BYTES = 1024  # a larger message ends the connection of who sent it


@dataclass(frozen=True)
class Reconnected:
    """The connection to the front end was cut and is there again: the front end submits its requests once more."""


Inbound = ToRank | Wake | Reconnected


class Mailbox(Protocol):
    """Receives and sends a rank's messages."""

    def poll(self, timeout_s: float) -> list[Inbound]:
        """Returns the messages that have arrived, without `Alive`; waits up to timeout_s for the first one."""
        ...

    def send(self, message: Message) -> None:
        """Sends to the front end without waiting."""
        ...

    def wake_peers(self, wake: Wake) -> None:
        """Sends a wake to every other rank without waiting."""
        ...

    def front_end_silent_s(self) -> float:
        """Returns the seconds since the last message from the front end."""
        ...

    def close(self) -> None: ...


class ZmqMailbox:
    """One DEALER socket to the front end, one PULL socket for wakes, one PUSH socket to each peer.

    A connection to the front end that was cut is made again, and this rank says hello again (`Greeting`).

    own_host: the host name or address under which peers reach this rank over TCP
    """

    def __init__(self, link: Link, rank: int, own_host: str):
        """Raises LaunchError when the address for wakes cannot be opened."""
        self._link = link
        self._sockets = LinkSockets(link)
        self._pulse: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._greeting = Greeting()
        self._front_end, self._connections = self._sockets.reconnecting(zmq.DEALER, link.front_end, _routing_id())
        self._num_connections = 0
        address = link.wakes_of(rank, own_host)
        try:
            self._wakes = self._sockets.bound(zmq.PULL, address, _WAKE_BYTES)
        except zmq.ZMQError as error:
            self._sockets.close()
            raise LaunchError(
                f"the address for wakes of rank {rank}, {address}, cannot be opened "
                f"({os.strerror(error.errno or 0)}); {own_host} must be an address of this machine"
            ) from None
        self.wake_address = self._wakes.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._poller.register(self._front_end, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)
        self._poller.register(self._connections, zmq.POLLIN)
        self._heard_s = time.monotonic()
        self._warnings = RareWarnings(log)

    @property
    def wake_ports(self) -> frozenset[int]:
        """The TCP port where peers reach this rank; empty where they use ipc."""
        _, is_tcp, address = self.wake_address.partition("tcp://")
        return frozenset([int(address.rpartition(":")[2])] if is_tcp else [])

    def connect_peers(self, wake_addresses: Sequence[str]) -> None:
        """Connects to the other ranks' wake addresses (not to its own)."""
        self._peers += [self._sockets.connected(zmq.PUSH, address) for address in wake_addresses]

    def poll(self, timeout_s: float) -> list[Inbound]:
        deadline = time.monotonic() + timeout_s
        arrived: list[Inbound] = []
        while True:
            left_ms = 0 if arrived else max(0, int((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(left_ms))
            if self._front_end in ready:
                arrived += self._drain(self._front_end, decode_to_rank)
            if self._wakes in ready:
                arrived += self._drain(self._wakes, decode_wake)
            if self._connections in ready:
                arrived += self._reconnected()
            self._greet_if_unheard()
            if arrived or time.monotonic() >= deadline:
                return arrived

    def _drain(self, socket: "zmq.Socket[bytes]", decode: Callable[[bytes], Inbound]) -> Iterator[Inbound]:
        """Yields what has arrived on a socket, at most for one turn: the rest is there at the next poll."""
        ends_s = time.monotonic() + _TURN_S
        for _ in range(_TURN_MESSAGES):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if socket is self._front_end:
                self._heard_s = time.monotonic()
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                self._warnings.warn(decode.__name__, "dropped a message of an unknown form: %s", error)
            else:
                if not isinstance(message, Alive):
                    yield message
            if time.monotonic() >= ends_s:
                return

    def _reconnected(self) -> list[Inbound]:
        """Says hello again for each new connection but the first."""
        before = self._num_connections
        with contextlib.suppress(zmq.Again):
            while True:
                self._connections.recv_multipart(zmq.NOBLOCK)
                self._num_connections += 1
        if max(before, 1) == self._num_connections:
            return []
        for message in self._greeting.again(self._num_connections - 1, time.monotonic()):
            self.send(message)
        return [Reconnected()]

    def _greet_if_unheard(self) -> None:
        now_s = time.monotonic()
        if self._greeting.is_due(now_s, self._heard_s):
            for message in self._greeting.again(max(0, self._num_connections - 1), now_s):
                self.send(message)

    def send(self, message: Message) -> None:
        self._greeting.note(message, time.monotonic())
        with contextlib.suppress(zmq.Again):  # a front end that has not read 100,000 messages is gone
            self._front_end.send(encode(message), zmq.NOBLOCK)

    def wake_peers(self, wake: Wake) -> None:
        data = encode(wake)
        for peer in self._peers:
            with contextlib.suppress(zmq.Again):
                peer.send(data, zmq.NOBLOCK)

    def front_end_silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def start_pulse(self, pulse: Callable[[], Pulse]) -> None:
        """Sends what pulse returns every ALIVE_PERIOD_S, from a thread and on a socket of its own."""
        self._pulse = threading.Thread(target=self._show_life, args=(pulse,), name="signs of life", daemon=True)
        self._pulse.start()

    def _show_life(self, pulse: Callable[[], Pulse]) -> None:
        socket = self._sockets.connected(zmq.DEALER, self._link.front_end, linger_ms=0)
        while not self._is_closing.wait(ALIVE_PERIOD_S):
            with contextlib.suppress(zmq.Again):
                socket.send(encode(pulse()), zmq.NOBLOCK)

    def close(self) -> None:
        self._is_closing.set()
        if self._pulse is not None:
            self._pulse.join()
        self._sockets.close()


def _routing_id() -> bytes:
    """Returns a name for this process at the front end: it stays when the connection is made again."""
    return b"rank" + secrets.token_bytes(12)
