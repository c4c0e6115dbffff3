"""How a connection between hosts begins: both ends prove themselves, and a process that was replaced learns it.

Each connection is authenticated in both directions by a key that only the processes of the launch know (HMAC-SHA256
over the nonces of both ends, their ranks, numbers and the purpose); data are not encrypted, as with gloo and NCCL. Both
ends then send more than a packet holds, so that a path that loses large packets is found here and not in a step.

A rank's processes are numbered in a launch. Each end says its own number and the highest one that it has seen of the
other: whoever is older than that is refused for good, however late it wakes.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_serve.errors import LARGE_PACKETS_LOST, ReplacedError
from moe_serve.socket_bytes import receive

Address = tuple[str, int]
PURPOSES = ROWS, VOTES, SPEED, EXPERTS, PREFIXES = 1, 2, 3, 4, 6  # what a connection between ranks is for
PAGES = 5  # and one of a prefill rank with the host of the decode ranks, whose launcher has this number as its "rank":
PAGES_TAKER = 0
HANDSHAKE_S = 5.0
MOST_NUMBER = 2**32 - 1  # of a process
_NONCE_BYTES, _PROOF_BYTES = 16, 32
# magic, speaking rank, the rank it wants, purpose, their numbers, nonce, port and host of the one that speaks
_HELLO = struct.Struct("<8sHHIII16sI46s")
_MAGIC = b"moelink3"
_PROBE = bytes(32 << 10)  # several packets, jumbo frames too
_ACCEPTS, _REPLACED, _CONNECTS = b"accepts", b"replaced", b"connects"  # what a proof says


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a socket at which a rank listens: at this port, or at any where it is taken.

    host: an address of this host;  port: where the others know the rank; 0: nowhere
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError:
        return socket.create_server((host, 0), family=family)


class Visit(NamedTuple):
    """Who has connected, and what for.

    number: of its process;  address: where it listens;  problem: why the connection is of no use; "": it is
    """

    rank: int
    number: int
    purpose: int
    address: Address
    problem: str = ""


@dataclass(frozen=True)
class Party:
    """One end: the process of a rank, or the launcher in the place of one that has ended.

    number: processes that were this rank before, in the same launch;  address: where it listens
    """

    rank: int
    number: int
    key: bytes
    address: Address

    def dial(self, peer: int, address: Address, peer_number: int, purpose: int, deadline_s: float) -> socket.socket:
        """Returns a connection with a rank that has proved to be of this launch. peer_number: the highest seen of it

        Raises ReplacedError where it knows a newer process of this rank, else OSError.
        """
        until_s = time.monotonic() + deadline_s
        try:
            connected = socket.create_connection(address, timeout=deadline_s)
        except TimeoutError:
            text = f"no answer from {text_of(address)} within {deadline_s:g} s: a firewall drops it, or no such host"
            raise OSError(text) from None
        except OSError as error:
            raise OSError(f"{text_of(address)}: {error.strerror or error}") from None
        try:
            host, port = self.address
            numbers, nonce = (self.number, peer_number), secrets.token_bytes(_NONCE_BYTES)
            hello = _HELLO.pack(_MAGIC, self.rank, peer, purpose, *numbers, nonce, port, host.encode())
            connected.sendall(hello)
            nonce = receive(connected, _NONCE_BYTES, until_s=until_s)
            proof = receive(connected, _PROOF_BYTES, until_s=until_s)
            if hmac.compare_digest(proof, self._proof(_REPLACED, hello, nonce)):
                raise self.replaced()
            if not hmac.compare_digest(proof, self._proof(_ACCEPTS, hello, nonce)):
                raise OSError("it has another key, so it belongs to another launch")
            connected.sendall(self._proof(_CONNECTS, hello, nonce))
            _probe(connected, until_s)
        except TimeoutError:
            connected.close()
            text = "takes connections and says nothing: another program listens there, or packets are lost"
            raise OSError(f"{text_of(address)} {text}") from None
        except (OSError, ReplacedError):
            connected.close()
            raise
        return connected

    def welcome(
        self, connected: socket.socket, newest: Callable[[int], int | None], purposes: Sequence[int] = PURPOSES
    ) -> Visit:
        """Lets a rank prove itself that has connected.

        newest(rank): highest number seen of it; None: it may not come;  purposes: for which it may
        Raises ReplacedError where that rank knows a newer process in the place of this one, else OSError.
        """
        until_s, nonce = time.monotonic() + HANDSHAKE_S, secrets.token_bytes(_NONCE_BYTES)
        hello = receive(connected, _HELLO.size, until_s=until_s)
        magic, rank, here, purpose, number, own_number, _, port, host = _HELLO.unpack(hello)
        seen = newest(rank) if magic == _MAGIC and here == self.rank and purpose in purposes else None
        if seen is None:
            raise OSError("it is no rank of this launch")
        connected.sendall(nonce + self._proof(_REPLACED if number < seen else _ACCEPTS, hello, nonce))
        if number < seen:
            raise OSError(f"process {number} of rank {rank} was replaced by process {seen}")
        proof = receive(connected, _PROOF_BYTES, until_s=until_s)
        if not hmac.compare_digest(proof, self._proof(_CONNECTS, hello, nonce)):
            raise OSError("it has not proved to be of this launch")
        if self.number < own_number:
            raise self.replaced()
        visit = Visit(rank, number, purpose, (host.rstrip(b"\0").decode(errors="replace"), port))
        try:
            _probe(connected, until_s)
        except OSError as error:
            return visit._replace(problem=str(error))
        return visit

    def replaced(self) -> ReplacedError:
        """Returns the error with which this process ends."""
        text = f"process {self.number} of rank {self.rank} was replaced by a newer one, with which the others go on"
        return ReplacedError(f"{text}; this one ends")

    def _proof(self, says: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.new(self.key, says + hello + nonce, hashlib.sha256).digest()


def _probe(connected: socket.socket, until_s: float) -> None:
    """Sends and takes more than a packet holds. Raises OSError where it does not come through."""
    try:
        connected.settimeout(max(until_s - time.monotonic(), 0.001))
        connected.sendall(_PROBE)
        receive(connected, len(_PROBE), until_s=until_s)
    except TimeoutError:
        raise OSError(LARGE_PACKETS_LOST) from None
    except OSError as error:
        raise OSError(f"{error.strerror or error}, as where {LARGE_PACKETS_LOST}") from None


def key_of_launch(token: str, launch_id: int) -> bytes:
    """Returns the key that the processes of a launch prove to each other. token: of the system"""
    return hmac.digest(token.encode(), f"between hosts {launch_id}".encode(), "sha256")


def text_of(address: Address) -> str:
    """Returns an address in words."""
    return f"{address[0]} port {address[1]}"
