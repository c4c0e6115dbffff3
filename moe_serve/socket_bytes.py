"""Whole messages over a connected socket.

Its timeout bounds each wait for progress, not a whole transfer, so an end that is slow is not taken for one that is
lost. A deadline bounds all.
"""

import contextlib
import socket
import time


def send(connected: socket.socket, data: bytes | memoryview) -> None:
    """Sends all. Raises OSError where the other end takes nothing for as long as the connection's timeout."""
    left = memoryview(data)
    while left:
        try:
            left = left[connected.send(left) :]
        except TimeoutError:
            raise TimeoutError(f"it took nothing for {connected.gettimeout():g} s") from None


def receive(connected: socket.socket, size: int, *, may_end: bool = False, until_s: float | None = None) -> bytes:
    """Returns so many bytes, or where it may end and does so before the first one, none. Raises as receive_into."""
    data = bytearray(size)
    is_there = receive_into(connected, memoryview(data), may_end=may_end, until_s=until_s)
    return bytes(data) if is_there else b""


def receive_into(
    connected: socket.socket, left: memoryview, *, may_end: bool = False, until_s: float | None = None
) -> bool:
    """Fills memory; returns False where the connection may end, and does so before the first byte.

    until_s: of time.monotonic(), when all must be there; the connection's timeout is then what was left of that, so
             who goes on with it sets it anew. None: as long as some come
    Raises TimeoutError, and OSError where the connection ends.
    """
    size = len(left)
    while left:
        if until_s is not None:
            connected.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            num = connected.recv_into(left)
        except TimeoutError:
            if until_s is not None:
                raise TimeoutError(
                    f"its message was not whole in time: {len(left)} of {size} bytes are missing"
                ) from None
            raise TimeoutError(f"it sent nothing for {connected.gettimeout():g} s") from None
        if not num:
            if may_end and len(left) == size:
                return False
            raise OSError("it closed the connection")
        left = left[num:]
    return True


def end(connected: socket.socket) -> None:
    """Ends a connection, in whatever thread it is read."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
