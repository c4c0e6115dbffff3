"""TCP connections of one process with itself, between which a test may meddle."""

import contextlib
import socket
import threading
from collections.abc import Callable

Meddle = Callable[[socket.socket, socket.socket], object]  # (from whom it passes bytes on, to whom)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def pump(source: socket.socket, to: socket.socket) -> None:
    """Passes bytes on until one of both ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
    cut(source, to)


def cut(*connected: socket.socket) -> None:
    for each in connected:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def start(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


class Connections:
    """Connections that are closed together."""

    def __init__(self) -> None:
        self.may_connect = True
        self._sockets: list[socket.socket] = []

    def pair(self, meddle_near: Meddle = pump, meddle_far: Meddle = pump) -> tuple[socket.socket, socket.socket]:
        """Returns two ends. What the near one says comes by meddle_near, what the far one says by meddle_far."""
        if not self.may_connect:
            raise OSError("no route to host")
        near, far = self._pair()
        if meddle_near is pump and meddle_far is pump:
            return near, far
        middle, far_end = self._pair()
        start(meddle_near, far, middle)
        start(meddle_far, middle, far)
        return near, far_end

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        self._sockets += (pair := tcp_pair())
        return pair

    def cut_all(self) -> None:
        cut(*self._sockets)

    def close(self) -> None:
        self.cut_all()
        for each in self._sockets:
            each.close()
