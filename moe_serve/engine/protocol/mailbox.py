"""The messages of one rank: requests from the front end, wakes from its peers, events back. Never blocks a step.

`ZmqMailbox` is that of the live system; tests and benchmarks bring one without sockets. One thread drives a mailbox,
the engine's.

A system may have several front ends, on one host or on every one (server.api_workers, launcher.front_ends). Each has a
number; the ids of its requests begin with it, so tokens find their way back without a table.

A cut connection loses messages in both directions, and the front end may be another process afterwards. So a rank whose
connection was cut says hello again with all that a front end must know, and drops its requests: the front end submits
those that it still wants. A rank that only hears nothing keeps its requests, and says hello until it is heard.
"""

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from moe_serve.engine.protocol.messages import (
    ALIVE_PERIOD_S,
    Alive,
    Apart,
    BalanceReport,
    ForFrontEnds,
    Hello,
    Members,
    Message,
    Pulse,
    Ready,
    Shutdown,
    TokenEvent,
    Tokens,
    ToRank,
    Wake,
    decode_to_rank,
    decode_wake,
    encode,
    front_end_of,
)
from moe_serve.errors import LaunchError
from moe_serve.links.folder import not_writable
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.log import RareWarnings, get_logger

log = get_logger(__name__)

# One poll takes at most so many messages from a socket, for at most so long: a step must not wait for a flood.
_TURN_MESSAGES = 256
_TURN_S = 0.005
LIVENESS_TIMEOUT_S = 3.0  # a front end that is alive says so every ALIVE_PERIOD_S
Decoded = TypeVar("Decoded")
_WAKE_BYTES = 1024  # a larger message ends the connection of its sender


@dataclass(frozen=True)
class Disconnected:
    """The connection to a front end was cut. It submits its requests once more when it is there again.

    front_end: its number; None: the only one
    """

    front_end: int | None = None


@dataclass(frozen=True)
class Reconnected:
    """The connection to a front end that was cut is there again: it submits its requests once more."""

    front_end: int | None = None


Inbound = ToRank | Wake | Disconnected | Reconnected


class Mailbox(Protocol):
    """Receives and sends a rank's messages."""

    def poll(self, timeout_s: float) -> list[Inbound]:
        """Returns the messages that have arrived, without `Alive`; waits up to timeout_s for the first one."""
        ...

    def send(self, message: Message) -> None:
        """Sends without waiting: tokens to the front end of their request, all else to every front end."""
        ...

    def wake_peers(self, wake: Wake) -> None:
        """Sends a wake to every other rank without waiting."""
        ...

    def front_end_silent_s(self) -> float:
        """Returns the seconds since the last message from a front end."""
        ...

    def close(self) -> None: ...


