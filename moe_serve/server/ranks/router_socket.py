"""The socket that all ranks attach to: a ZeroMQ ROUTER in the event loop of the front end.

It does not use `zmq.asyncio`: sending must never wait, so that a rank that reads nothing cannot stop the others, and a
future costs more than a small message.
"""

import asyncio
import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import zmq

from moe_serve.engine.protocol.messages import ALIVE_PERIOD_S, Message, encode
from moe_serve.errors import LaunchError
from moe_serve.links.folder import not_writable
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets, Refusals

# A turn of the event loop handles at most so many messages, for at most so long: HTTP connections have the next turn.
_TURN_MESSAGES = 512
_TURN_S = 0.002
_STUCK_S = 120.0


class RouterSocket:
    """Sends to ranks by identity, and calls a function with (identity, data) of each message that arrives."""

    def __init__(self, link: Link, on_message: Callable[[bytes, bytes], None]):
        """Raises LaunchError when the link's address cannot be opened."""
        self._sockets = LinkSockets(link)
        try:
            self._socket = self._sockets.bound(zmq.ROUTER, link.front_end)
        except zmq.ZMQError as error:
            self._sockets.close()
            if link.folder is not None:
                raise not_writable(link.folder, error.errno) from None
            raise LaunchError(
                f"the address of the ranks, {link.front_end}, cannot be opened ({os.strerror(error.errno or 0)}); "
                "end the process that uses it, or set server.worker_host and server.worker_port"
            ) from None
        self.link = link if link.folder else replace(link, port=self._port())
        self._refusals = None if link.folder else Refusals(self._socket, self.link.front_end)
        self._on_message = on_message
        self._lock = threading.Lock()  # the thread below sends on the same socket
        self._alive: tuple[Sequence[bytes], bytes] = ((), b"")
        self._turned_s = time.monotonic()
        self._is_closing = threading.Event()
        self._pulse = threading.Thread(target=self._show_life, name="signs of life", daemon=True)
        self._read_is_due = False
        self._loop = asyncio.get_running_loop()
        # Messages of ranks belong to no call. Without a context of its own, the log would name the call that sent last.
        self._context = contextvars.copy_context()
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._read_soon)
        self._read_soon()
        self._pulse.start()

    def keep_alive(self, identities: Sequence[bytes], message: Message) -> None:
        """Sends a message to these ranks every ALIVE_PERIOD_S from now on, also while the event loop is busy."""
        self._alive = (identities, encode(message))

    def send(self, identity: bytes, message: Message) -> None:
        """Sends without waiting. Drops messages to ranks that are gone."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            data = encode(message)
            with self._lock:
                self._socket.send_multipart([identity, data], zmq.NOBLOCK)
        # ZeroMQ's file descriptor is edge-triggered: sending may consume the signal of an arrival.
        self._read_soon()

    def close(self) -> None:
        self._is_closing.set()
        self._pulse.join()
        if self._refusals is not None:
            self._refusals.close()
        self._loop.remove_reader(self._file)
        self._sockets.close()

    def _port(self) -> int:
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _show_life(self) -> None:
        """Sends signs of life from a thread of its own, unless the event loop has not turned for minutes."""
        while not self._is_closing.wait(ALIVE_PERIOD_S):
            if self._refusals is not None:
                self._refusals.look()
            if time.monotonic() - self._turned_s > _STUCK_S:
                continue
            identities, data = self._alive
            for identity in identities:
                with contextlib.suppress(zmq.ZMQError), self._lock:
                    self._socket.send_multipart([identity, data], zmq.NOBLOCK)
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._turned_s = time.monotonic()
        self._read_soon()  # a send may have consumed the signal of an arrival

    def _read_soon(self) -> None:
        if not self._read_is_due:
            self._read_is_due = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._read_is_due = False
        ends_s = time.monotonic() + _TURN_S
        for _ in range(_TURN_MESSAGES):
            if self._socket.closed:
                return
            try:
                with self._lock:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                self._on_message(frames[0], frames[1])
            if time.monotonic() >= ends_s:
                break
        self._read_soon()
