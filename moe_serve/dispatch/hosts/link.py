"""The connections of one rank with the other hosts, and what goes through them: see link.c.

Every rank connects to one rank of each other host: the one that has its number there, counted round. What it has to say
to any rank of that host goes over this one connection.

Each connection is authenticated in both directions by a key that only the ranks of the launch know (HMAC-SHA256
over the nonces of both ends and their ranks); data are not encrypted, as with gloo and NCCL.
"""

import ctypes
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from moe_serve.c_library import load_c_library
from moe_serve.errors import ConfigError, PeerError

_SOURCE = Path(__file__).with_name("link.c")
_ARGUMENTS = {
    "link_new": 0, "link_connect": 3, "link_accept": 2, "link_region": 5, "link_start": 1, "link_free": 1,
    "link_poll": 1, "link_write": 9, "link_rows": 12, "link_results": 11, "link_out_error": 2, "link_in_error": 2,
    "link_bytes": 2, "link_unsent": 1,
}  # fmt: skip
_HELLO = struct.Struct("<8sII16s")  # magic, the rank that speaks, the rank that it takes the other one for, its nonce
_MAGIC = b"moelink1"
_PROOF_BYTES = 32
_MOST_UNAUTHENTICATED = 1000  # connections before a rank gives up
_HANDSHAKE_S = 5.0  # of one connection
_MOST_SPACES = 64


@dataclass(frozen=True)
class Hosts:
    """Which ranks share a host.

    of_rank: a number for each rank, equal for ranks of one host, counted from 0 in the order of their first ranks
    """

    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, marks: Sequence[object]) -> "Hosts":
        """Returns hosts from something for each rank that is equal exactly for ranks of one host."""
        first = list(dict.fromkeys(marks))
        return cls(tuple(map(first.index, marks)))

    @property
    def num_hosts(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, host: int) -> list[int]:
        """Returns the ranks of a host, ascending."""
        return [rank for rank, its in enumerate(self.of_rank) if its == host]

    def entry(self, rank: int, host: int) -> int:
        """Returns the rank of another host that takes in what `rank` sends there."""
        there = self.ranks(host)
        return there[self.ranks(self.of_rank[rank]).index(rank) % len(there)]