class ZmqMailbox:
    """One DEALER socket to each front end, one PULL socket for wakes, one PUSH socket to each peer.

    own_host:       the host name or address under which peers reach this rank over TCP
    num_front_ends: of all hosts
    wakes:          the address for wakes, that of the process which was this rank before; "": a new one
    """

    def __init__(self, link: Link, rank: int, own_host: str, num_front_ends: int = 1, wakes: str = ""):
        """Raises LaunchError when the address for wakes cannot be opened."""
        self._sockets = LinkSockets(link)
        self._pulse: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._addresses = [link.front_end_at(number) for number in range(num_front_ends)]
        self._front_ends = [_FrontEndLink(self._sockets, address) for address in self._addresses]
        address = wakes or link.wakes_of(rank, own_host)
        try:
            self._wakes = self._sockets.bound(zmq.PULL, address, _WAKE_BYTES)
        except zmq.ZMQError as error:
            self._sockets.close()
            if link.folder is not None:
                raise not_writable(link.folder, error.errno) from None
            raise LaunchError(
                f"the address for wakes of rank {rank}, {address}, cannot be opened "
                f"({os.strerror(error.errno or 0)}); {own_host} must be an address of this machine"
            ) from None
        self.wake_address = self._wakes.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._poller.register(self._wakes, zmq.POLLIN)
        for front_end in self._front_ends:
            self._poller.register(front_end.socket, zmq.POLLIN)
            self._poller.register(front_end.events, zmq.POLLIN)
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
            left_ms = 0 if arrived else max(0, math.ceil((deadline - time.monotonic()) * 1000))  # down, it would spin
            ready = dict(self._poller.poll(left_ms))
            for number, front_end in enumerate(self._front_ends):
                if front_end.socket in ready:
                    arrived += self._take(front_end)
                if front_end.events in ready:
                    arrived += self._reconnected(number, front_end)
                self._say(front_end, front_end.hello_if_unheard())
            if self._wakes in ready:
                arrived += self._drain(self._wakes, decode_wake)
            if self._has_no_front_end():
                arrived.append(Shutdown())
            if arrived or time.monotonic() >= deadline:
                return arrived

    def _take(self, front_end: "_FrontEndLink") -> Iterator[Inbound]:
        """Yields the messages of a front end. Its request to end counts once all front ends ask for it, or are gone."""
        for message in self._drain(front_end.socket, decode_to_rank):
            front_end.heard_s = time.monotonic()
            if isinstance(message, Shutdown):
                front_end.has_left = True
            elif not isinstance(message, Alive):
                yield message

    def _has_no_front_end(self) -> bool:
        has_left = any(front_end.has_left for front_end in self._front_ends)
        return has_left and all(front_end.has_left or not front_end.is_connected for front_end in self._front_ends)

    def _drain(self, socket: "zmq.Socket[bytes]", decode: Callable[[bytes], Decoded]) -> Iterator[Decoded]:
        """Yields the messages on a socket, for at most one turn; the next poll yields the rest."""
        ends_s = time.monotonic() + _TURN_S
        for _ in range(_TURN_MESSAGES):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                self._warnings.warn(decode.__name__, "dropped a message of an unknown form: %s", error)
            else:
                yield message
            if time.monotonic() >= ends_s:
                return

    def _reconnected(self, number: int, front_end: "_FrontEndLink") -> list[Inbound]:
        """Says hello again for each new connection but the first."""
        which = number if len(self._front_ends) > 1 else None
        was_cut, is_new = front_end.take_events()
        arrived: list[Inbound] = [Disconnected(which)] if was_cut else []
        if is_new:
            self._say(front_end, front_end.hello_again())
            arrived.append(Reconnected(which))
        return arrived

    def _say(self, front_end: "_FrontEndLink", messages: Sequence[Message]) -> None:
        for message in messages:
            front_end.send(message, encode(message))

    def send(self, message: Message) -> None:
        if len(self._front_ends) > 1 and isinstance(message, Tokens):
            for number, part in _by_front_end(message).items():
                self._front_ends[number].send(part, encode(part))
            return
        if isinstance(message, ForFrontEnds):
            reached = [number for number, each in enumerate(self._front_ends) if each.is_connected]
            message = msgspec.structs.replace(message, told=reached)
        data = encode(message)
        for front_end in self._front_ends:
            front_end.send(message, data)

    def wake_peers(self, wake: Wake) -> None:
        data = encode(wake)
        for peer in self._peers:
            with contextlib.suppress(zmq.Again):
                peer.send(data, zmq.NOBLOCK)

    def front_end_silent_s(self) -> float:
        return time.monotonic() - max(front_end.heard_s for front_end in self._front_ends)

    def start_pulse(self, pulse: Callable[[], Pulse]) -> None:
        """Sends a pulse every ALIVE_PERIOD_S, from a separate thread and separate sockets.

        Raises LaunchError where they cannot be opened, since an error in the thread would go unnoticed.
        """
        try:
            sockets = [self._sockets.connected(zmq.DEALER, address, linger_ms=0) for address in self._addresses]
        except zmq.ZMQError as error:
            why = os.strerror(error.errno or 0)
            raise LaunchError(f"a rank's signs of life have no socket ({why}); raise the limit (ulimit -n)") from None
        self._pulse = threading.Thread(target=self._show_life, args=(pulse, sockets), name="signs of life", daemon=True)
        self._pulse.start()

    def _show_life(self, pulse: Callable[[], Pulse], sockets: "Sequence[zmq.Socket[bytes]]") -> None:
        while not self._is_closing.wait(ALIVE_PERIOD_S):
            data = encode(pulse())
            for socket in sockets:
                with contextlib.suppress(zmq.Again):
                    socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        self._is_closing.set()
        if self._pulse is not None:
            self._pulse.join()
        self._sockets.close()


