"""The socket that all ranks attach to: a ZeroMQ ROUTER in the event loop of the front end. Torch-free.

Not `zmq.asyncio`: sending must never wait, since a rank that reads nothing must not stop the others; and a future costs
more than a small message.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import zmq

from moe_serve.engine.messages import MAX_MESSAGE_BYTES, Message, encode
from moe_serve.errors import LaunchError

_HIGH_WATER = 100_000  # messages queued for one rank; further ones are dropped, and the rank will miss its deadline
# A turn of the event loop handles at most so many messages, for at most so long: HTTP connections have the next turn.
_TURN_MESSAGES = 512
_TURN_S = 0.005


class RouterSocket:
    """Sends to ranks by identity, and calls a function with (identity, data) of each message that arrives."""

    def __init__(self, host: str, port: int, on_message: Callable[[bytes, bytes], None]):
        """port: 0 = any free one. Raises LaunchError when the address cannot be opened."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise LaunchError(
                f"the address of the ranks, {host}:{port}, cannot be opened ({os.strerror(error.errno or 0)}); "
                "end the process that uses it, or set server.worker_host and server.worker_port"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._on_message = on_message
        self._read_is_due = False
        self._loop = asyncio.get_running_loop()
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._read_soon)
        self._read_soon()

    def send(self, identity: bytes, message: Message) -> None:
        """Sends without waiting. Drops messages to ranks that are gone."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        # ZeroMQ's file descriptor is edge-triggered: sending may consume the signal of an arrival.
        self._read_soon()

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        self._socket.close()
        self._context.term()

    def _read_soon(self) -> None:
        if not self._read_is_due:
            self._read_is_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_is_due = False
        ends_s = time.monotonic() + _TURN_S
        for _ in range(_TURN_MESSAGES):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                self._on_message(frames[0], frames[1])
            if time.monotonic() >= ends_s:
                break
        self._read_soon()
