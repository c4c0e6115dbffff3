"""Connections of one rank with ranks of other hosts: dialled, accepted, authenticated, and made anew when they end.

Of two ranks the higher one dials. A rank that is started anew dials all, since only it knows where it listens now, and
says so. A thread keeps the listener open and dials again as long as a rank has no connection; the newest one counts. It
also dials where a connection makes no progress: a new one comes as soon as a cable is mended, while the kernel would
wait as long as it was cut. How a connection begins, and who is refused, stands in handshake.py.
"""

import contextlib
import ctypes
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moe_serve.dispatch.hosts.handshake import HANDSHAKE_S, ROWS, SPEED, Address, Party, Visit, text_of
from moe_serve.dispatch.hosts.speed import answer
from moe_serve.errors import PeerError, ReplacedError
from moe_serve.log import get_logger

log = get_logger(__name__)
_MOST_HANDSHAKES = 64  # at once, of peers that have not proved anything yet
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two dials
_STUCK_RESENT = 3  # data that the kernel has sent so often again in a row, within 1.4 s, find no way
_LOOK_S = 1.0  # how often that is looked for
_STEADY_S = 1.0  # a connection that has stood so long ends the series of failures before it


@dataclass
class _Peer:
    """A rank of another host, under the lock of `Connections`.

    dials: whether this rank dials it;  at_s: not before;  why: the last dial or handshake failed; "": it did not
    number: the highest of its processes that has connected
    """

    address: Address
    dials: bool
    is_dialled: bool = False
    at_s: float = 0.0
    pause_s: float = _LEAST_PAUSE_S
    connected_s: float = 0.0
    why: str = ""
    number: int = 0


