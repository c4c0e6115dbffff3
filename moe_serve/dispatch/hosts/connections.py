"""Connections of one rank with ranks of other hosts: dialled, accepted, authenticated, and made anew when they end.

Of two ranks the higher one dials. A rank that is started anew dials all, since only it knows where it listens now, and
says so. A thread keeps the listener open and dials again as long as a rank has no connection; the newest one counts. It
also dials where a connection makes no progress: a new one comes as soon as a cable is mended, while the kernel would
wait as long as it was cut.

Each connection is authenticated in both directions by a key that only the ranks of the launch know (HMAC-SHA256 over
the nonces of both ends, their ranks and the purpose); data are not encrypted, as with gloo and NCCL. Both ends then
send more than a packet holds, so that a path that loses large packets is found here and not in a step.
"""

import contextlib
import ctypes
import hashlib
import hmac
import os
import random
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moe_serve.dispatch.hosts.speed import answer
from moe_serve.errors import LARGE_PACKETS_LOST, PeerError
from moe_serve.log import get_logger

log = get_logger(__name__)
Address = tuple[str, int]
ROWS, VOTES, SPEED = 1, 2, 3  # what a connection is for
_HELLO = struct.Struct("<8sHHI16sI46s")  # magic, speaking rank, the rank it wants, purpose, nonce, its port and host
_MAGIC = b"moelink2"
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_PROBE = bytes(32 << 10)  # several packets, jumbo frames too
_HANDSHAKE_S = 5.0
_MOST_HANDSHAKES = 64  # at once, of peers that have not proved anything yet
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two dials
_STUCK_RESENT = 3  # data that the kernel has sent so often again in a row, within 1.4 s, find no way
_LOOK_S = 1.0  # how often that is looked for
_STEADY_S = 1.0  # a connection that has stood so long ends the series of failures before it


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns the listener of a rank: at this port, or at any where it is taken.

    port: of the process before in the place of this one; 0: there was none
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError:
        return socket.create_server((host, 0), family=family)


@dataclass
class _Peer:
    """A rank of another host, under the lock of `Connections`.

    dials: whether this rank dials it;  at_s: not before;  why: the last dial or handshake failed; "": it did not
    """

    address: Address
    dials: bool
    is_dialled: bool = False
    at_s: float = 0.0
    pause_s: float = _LEAST_PAUSE_S
    connected_s: float = 0.0
    why: str = ""


