"""A host's vote: answered from its log, by any of its ranks, or by its launcher where they cannot.

The launcher has made the sockets at which its ranks listen, so other hosts reach it where they reach the rank. Its
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

from moe_serve.dispatch.hosts.handshake import MOST_NUMBER, VOTES, Party
from moe_serve.dispatch.votes import Log
from moe_serve.socket_bytes import receive

_IDLE_S = 30.0  # a connection without requests ends
_PATIENCE_S = 0.2  # for which a connection waits for its rank, which takes it within microseconds
_LOOK_S = 0.01
ANSWER_HEAD = struct.Struct("<qq")  # the incarnation of the log; ranks of the host without a process, as bits


def answer_votes(connected: socket.socket, log: Log, ended: Callable[[], int] = lambda: 0) -> None:
    """Answers the requests of a rank of another host until it ends the connection. ended: as in ANSWER_HEAD"""
    votes = log.format
    with connected, contextlib.suppress(OSError, ValueError):
        while True:
            for request in votes.decode(receive(connected, votes.num_bytes, until_s=time.monotonic() + _IDLE_S)):
                answer = log.answer(request)
                connected.sendall(ANSWER_HEAD.pack(log.incarnation, ended()) + votes.encode(answer))


class StandIn:
    """Takes what comes for ranks of this host that have ended, and what no other one takes in time, until `close`.

    A rank that is stopped, or that a new process is just about to be, takes nothing.
    """

    def __init__(self, key: bytes, listeners: Mapping[int, socket.socket], log: Log):
        """key: of the launch;  listeners: of the ranks of this host;  log: of this host"""
        self._key, self._listeners, self._log = key, dict(listeners), log
        self._ended = 0
        self._closes = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="votes of this host", daemon=True)
        self._thread.start()

    def note_ended(self, ranks: Iterable[int]) -> None:
        """Notes which ranks have no process now."""
        self._ended = sum(1 << rank for rank in ranks)

    def close(self) -> None:
        """Ends the thread. The listeners are the caller's."""
        self._closes = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        at = {listener.fileno(): rank for rank, listener in self._listeners.items()}
        poller = select.poll()
        for descriptor in (self._wake, *at):
            poller.register(descriptor, select.POLLIN)
        waits_since_s: dict[int, float] = {}  # by rank
        while not self._closes:
            ready, now_s = [descriptor for descriptor, _ in poller.poll()], time.monotonic()
            waits_since_s = {at[each]: waits_since_s.get(at[each], now_s) for each in ready if each in at}
            for rank, since_s in waits_since_s.items():
                if self._ended >> rank & 1 or now_s - since_s > _PATIENCE_S:
                    self._take(rank)
            time.sleep(_LOOK_S)

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