class HostLink:
    """Writes into the memory of other hosts. Regions have the numbers of the ranks that they belong to.

    hosts: of all ranks;  others: the hosts that this rank is not on;  local_ranks: those on its own
    """

    def __init__(self, rank: int, hosts: Hosts):
        self.rank, self.hosts = rank, hosts
        own = hosts.of_rank[rank]
        self.others = [host for host in range(hosts.num_hosts) if host != own]
        self.local_ranks = hosts.ranks(own)
        self.local_mask = sum(1 << each for each in self.local_ranks)
        self._link, self._sockets = 0, list[socket.socket]()
        self._library, _ = load_c_library(_SOURCE, _ARGUMENTS)
        self._link = self._library.link_new()
        self._number: dict[int, int] = {}  # of the connection to each host
        self._sources: list[int] = []  # ranks whose frames come in here, by connection
        self._kept: list[object] = []  # memory that others write into
        self._num_spaces = 0
        self.poll: Callable[[], object] = partial(self._library.link_poll, self._link)
        """Takes in what other hosts have sent; for those who wait."""

    def connect(
        self, addresses: Sequence[tuple[str, int]], listener: socket.socket, key: bytes, deadline_s: float
    ) -> None:
        """Connects to all other hosts, and takes their connections; all ranks call it at once.

        addresses: host and port where each rank listens;  listener: this rank's own, closed afterwards
        key:       known to the ranks of this launch only
        Raises PeerError where a rank does not come within deadline_s.
        """
        until_s = time.monotonic() + deadline_s
        hosts, own = self.hosts, self.hosts.of_rank[self.rank]
        elsewhere = [rank for rank, host in enumerate(hosts.of_rank) if host != own]
        wanted = {rank for rank in elsewhere if hosts.entry(rank, own) == self.rank}
        accepted: dict[int, socket.socket] = {}
        refused = 0
        with listener, ThreadPoolExecutor(max(len(self.others), 1)) as threads:
            dialled = {
                host: threads.submit(self._dial, addresses[peer], peer, key, until_s)
                for host in self.others
                for peer in [hosts.entry(self.rank, host)]
            }
            while missing := wanted - accepted.keys():
                found = self._accept(listener, key, until_s, min(missing))
                if found is not None and found[0] in missing:
                    accepted[found[0]] = found[1]
                elif (refused := refused + 1) > _MOST_UNAUTHENTICATED:
                    raise self._not_joined(min(missing), "unauthenticated peers keep connecting to its port")
            connected_to = {host: future.result() for host, future in dialled.items()}
        for host, connected in connected_to.items():
            ranks = sum(1 << rank for rank in hosts.ranks(host))
            self._number[host] = self._library.link_connect(self._link, connected.fileno(), ranks)
        for source, connected in sorted(accepted.items()):
            self._library.link_accept(self._link, connected.fileno())
            self._sources.append(source)
        self._sockets = [*connected_to.values(), *(accepted[source] for source in self._sources)]
        for each in self._sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = self._library.link_start(self._link)
        if error:
            raise ConfigError(f"no thread for the connections between hosts: {os.strerror(error)}; raise ulimit -u")

    def share(self, regions: Sequence[Tensor]) -> "Space":
        """Lets other hosts write into memory of this one; all ranks call it in the same order.

        regions: one for each rank, of the same size everywhere; those of other hosts' ranks are this host's copies
        """
        number = self._num_spaces
        if number == _MOST_SPACES:
            raise ConfigError(f"more than {_MOST_SPACES} kinds of memory are shared between hosts; start again")
        self._num_spaces += 1
        self._kept.append(regions)
        for rank, region in enumerate(regions):
            assert region.data_ptr() % 8 == 0, "flags are aligned words"
            self._library.link_region(self._link, number, rank, region.data_ptr(), region.nbytes)
        return Space(self, Calls(self._library, self._link, self._number), number, regions)

    def lost(self) -> list[tuple[int, str]]:
        """Returns a rank at the other end of each connection that has ended, and why."""
        found = []
        for host, number in self._number.items():
            if error := self._library.link_out_error(self._link, number):
                found.append((self.hosts.entry(self.rank, host), os.strerror(error)))
        for number, source in enumerate(self._sources):
            if error := self._library.link_in_error(self._link, number):
                found.append((source, os.strerror(error)))
        return found

    def unsent(self) -> int | None:
        """Returns the rank at the other end of a connection that has not taken all that was given to it; None: none."""
        number = self._library.link_unsent(self._link)
        if not number:
            return None
        host = next(host for host, its in self._number.items() if its == number - 1)
        return self.hosts.entry(self.rank, host)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other hosts."""
        return sum(self._library.link_bytes(self._link, number) for number in self._number.values())

    def close(self) -> None:
        """Ends the connections; no other call may follow."""
        link, self._link = self._link, 0
        if link:
            self._library.link_free(link)
        for each in self._sockets:
            each.close()

    def __del__(self) -> None:
        self.close()

    def _dial(self, address: tuple[str, int], peer: int, key: bytes, until_s: float) -> socket.socket:
        """Returns a connection with a rank that has proved to be of this launch."""
        why = "nothing listens there"
        while time.monotonic() < until_s:
            try:
                connected = socket.create_connection(address, timeout=max(until_s - time.monotonic(), 0.001))
            except OSError as error:
                why = f"{address[0]} port {address[1]}: {error.strerror or error}"
                time.sleep(0.05)
                continue
            hello = _HELLO.pack(_MAGIC, self.rank, peer, secrets.token_bytes(16))
            try:
                connected.sendall(hello)
                nonce = _receive(connected, 16)
                if hmac.compare_digest(_receive(connected, _PROOF_BYTES), _proof(key, b"accepts", hello, nonce)):
                    connected.sendall(_proof(key, b"connects", hello, nonce))
                    return connected
                why = "it has another key, so it belongs to another launch"
            except OSError as error:
                why = str(error.strerror or error)
            connected.close()
            break
        raise self._not_joined(peer, why)

    def _accept(
        self, listener: socket.socket, key: bytes, until_s: float, missing: int
    ) -> tuple[int, socket.socket] | None:
        """Returns the next rank that connects and proves itself, or None for another peer."""
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connected, _ = listener.accept()
        except OSError:
            raise self._not_joined(missing, "it has not connected to this rank") from None
        try:
            connected.settimeout(max(min(until_s - time.monotonic(), _HANDSHAKE_S), 0.001))
            hello = _receive(connected, _HELLO.size)
            magic, source, here, _ = _HELLO.unpack(hello)
            if magic != _MAGIC or here != self.rank:
                connected.close()
                return None
            own = secrets.token_bytes(16)
            connected.sendall(own + _proof(key, b"accepts", hello, own))
            if not hmac.compare_digest(_receive(connected, _PROOF_BYTES), _proof(key, b"connects", hello, own)):
                connected.close()
                return None
        except OSError:
            connected.close()
            return None
        return source, connected

    def _not_joined(self, rank: int, why: str) -> PeerError:
        text = f"rank {self.rank} has no connection with rank {rank} on another host ({why})"
        return PeerError(f"{text}; open TCP between the hosts for all ports, or name the interface", rank, "start", 0)


@dataclass(frozen=True)
class Calls:
    """The C helper. at: where its data lie;  connections: the number of the one to each other host"""

    library: ctypes.CDLL
    at: int
    connections: dict[int, int]


class Space:
    """Memory of all ranks that hosts share by a link. All arguments are numbers and addresses, as in link.c."""

    def __init__(self, link: HostLink, calls: Calls, number: int, regions: Sequence[Tensor]):
        """regions: of all ranks, as they are mapped here"""
        self.link, self.regions = link, regions
        self._calls, self._number = calls, number

    def write(self, host: int, mask: int, offset: int, data: int, num_bytes: int, flag_offset: int, flag: int) -> None:
        """Copies bytes into regions of a host, and raises a flag in each of them. mask: regions as bits"""
        calls, to = self._calls, self._calls.connections[host]
        calls.library.link_write(calls.at, to, self._number, mask, offset, data, num_bytes, flag_offset, flag)

    def rows(self, host: int, *arguments: int) -> None:
        """Sends the rows of a dispatch to the ranks of a host."""
        calls = self._calls
        calls.library.link_rows(calls.at, calls.connections[host], self._number, *arguments)

    def results(self, rank: int, *arguments: int) -> None:
        """Sends the results of a rank's rows to it."""
        calls, host = self._calls, self.link.hosts.of_rank[rank]
        calls.library.link_results(calls.at, calls.connections[host], self._number, rank, *arguments)


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce, hashlib.sha256).digest()


def _receive(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data