class Connections:
    """Keeps the connections of a link (link.c), until `close`.

    on_votes: takes a connection that a rank has dialled for votes; None: nobody does
    refused:  connections that did not prove to be of this launch
    """

    def __init__(self, library: ctypes.CDLL, link: int, rank: int, key: bytes, listener: socket.socket, quiet_s: float):
        """quiet_s: a connection whose peer's kernel gives no sign for so long has ended"""
        self.on_votes: Callable[[socket.socket, int], object] | None = None
        self.refused = 0
        self._library, self._link = library, link
        self._rank, self._key, self._quiet_s = rank, key, quiet_s
        self._listener = listener
        self._own: Address = listener.getsockname()[:2]
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
        return {self._rank: self._own} | {rank: peer.address for rank, peer in self._peers.items()}

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
            return f"no answer from {_text(peer.address)} so far"
        return f"it has not connected to {_text(self._own)}"

    def not_joined(self, rank: int, deadline_s: float) -> PeerError:
        """Returns the error for a rank that has not come in time."""
        text = f"rank {self._rank} has no connection with rank {rank} on another host after {deadline_s:g} s"
        others = f"; {self.refused} peers without the key of this launch have connected" if self.refused else ""
        advice = "open TCP between the hosts for all ports, or name the interface (GLOO_SOCKET_IFNAME)"
        return PeerError(f"{text} ({self.why_missing(rank)}{others}); {advice}", rank, "start", 0)

    def dial(self, rank: int, purpose: int, deadline_s: float) -> socket.socket:
        """Returns a connection with a rank that has proved to be of this launch. Raises OSError."""
        address = self._peers[rank].address
        until_s = time.monotonic() + deadline_s
        try:
            connected = socket.create_connection(address, timeout=deadline_s)
        except TimeoutError:
            text = f"no answer from {_text(address)} within {deadline_s:g} s: a firewall drops it, or no such host"
            raise OSError(text) from None
        except OSError as error:
            raise OSError(f"{_text(address)}: {error.strerror or error}") from None
        try:
            host, port = self._own
            words = _MAGIC, self._rank, rank, purpose, secrets.token_bytes(_NONCE_BYTES), port, host.encode()
            hello = _HELLO.pack(*words)
            connected.sendall(hello)
            nonce = _receive(connected, _NONCE_BYTES, until_s)
            proof = _receive(connected, _PROOF_BYTES, until_s)
            if not hmac.compare_digest(proof, _proof(self._key, b"accepts", hello, nonce)):
                raise OSError("it has another key, so it belongs to another launch")
            connected.sendall(_proof(self._key, b"connects", hello, nonce))
            _probe(connected, until_s)
        except TimeoutError:
            connected.close()
            text = "takes connections and says nothing: another program listens there, or packets are lost"
            raise OSError(f"{_text(address)} {text}") from None
        except OSError:
            connected.close()
            raise
        return connected

    def close(self) -> None:
        """Ends the thread and closes the listener. Connections belong to the link."""
        with self._changed:
            if self._ends:
                return
            self._ends = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    # --- the thread ---

    def _run(self) -> None:
        news = self._library.link_news(self._link)
        poller = select.poll()
        for descriptor in (self._listener.fileno(), self._wake, news):
            poller.register(descriptor, select.POLLIN)
        try:
            while not self._ends:
                self._note_ended()
                pause_s = self._dial_missing()
                for descriptor, _ in poller.poll(1000 * pause_s + 1):
                    if descriptor == self._listener.fileno():
                        self._take()
                    else:
                        os.eventfd_read(descriptor)
        finally:
            os.close(self._wake)

    def _note_ended(self) -> None:
        with self._changed:
            for rank, peer in self._peers.items():
                if not peer.connected_s or not (error := self._library.link_error(self._link, rank)):
                    continue
                log.info("rank %d has no connection with rank %d any more: %s", self._rank, rank, os.strerror(error))
                now_s = time.monotonic()
                if now_s - peer.connected_s > _STEADY_S:
                    peer.pause_s = _LEAST_PAUSE_S
                peer.connected_s, peer.at_s = 0.0, now_s + self._lengthen(peer)

    def _dial_missing(self) -> float:
        """Dials the ranks whose time has come. Returns the seconds until the next look."""
        now_s = time.monotonic()
        pauses_s = [_LOOK_S]
        with self._changed:
            for rank, peer in self._peers.items():
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
        why = ""
        try:
            self._attach(rank, self.dial(rank, ROWS, _HANDSHAKE_S))
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

    def _welcome(self, connected: socket.socket) -> None:
        """Takes a connection of a rank that proves itself."""
        source, purpose, proved, why = -1, 0, False, ""
        try:
            until_s = time.monotonic() + _HANDSHAKE_S
            hello = _receive(connected, _HELLO.size, until_s)
            magic, source, here, purpose, _, port, host = _HELLO.unpack(hello)
            if magic == _MAGIC and here == self._rank and source in self._peers:
                nonce = secrets.token_bytes(_NONCE_BYTES)
                connected.sendall(nonce + _proof(self._key, b"accepts", hello, nonce))
                proof = _receive(connected, _PROOF_BYTES, until_s)
                proved = hmac.compare_digest(proof, _proof(self._key, b"connects", hello, nonce))
            if not proved:
                raise OSError("it has not proved to be of this launch")
            _probe(connected, until_s)
            self._peers[source].address = host.rstrip(b"\0").decode(), port
            if purpose == ROWS:
                self._attach(source, connected)
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            self._end_handshake(connected)
        if not proved:
            self.refused += 1
        elif why:
            self._peers[source].why = why
        elif purpose == VOTES and self.on_votes is not None:
            self.on_votes(connected, source)
        elif purpose == SPEED:
            answer(connected)
        if why or purpose == SPEED or (purpose == VOTES and self.on_votes is None):
            connected.close()

    def _attach(self, rank: int, connected: socket.socket) -> None:
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
            if self._ends:
                connected.close()
                return
            if again := self._library.link_generation(self._link, rank):
                log.info("rank %d is connected with rank %d again (connection %d)", self._rank, rank, again + 1)
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


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce, hashlib.sha256).digest()


def _probe(connected: socket.socket, until_s: float) -> None:
    """Sends and takes more than a packet holds. Raises OSError where it does not come through."""
    try:
        connected.settimeout(max(until_s - time.monotonic(), 0.001))
        connected.sendall(_PROBE)
        _receive(connected, len(_PROBE), until_s)
    except TimeoutError:
        raise OSError(LARGE_PACKETS_LOST) from None
    except OSError as error:
        raise OSError(f"{error.strerror or error}, as where {LARGE_PACKETS_LOST}") from None


def _receive(connected: socket.socket, size: int, until_s: float) -> bytes:
    data = b""
    while len(data) < size:
        connected.settimeout(max(until_s - time.monotonic(), 0.001))
        part = connected.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data


def _text(address: Address) -> str:
    return f"{address[0]} port {address[1]}"