class Connections:
    """Keeps the connections of a link (link.c), until `close`.

    takers:   by purpose, who takes a connection that a rank has dialled for it; of rows and speed, this class does
    refused:  connections that did not prove to be of this launch, and of processes that were replaced
    replaced: a newer process is this rank; None: none is known
    """

    def __init__(
        self, library: ctypes.CDLL, link: int, rank: int, number: int, key: bytes, listener: socket.socket,
        quiet_s: float, named: Callable[[int], str],
    ):  # fmt: skip
        """number: processes that were this rank before

        quiet_s: a connection whose peer's kernel gives no sign for so long has ended;  named: a rank, for people
        """
        self.takers: dict[int, Callable[[socket.socket, int], object]] = {}
        self.refused = 0
        self.replaced: ReplacedError | None = None
        self._library, self._link = library, link
        self._quiet_s, self._named = quiet_s, named
        self._listener = listener
        self.own = Party(rank, number, key, listener.getsockname()[:2])
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._handshakes: list[socket.socket] = []  # the oldest first
        self._ends = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connections between hosts", daemon=True)

    def start(self, addresses: Mapping[int, Address], dialled: Iterable[int]) -> None:
        """Starts to connect. addresses: where the ranks of other hosts listen;  dialled: those that this rank dials"""
        dialled = set(dialled)
        self._peers = {peer: _Peer(address, peer in dialled) for peer, address in addresses.items()}
        self._listener.settimeout(0)
        self._thread.start()

    def wait(self, deadline_s: float, tries_once: bool = False) -> list[int]:
        """Returns the ranks without a connection: none, or those left after so many seconds.

        tries_once: it does not wait longer for a rank whose first dial has failed
        """

        def is_done() -> bool:
            return all(tries_once and self._peers[rank].why for rank in self.missing())

        with self._changed:
            self._changed.wait_for(is_done, deadline_s)
        return self.missing()

    @property
    def addresses(self) -> dict[int, Address]:
        """Where this rank and those of other hosts listen now."""
        return {self.own.rank: self.own.address} | {rank: peer.address for rank, peer in self._peers.items()}

    def missing(self) -> list[int]:
        """Returns the ranks of other hosts with which there is no connection now."""
        return [peer for peer in self._peers if self._is_missing(peer)]

    def why_missing(self, rank: int) -> str:
        """Returns what is known of why there is no connection with a rank."""
        peer = self._peers[rank]
        if peer.why:
            return peer.why
        if self._library.link_generation(self._link, rank):
            return os.strerror(self._library.link_error(self._link, rank))
        if peer.dials:
            return f"no answer from {text_of(peer.address)} so far"
        return f"it has not connected to {text_of(self.own.address)}"

    def not_joined(self, rank: int, deadline_s: float) -> PeerError:
        """Returns the error for a rank that has not come in time."""
        text = f"{self._named(self.own.rank)} has no connection with {self._named(rank)} after {deadline_s:g} s"
        others = f"; {self.refused} peers without the key of this launch have connected" if self.refused else ""
        advice = "open TCP between the hosts for all ports, or name the interface (GLOO_SOCKET_IFNAME)"
        return PeerError(f"{text} ({self.why_missing(rank)}{others}); {advice}", rank, "start", 0)

    def dial(self, rank: int, purpose: int, deadline_s: float) -> socket.socket:
        """Returns a connection with a rank that has proved to be of this launch. Raises OSError."""
        if self.replaced is not None:
            raise OSError(str(self.replaced))
        peer = self._peers.get(rank)
        if peer is None:
            raise OSError(f"there is no rank {rank} on another host")
        try:
            return self.own.dial(rank, peer.address, peer.number, purpose, deadline_s)
        except ReplacedError as error:
            self.replaced = error
            raise OSError(str(error)) from None

    def close(self) -> None:
        """Ends the thread and closes the listener. Connections belong to the link."""
        with self._changed:
            if self._ends:
                return
            self._ends = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wake)
        self._listener.close()

    # --- the thread ---

    def _run(self) -> None:
        news = self._library.link_news(self._link)
        poller = select.poll()
        for descriptor in (self._listener.fileno(), self._wake, news):
            poller.register(descriptor, select.POLLIN)
        while not self._ends:
            self._note_ended()
            pause_s = self._dial_missing()
            for descriptor, _ in poller.poll(1000 * pause_s + 1):
                if descriptor == self._listener.fileno():
                    self._take()
                else:
                    os.eventfd_read(descriptor)

    def _note_ended(self) -> None:
        with self._changed:
            for rank, peer in self._peers.items():
                if not peer.connected_s or not (error := self._library.link_error(self._link, rank)):
                    continue
                text = "rank %d has no connection with %s any more: %s"
                log.info(text, self.own.rank, self._named(rank), os.strerror(error))
                now_s = time.monotonic()
                if now_s - peer.connected_s > _STEADY_S:
                    peer.pause_s = _LEAST_PAUSE_S
                peer.connected_s, peer.at_s = 0.0, now_s + self._lengthen(peer)

    def _dial_missing(self) -> float:
        """Dials the ranks whose time has come. Returns the seconds until the next look."""
        now_s = time.monotonic()
        pauses_s = [_LOOK_S]
        with self._changed:
            for rank, peer in self._peers.items() if self.replaced is None else ():
                if not peer.dials or peer.is_dialled or not (self._is_missing(rank) or self._is_stuck(rank)):
                    continue
                if peer.at_s <= now_s and _in_thread(self._dial_for_rows, rank, peer):
                    peer.is_dialled = True
                else:
                    pauses_s.append(max(peer.at_s - now_s, _LEAST_PAUSE_S))
        return min(pauses_s)

    def _is_missing(self, rank: int) -> bool:
        return bool(self._library.link_error(self._link, rank))

    def _is_stuck(self, rank: int) -> bool:
        return int(self._library.link_resent(self._link, rank)) >= _STUCK_RESENT

    def _lengthen(self, peer: _Peer) -> float:
        """Returns how long to pause now; next time it is longer. Two ranks that dial each other do not stay in step."""
        pause_s, peer.pause_s = peer.pause_s, min(2 * peer.pause_s, _LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)

    def _dial_for_rows(self, rank: int, peer: _Peer) -> None:
        why, number = "", peer.number
        try:
            self._attach(rank, self.dial(rank, ROWS, HANDSHAKE_S), number)
        except OSError as error:
            why = str(error.strerror or error)
        with self._changed:
            peer.is_dialled, peer.why = False, why
            self._changed.notify_all()
            if why:
                peer.at_s = time.monotonic() + self._lengthen(peer)
            if not self._ends:
                os.eventfd_write(self._wake, 1)

    def _take(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left
            time.sleep(_LEAST_PAUSE_S)
            return
        with self._changed:
            self._handshakes.append(connected)
            if len(self._handshakes) > _MOST_HANDSHAKES:  # a rank is done long before it is the oldest of so many
                with contextlib.suppress(OSError):
                    self._handshakes.pop(0).shutdown(socket.SHUT_RDWR)
        if not _in_thread(self._welcome, connected):
            self._end_handshake(connected)
            connected.close()

    def _end_handshake(self, connected: socket.socket) -> None:
        with self._changed:
            if connected in self._handshakes:
                self._handshakes.remove(connected)

    def _newest(self, rank: int) -> int | None:
        return self._peers[rank].number if rank in self._peers and self.replaced is None else None

    def _welcome(self, connected: socket.socket) -> None:
        """Takes a connection of a rank that proves itself."""
        taken = False
        try:
            visit = self.own.welcome(connected, self._newest)
            self._end_handshake(connected)
            taken = self._take_in(visit, connected)
        except OSError:
            self.refused += 1
        except ReplacedError as error:
            self.replaced = error
        finally:
            self._end_handshake(connected)
            if not taken:
                connected.close()

    def _take_in(self, visit: Visit, connected: socket.socket) -> bool:
        """Returns whether somebody has the connection now."""
        with self._changed:
            peer = self._peers[visit.rank]
            if visit.number < peer.number:
                return False
            peer.number, peer.address, peer.why = visit.number, visit.address, visit.problem
        if visit.problem:
            return False
        if visit.purpose == ROWS:
            self._attach(visit.rank, connected, visit.number)
            return True
        if visit.purpose in self.takers:
            self.takers[visit.purpose](connected, visit.rank)
            return True
        if visit.purpose == SPEED:
            answer(connected)
        return False

    def _attach(self, rank: int, connected: socket.socket, number: int) -> None:
        """Hands a connection to the link. number: of the process at the other end, as known when it began"""
        quiet_s = max(1, round(self._quiet_s / 4))
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_USER_TIMEOUT, max(1, round(1000 * self._quiet_s))),
            (socket.TCP_KEEPIDLE, quiet_s),
            (socket.TCP_KEEPINTVL, quiet_s),
            (socket.TCP_KEEPCNT, 3),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setblocking(False)
        with self._changed:
            if self._ends or number < self._peers[rank].number:
                connected.close()
                return
            if again := self._library.link_generation(self._link, rank):
                text = "rank %d is connected with %s again (connection %d)"
                log.info(text, self.own.rank, self._named(rank), again + 1)
            self._library.link_attach(self._link, rank, connected.detach())
            self._peers[rank].why, self._peers[rank].connected_s = "", time.monotonic()
            self._changed.notify_all()


def _in_thread(run: Callable[..., None], *arguments: object) -> bool:
    """Returns whether there was a thread for it."""
    try:
        threading.Thread(target=run, args=arguments, daemon=True).start()
    except RuntimeError:
        return False
    return True