def _by_front_end(message: Tokens) -> dict[int, Tokens]:
    """Returns the part of each front end in the tokens of a step."""
    events: dict[int, list[TokenEvent]] = {}
    for event in message.events:
        events.setdefault(front_end_of(event.request_id), []).append(event)
    return {front_end: Tokens(message.rank, message.launch_id, part) for front_end, part in events.items()}


class _FrontEndLink:
    """The connection to one front end. It is made again when it was cut, and this rank says hello again (`Greeting`).

    heard_s:      when it was last heard
    is_connected: as far as ZeroMQ knows
    has_left:     it has asked for the end, and will send nothing more
    """

    def __init__(self, sockets: LinkSockets, address: str):
        self.socket, self.events = sockets.reconnecting(zmq.DEALER, address, _routing_id())
        self.heard_s = time.monotonic()
        self.is_connected = False
        self.has_left = False
        self._greeting = Greeting()
        self._num_connections = 0

    def send(self, message: Message, data: bytes) -> None:
        """Sends without waiting. data: the message, encoded"""
        self._greeting.note(message, time.monotonic())
        with contextlib.suppress(zmq.Again):  # a front end that has not read 100,000 messages is gone
            self.socket.send(data, zmq.NOBLOCK)

    def take_events(self) -> tuple[bool, bool]:
        """Reads ZeroMQ's events of the connection. Returns whether it was cut, and whether it was made again."""
        was_cut, before = False, self._num_connections
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))["event"]
                self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                was_cut |= not self.is_connected
                self._num_connections += self.is_connected
        is_new = max(before, 1) < self._num_connections
        if is_new:
            self.has_left = False
        return was_cut, is_new

    def hello_again(self) -> list[Message]:
        """Returns the messages for a front end that may not know this rank any more."""
        return self._greeting.again(max(0, self._num_connections - 1), time.monotonic())

    def hello_if_unheard(self) -> list[Message]:
        """Returns the messages for a front end that is not heard; none for one that is."""
        return self.hello_again() if self._greeting.is_due(time.monotonic(), self.heard_s) else []


def _routing_id() -> bytes:
    """Returns a name for this process at the front end: it stays when the connection is made again."""
    return b"rank" + secrets.token_bytes(12)


class Greeting:
    """Remembers the messages that a front end must know, so that they can be sent again."""

    def __init__(self, timeout_s: float = LIVENESS_TIMEOUT_S):
        self._timeout_s = timeout_s
        self._hello: Hello | None = None
        self._ready: Ready | None = None
        self._members: Members | Apart | None = None
        self._placement: BalanceReport | None = None
        self._for_front_ends: ForFrontEnds | None = None
        self._newest_call = 0  # front ends repeat calls to new ranks, also one that is over
        self._said_s = 0.0

    def note(self, message: Message, now_s: float) -> None:
        """Remembers a message that is on its way, if it must be repeated."""
        match message:
            case Hello():
                self._hello, self._said_s = message, now_s
            case Ready():
                self._ready = message
            case Members() | Apart():
                self._members = message
            case ForFrontEnds() if message.lasts and message.call_id >= self._newest_call:
                self._for_front_ends, self._newest_call = message, message.call_id
            case BalanceReport() if message.placement is not None:
                # Windows and decisions are news only once.
                self._placement = msgspec.structs.replace(message, window=None, decisions=[])

    def is_due(self, now_s: float, heard_s: float) -> bool:
        """Returns whether this rank should say hello again, because it is ready and hears nothing."""
        return self._ready is not None and now_s - max(heard_s, self._said_s) > self._timeout_s

    def again(self, num_reconnects: int, now_s: float) -> list[Message]:
        """Returns the messages to send again; none before the first hello."""
        if self._hello is None:
            return []
        self._said_s = now_s
        hello = msgspec.structs.replace(self._hello, num_reconnects=num_reconnects, is_ready=self._ready is not None)
        return [hello, *(each for each in self._told() if each is not None)]

    def _told(self) -> tuple[Message | None, ...]:
        # A pause comes before `Ready`: a front end may send requests from then on.
        return self._for_front_ends, self._ready, self._members, self._placement
