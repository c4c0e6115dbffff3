"""Measures what a network connection carries: delay, rate, and the difference of both clocks.

It needs a connection on which nothing else goes; who answers reads a bounded number of bytes at a time.
"""

import contextlib
import socket
import struct
import time
from dataclasses import dataclass
from statistics import median

from moe_serve.socket_bytes import receive, receive_into

_TIMEOUT_S = 5.0  # of each call
_PINGS = 30
_LEAST_S = 0.05  # of the transfer that counts: the connection has found its pace by then
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
_CHUNK = bytes(1 << 20)
_PING, _BULK, _TIME = b"p", b"b", b"t"
_SIZE, _CLOCK = struct.Struct("<q"), struct.Struct("<d")


@dataclass(frozen=True)
class Speed:
    """delay_s: half of the median time of a message and its answer;  bytes_per_s: sent"""

    delay_s: float
    bytes_per_s: float


def measure(connected: socket.socket) -> tuple[Speed, float]:
    """Returns the speed of a connection whose other end runs `answer`, and its clock minus this one, in seconds.

    Raises OSError where it breaks, or stands still for seconds.
    """
    _prepare(connected)
    delay_s = median(_ask(connected, _PING, 1)[0] for _ in range(_PINGS)) / 2
    num_bytes, bulk_s = _FIRST_BYTES, 0.0
    while True:
        bulk_s = _send_bulk(connected, num_bytes)
        if bulk_s >= _LEAST_S or num_bytes == _MOST_BYTES:
            break
        num_bytes *= 2
    before_s = time.time()
    _, theirs = _ask(connected, _TIME, _CLOCK.size)
    clock_s = _CLOCK.unpack(theirs)[0] - (before_s + time.time()) / 2
    return Speed(delay_s, num_bytes / bulk_s), clock_s


def answer(connected: socket.socket) -> None:
    """Answers whoever measures, until it closes the connection."""
    buffer = memoryview(bytearray(len(_CHUNK)))
    with contextlib.suppress(OSError):
        _prepare(connected)
        while True:
            match receive(connected, 1):
                case b"p":
                    connected.sendall(_PING)
                case b"b":
                    (left,) = _SIZE.unpack(receive(connected, _SIZE.size))
                    while left > 0:
                        receive_into(connected, buffer[: min(left, len(buffer))])
                        left -= len(buffer)
                    connected.sendall(_BULK)
                case b"t":
                    connected.sendall(_CLOCK.pack(time.time()))
                case _:
                    return


def _prepare(connected: socket.socket) -> None:
    connected.settimeout(_TIMEOUT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _ask(connected: socket.socket, question: bytes, size: int) -> tuple[float, bytes]:
    """Returns the seconds until the answer, and the answer."""
    started_s = time.perf_counter()
    connected.sendall(question)
    data = receive(connected, size)
    return time.perf_counter() - started_s, data


def _send_bulk(connected: socket.socket, num_bytes: int) -> float:
    started_s = time.perf_counter()
    connected.sendall(_BULK + _SIZE.pack(num_bytes))
    left = num_bytes
    while left:
        left -= connected.send(memoryview(_CHUNK)[:left])
    receive(connected, 1)
    return time.perf_counter() - started_s
