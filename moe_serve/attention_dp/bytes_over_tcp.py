"""Bytes over a TCP connection, whose timeout bounds each wait for progress, not a whole transfer.

So an end that is slow is not taken for one that is lost.
"""

import contextlib
import socket


def send(connected: socket.socket, data: bytes | memoryview) -> None:
    """Sends all. Raises OSError where the other end takes nothing for as long as the connection's timeout."""
    left = memoryview(data)
    while left:
        try:
            left = left[connected.send(left) :]
        except TimeoutError:
            raise OSError(f"it took nothing for {connected.gettimeout():g} s") from None


def receive(connected: socket.socket, size: int, may_end: bool = False) -> bytes:
    """Returns so many bytes, or where it may end and does so before the first one, none. Raises OSError."""
    data = bytearray(size)
    is_there = receive_into(connected, memoryview(data), may_end)
    return bytes(data) if is_there else b""


def receive_into(connected: socket.socket, left: memoryview, may_end: bool = False) -> bool:
    """Fills memory; returns False where the connection may end, and does so before the first byte. Raises OSError."""
    size = len(left)
    while left:
        try:
            num = connected.recv_into(left)
        except TimeoutError:
            raise OSError(f"it sent nothing for {connected.gettimeout():g} s") from None
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
