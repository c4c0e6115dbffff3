"""A host's vote: answered from its log, by any of its ranks, or by its launcher in the place of those that have ended.

The launcher has made the sockets at which its ranks listen, so other hosts reach it where they reached the rank. Its
answers also say which processes have ended, which nobody else could tell where no rank of a host is left.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from moe_serve.dispatch.hosts.handshake import MOST_NUMBER, VOTES, Party, receive
from moe_serve.dispatch.votes import Log

IDLE_S = 30.0  # a connection without requests ends
ANSWER_HEAD = struct.Struct("<qq")  # the incarnation of the log; ranks of the host without a process, as bits


def answer_votes(connected: socket.socket, log: Log, ended: Callable[[], int] = lambda: 0) -> None:
    """Answers the requests of a rank of another host until it ends the connection. ended: as in ANSWER_HEAD"""
    votes = log.format
    with connected, contextlib.suppress(OSError, ValueError):
        while True:
            for request in votes.decode(receive(connected, votes.num_bytes, time.monotonic() + IDLE_S)):
                answer = log.answer(request)
                connected.sendall(ANSWER_HEAD.pack(log.incarnation, ended()) + votes.encode(answer))


class StandIn:
    """Listens in the place of ranks of this host that have ended, until `close`."""

    def __init__(self, key: bytes, listeners: Mapping[int, socket.socket], log: Log):
        """key: of the launch;  listeners: of the ranks of this host;  log: of this host"""
        self._key, self._listeners, self._log = key, dict(listeners), log
        self._here: frozenset[int] = frozenset()
        self._ended = 0
        self._closes = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="votes of this host", daemon=True)
        self._thread.start()

    def stand_for(self, ranks: Iterable[int], ended: Iterable[int]) -> None:
        """Listens for these ranks from now on, and for no others.

        ended: those of them that have no process now; for the others a new one has been started
        """
        self._ended = sum(1 << rank for rank in ended)
        if (new := frozenset(ranks)) != self._here:
            self._here = new
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Ends the thread. The listeners are the caller's."""
        self._closes = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closes:
            at = {self._listeners[rank].fileno(): rank for rank in self._here}
            poller = select.poll()
            for descriptor in (self._wake, *at):
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll():
                if descriptor == self._wake:
                    os.eventfd_read(descriptor)
                else:
                    self._take(at[descriptor])

    def _take(self, rank: int) -> None:
        listener = self._listeners[rank]
        with contextlib.suppress(OSError, RuntimeError):  # it has gone again; or no thread is left, and it asks again
            listener.setblocking(False)
            connected, _ = listener.accept()
            threading.Thread(target=self._serve, args=(rank, connected), daemon=True).start()

    def _serve(self, rank: int, connected: socket.socket) -> None:
        own = Party(rank, MOST_NUMBER, self._key, self._listeners[rank].getsockname()[:2])
        with connected, contextlib.suppress(OSError):
            if not own.welcome(connected, lambda rank: 0, (VOTES,)).problem:
                answer_votes(connected, self._log, lambda: self._ended)
