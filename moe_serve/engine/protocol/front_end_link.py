"""One front end as a rank sees it: its connection, what it was told, and whether it lives. Torch-free.

A system may have several front ends, which serve one HTTP port (server.api_workers). Each has a number; the ids of its
requests begin with it, so tokens find their way back without a table.
"""

import contextlib
import secrets
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from moe_serve.engine.protocol.greeting import Greeting
from moe_serve.engine.protocol.messages import Message, TokenEvent, Tokens, front_end_of
from moe_serve.links.sockets import LinkSockets


def by_front_end(message: Tokens) -> dict[int, Tokens]:
    """Returns the part of each front end in the tokens of a step."""
    events: dict[int, list[TokenEvent]] = {}
    for event in message.events:
        events.setdefault(front_end_of(event.request_id), []).append(event)
    return {front_end: Tokens(message.rank, message.launch_id, part) for front_end, part in events.items()}


class FrontEndLink:
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
        """Takes what ZeroMQ tells of the connection. Returns whether it was cut, and whether it was made again."""
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
        """Returns what to say to a front end that may not know this rank any more."""
        return self._greeting.again(max(0, self._num_connections - 1), time.monotonic())

    def hello_if_unheard(self) -> list[Message]:
        """Returns what to say to a front end that is silent; nothing to one that is heard."""
        return self.hello_again() if self._greeting.is_due(time.monotonic(), self.heard_s) else []


def _routing_id() -> bytes:
    """Returns a name for this process at the front end: it stays when the connection is made again."""
    return b"rank" + secrets.token_bytes(12)
