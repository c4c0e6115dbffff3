"""Measures every pair of ranks over TCP: reachability, latency, bandwidth, difference of clocks.

Each rank listens on the interface that gloo will use. A caller shows a secret that ranks have exchanged through the
store, and all that a listener reads is bounded.
"""

import contextlib
import hmac
import socket
import threading
from collections.abc import Iterator

import msgspec

from moe_serve.dispatch.hosts.speed import answer
from moe_serve.dispatch.hosts.speed import measure as measure_speed
from moe_serve.socket_bytes import receive

SECRET_BYTES = 16
_TIMEOUT_S = 5.0
_MAX_CALLERS = 64  # at once


class Door(msgspec.Struct, frozen=True):
    """The address at which a rank listens."""

    rank: int
    address: str
    port: int


class Pair(msgspec.Struct, frozen=True):
    """The measurements of one rank to another. error: why there are none, else ""

    latency_us: half of the median time of a message and its answer;  mbytes_per_s: sent;  clock_s: the other's time
    minus the own one
    """

    source: int
    target: int
    latency_us: float = 0.0
    mbytes_per_s: float = 0.0
    clock_s: float = 0.0
    error: str = ""


class Listener:
    """Answers callers that know the secret, from threads, until it is closed."""

    def __init__(self, address: str, secret: bytes):
        """Raises OSError where the address is not one of this host."""
        self._secret = secret
        self._room = threading.BoundedSemaphore(_MAX_CALLERS)
        self._socket = socket.create_server((address, 0), backlog=_MAX_CALLERS)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="doctor's listener", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # closed
            self._room.acquire()
            threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        try:
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_TIMEOUT_S)
                if hmac.compare_digest(receive(caller, SECRET_BYTES), self._secret):
                    answer(caller)
        finally:
            self._room.release()


def measure(rank: int, door: Door, secret: bytes) -> Pair:
    """Measures one pair: from this rank to another."""
    try:
        with socket.create_connection((door.address, door.port), timeout=_TIMEOUT_S) as peer:
            peer.sendall(secret)
            speed, clock_s = measure_speed(peer)
        return Pair(rank, door.rank, speed.delay_s * 1e6, speed.bytes_per_s / 1e6, clock_s)
    except OSError as error:
        return Pair(rank, door.rank, error=str(error) or type(error).__name__)


def partners(rank: int, num_ranks: int) -> Iterator[int]:
    """Yields the other ranks in an order in which at each turn all ranks form disjoint pairs (the circle method).

    With an odd number of ranks, one of them has nobody at each turn.
    """
    size = num_ranks + num_ranks % 2
    for turn in range(size - 1):
        if rank == size - 1:
            other = next(each for each in range(size - 1) if (2 * each - turn) % (size - 1) == 0)
        else:
            other = (turn - rank) % (size - 1)
            other = size - 1 if other == rank else other
        if other < num_ranks:
            yield other
