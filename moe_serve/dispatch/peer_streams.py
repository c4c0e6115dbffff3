"""Streams of bytes between two ranks of a launch, apart from steps: one asks, the other answers from a thread.

On one host they are Unix sockets whose name is in no file system, so nothing is left behind; both ends look at the
user of the other. Between hosts they are connections as all others there are (hosts/handshake.py).
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from moe_serve.dispatch.hosts.handshake import EXPERTS

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.link import HostLink

_PEER = struct.Struct("3i")  # process, user, group
_PAUSE_S = 0.05

Take = Callable[[socket.socket, int], object]  # (connected, the rank that has dialled; -1: one of this host)


class PeerStreams:
    """The streams of one rank with others.

    name: under which ranks of this host find it, once it listens; "" before
    """

    def __init__(self, name_of: Callable[[int], str | None], link: "HostLink | None"):
        """name_of: returns the name of a rank of this host; None where it has left none;  link: with other hosts"""
        self.name = ""
        self._name_of, self._link = name_of, link
        self._listener: socket.socket | None = None

    def is_near(self, rank: int) -> bool:
        """Returns whether a rank is on this host."""
        return self._link is None or rank in self._link.local_ranks

    def listen(self, take: Take) -> None:
        """Hands each stream that another rank begins to `take`, from a thread. Called once."""
        name = f"moe_serve-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener, take), name="peer streams", daemon=True).start()
        if self._link is not None:
            self._link.take_dialled(EXPERTS, take)
        self.name = name

    def dial(self, rank: int, deadline_s: float) -> socket.socket:
        """Returns a new stream to a rank. Raises OSError where there is none within the deadline."""
        if not self.is_near(rank):
            assert self._link is not None, "a rank is elsewhere"
            if rank in (down := self._link.down()):
                raise OSError(down[rank])
            return self._link.dial(rank, EXPERTS, deadline_s)
        name = self._name_of(rank)
        if not name:
            raise OSError("it does not listen")
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(deadline_s)
            stream.connect(f"\0{name}")
            if not _is_own_user(stream):
                raise OSError("another user listens there")
        except OSError:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Listens no longer."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            listener.close()

    def _accept(self, listener: socket.socket, take: Take) -> None:
        while self._listener is listener:
            try:
                stream, _ = listener.accept()
            except OSError:  # it is closed, or there are no descriptors left for now
                time.sleep(_PAUSE_S)
                continue
            if _is_own_user(stream):
                take(stream, -1)
            else:
                stream.close()


def _is_own_user(stream: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())
