"""The link of one rank with the other hosts, and what goes through it: see link.c.

A rank has a connection with each rank of another host. What it has to say to any rank of that host goes through one of
them, the entry of that host: the rank that has its number among those that take part, counted round.
"""

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe_serve.c_library import load_c_library
from moe_serve.dispatch.hosts.connections import Connections
from moe_serve.dispatch.hosts.handshake import SPEED, Address
from moe_serve.dispatch.hosts.speed import Speed, measure
from moe_serve.errors import ConfigError, name_ranks
from moe_serve.log import get_logger
from moe_serve.process_facts import has_ended

_SOURCE = Path(__file__).with_name("link.c")
_ARGUMENTS = {
    "link_new": 0, "link_attach": 3, "link_region": 5, "link_start": 1, "link_free": 1, "link_poll": 1,
    "link_write": 9, "link_later": 6, "link_tell": 7, "link_rows": 12, "link_results": 11, "link_void": 2,
    "link_begin_epoch": 2, "link_guard": 2, "link_fence": 2, "link_error": 2, "link_generation": 2, "link_broken": 2,
    "link_news": 1, "link_queued": 2, "link_resent": 2, "link_bytes": 2, "link_posted": 1,
    "link_unsent": 2,
}  # fmt: skip
_MOST_SPACES = 64
_FENCE_S = 0.1  # a rank takes in what has come within microseconds, unless its process is stopped
_GUARD_WORD = 8  # of the head of a segment: on a cache line of its own
Int64Array = npt.NDArray[np.int64]
log = get_logger(__name__)


@dataclass(frozen=True)
class Hosts:
    """Which ranks share a host.

    of_rank: a number for each rank, equal for ranks of one host, counted from 0 in the order of their first ranks
    names:   of the hosts, for people
    """

    of_rank: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, marks: Sequence[object], names: Sequence[str] | None = None) -> "Hosts":
        """Returns hosts from something for each rank that is equal exactly for ranks of one host.

        names: of each rank's host; None: by number
        """
        first = list(dict.fromkeys(marks))
        called = [f"host {host}" for host in range(len(first))]
        if names is not None:
            called = [names[marks.index(mark)] for mark in first]
        return cls(tuple(map(first.index, marks)), tuple(called))

    def named(self, *ranks: int) -> str:
        """Returns ranks with their hosts, for people."""
        return name_ranks(ranks, lambda rank: self.names[self.of_rank[rank]])

    @property
    def num_hosts(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, host: int) -> list[int]:
        """Returns the ranks of a host, ascending."""
        return [rank for rank, its in enumerate(self.of_rank) if its == host]

    def elsewhere(self, rank: int) -> list[int]:
        """Returns the ranks of other hosts than this rank's, ascending."""
        return [other for other, host in enumerate(self.of_rank) if host != self.of_rank[rank]]

    def entry(self, rank: int, host: int, members: Iterable[int]) -> int | None:
        """Returns the member of another host that takes in what `rank` sends there; None: no member is there."""
        members = set(members)
        there = [each for each in self.ranks(host) if each in members]
        here = [each for each in self.ranks(self.of_rank[rank]) if each in members or each == rank]
        return there[here.index(rank) % len(there)] if there else None


class HostLink:
    """Writes into the memory of other hosts. Regions have the numbers of the ranks that they belong to.

    hosts: of all ranks;  others: the hosts that this rank is not on;  local_ranks: those on its own
    speed: of the slowest connection between two hosts, as measured at the start, and the longest delay; None: unknown
    """

    speed: Speed | None = None

    def __init__(self, rank: int, hosts: Hosts, key: bytes, listener: socket.socket, quiet_s: float, number: int = 0):
        """key: known to the processes of this launch only;  listener: of this rank, for life

        quiet_s: a connection ends when the other host's kernel gives no sign for so long
        number:  processes that were this rank before, in the same launch
        """
        self.rank, self.hosts = rank, hosts
        own = hosts.of_rank[rank]
        self.others = [host for host in range(hosts.num_hosts) if host != own]
        self.local_ranks = hosts.ranks(own)
        self._elsewhere = hosts.elsewhere(rank)
        self.local_mask = sum(1 << each for each in self.local_ranks)
        self._link = 0
        self._library, _ = load_c_library(_SOURCE, _ARGUMENTS)
        self._link = self._library.link_new()
        self._connections = Connections(self._library, self._link, rank, number, key, listener, quiet_s, hosts.named)
        self._entries: dict[int, int] = {}  # the rank that takes in what goes to each other host
        self._choose_entries(range(len(hosts.of_rank)))
        self._heads: dict[int, Int64Array] = {}
        self._kept: list[object] = []  # memory that others write into
        self.poll: Callable[[], object] = partial(self._library.link_poll, self._link)
        """Takes in what other hosts have sent; for those who wait."""

    def connect(self, addresses: Mapping[int, Address], deadline_s: float, is_replacement: bool = False) -> None:
        """Connects with all ranks of other hosts, and again whenever a connection ends, until `close`.

        addresses: where each of these ranks listens
        is_replacement: this rank is started anew beside others that serve; it goes on without those that do not come
        Raises PeerError where a rank does not come within deadline_s.
        """
        error = self._library.link_start(self._link)
        if error:
            raise ConfigError(f"no thread for the connections between hosts: {os.strerror(error)}; raise ulimit -u")
        dialled = [rank for rank in self._elsewhere if is_replacement or rank < self.rank]
        self._connections.start({rank: addresses[rank] for rank in self._elsewhere}, dialled)
        missing = self._connections.wait(deadline_s, tries_once=is_replacement)
        if missing and not is_replacement:
            raise self._connections.not_joined(missing[0], deadline_s)

    def take_dialled(self, purpose: int, take: Callable[[socket.socket, int], object]) -> None:
        """Hands each connection that a rank dials for a purpose to `take`, from a thread, with the rank's number."""
        self._connections.takers[purpose] = take

    def dial(self, rank: int, purpose: int, deadline_s: float) -> socket.socket:
        """Returns a new connection with a rank of another host, for VOTES, EXPERTS or PREFIXES. Raises OSError."""
        return self._connections.dial(rank, purpose, deadline_s)

    def measure(self, deadline_s: float) -> Speed | None:
        """Returns the speed of the network towards the next host, counted round; None: it could not be measured.

        The lowest rank of each host calls it at about the same time, so that every host sends and receives.
        """
        following = (self.hosts.of_rank[self.rank] + 1) % self.hosts.num_hosts
        rank = self.hosts.ranks(following)[0]
        try:
            with self._connections.dial(rank, SPEED, deadline_s) as connected:
                return measure(connected)[0]
        except OSError as error:
            log.warning("rank %d cannot measure the network towards rank %d: %s", self.rank, rank, error)
            return None

    def share(self, regions: Sequence[Tensor]) -> "Space":
        """Lets other hosts write into memory of this one; all ranks call it in the same order.

        regions: one for each rank, of the same size everywhere; those of other hosts' ranks are this host's copies
        """
        number = len(self._kept)
        if number == _MOST_SPACES:
            raise ConfigError(f"more than {_MOST_SPACES} kinds of memory are shared between hosts; start again")
        self._kept.append(regions)
        for rank, region in enumerate(regions):
            assert region.data_ptr() % 8 == 0, "flags are aligned words"
            self._library.link_region(self._link, number, rank, region.data_ptr(), region.nbytes)
        return Space(self, Calls(self._library, self._link, self._entries), number, regions)

    def guard(self, heads: Mapping[int, Int64Array]) -> None:
        """Takes the heads of the segments of this host's ranks, which all of them have mapped; the first ones count."""
        if not self._heads:
            self._heads = dict(heads)
            self._library.link_guard(self._link, _guard_of(self._heads[self.rank]))

    def leave_epoch(self, epoch: int, masked: Iterable[int] = ()) -> None:
        """Takes in no more frames of epochs before this one, and sends none: the step is void.

        A rank calls it before it proposes the epoch without the ranks `masked`. Those of its own host take in no more
        such frames either, from now on, whatever they do: one that was stopped while it took one in is killed.
        What this rank was given to send may change from then on.
        """
        self._library.link_void(self._link, epoch)
        for rank in masked:
            if rank in self._heads and rank != self.rank:
                self._fence(rank, epoch)

    def _fence(self, rank: int, epoch: int) -> None:
        head = self._heads[rank]
        until_s = time.monotonic() + _FENCE_S
        while not self._library.link_fence(_guard_of(head), epoch):
            pid = int(head[0])
            if not has_ended(pid):
                if time.monotonic() > until_s:
                    log.warning("rank %d, which is masked, was stopped while it wrote; process %d is killed", rank, pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)
            elif pid == head[0]:
                return

    def begin_epoch(self, epoch: int, members: Iterable[int]) -> None:
        """Begins an epoch of these ranks, with entries among them."""
        self._library.link_begin_epoch(self._link, epoch)
        self._choose_entries(members)

    def _choose_entries(self, members: Iterable[int]) -> None:
        members = set(members)
        self._entries.clear()
        for host in self.others:
            entry = self.hosts.entry(self.rank, host, members)
            if entry is not None:
                self._entries[host] = entry

    def broken(self) -> dict[int, str]:
        """Returns the ranks whose connection has ended in this epoch, and why: what they sent or were sent may be lost.

        A rank without a connection since before the epoch is not among them: frames wait for the first one.
        Raises ReplacedError as `check_not_replaced`.
        """
        self.check_not_replaced()
        return {rank: self._why(rank) for rank in self._elsewhere if self._library.link_broken(self._link, rank)}

    def check_not_replaced(self) -> None:
        """Raises ReplacedError where the others go on with a newer process of this rank."""
        if self._connections.replaced is not None:
            raise self._connections.replaced

    def down(self) -> dict[int, str]:
        """Returns the ranks with which there is no connection now, and why."""
        return {rank: self._why(rank) for rank in self._connections.missing()}

    @property
    def addresses(self) -> dict[int, Address]:
        """Where this rank and those of other hosts listen now, for a process that is started in the place of one."""
        return self._connections.addresses

    def generation(self, rank: int) -> int:
        """Returns how many connections with a rank there have been."""
        return int(self._library.link_generation(self._link, rank))

    def _why(self, rank: int) -> str:
        error = self._library.link_error(self._link, rank)
        return self._connections.why_missing(rank) if error else "its connection ended, and there is a new one"

    @property
    def refused(self) -> int:
        """Connections of peers that did not prove to be of this launch."""
        return self._connections.refused

    @property
    def poll_at(self) -> tuple[int, int]:
        """Where `poll` is for C: the function and its argument."""
        return _address(self._library, "link_poll"), self._link

    @property
    def posted(self) -> int:
        """What this rank has given to its connections so far, as a number for `unsent`."""
        return int(self._library.link_posted(self._link))

    def unsent(self, posted: int) -> int | None:
        """Returns the rank at the other end of a connection that has not taken all that was posted until then, or None.

        posted: a number that `posted` has given
        """
        number = self._library.link_unsent(self._link, posted)
        return number - 1 if number else None

    def queued(self, rank: int) -> int:
        """Returns the bytes for a rank that wait here or in the kernel: what is sent to it now goes behind them."""
        return int(self._library.link_queued(self._link, rank))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other hosts."""
        return sum(self._library.link_bytes(self._link, rank) for rank in self._elsewhere)

    def close(self) -> None:
        """Ends the connections; no other call may follow."""
        link, self._link = self._link, 0
        if link:
            self._connections.close()
            self._library.link_free(link)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class Calls:
    """The C helper. at: where its data lie;  entries: the rank that takes in what goes to each other host"""

    library: ctypes.CDLL
    at: int
    entries: Mapping[int, int]


class Space:
    """Memory of all ranks that hosts share by a link. All arguments are numbers and addresses, as in link.c."""

    def __init__(self, link: HostLink, calls: Calls, number: int, regions: Sequence[Tensor]):
        """regions: of all ranks, as they are mapped here"""
        self.link, self.regions = link, regions
        self._calls, self._number = calls, number

    def write(self, host: int, mask: int, offset: int, data: int, num_bytes: int, flag_offset: int, flag: int) -> None:
        """Copies bytes into regions of a host, and raises a flag in each of them. mask: regions as bits

        Nothing goes to a host of which no rank takes part.
        """
        calls = self._calls
        if (to := calls.entries.get(host)) is not None:
            calls.library.link_write(calls.at, to, self._number, mask, offset, data, num_bytes, flag_offset, flag)

    def tell(self, rank: int, mask: int, offset: int, data: int, num_bytes: int) -> None:
        """Copies bytes into regions of a rank's host over the connection with this very rank, in whatever epoch it is.

        They are lost where there is no connection, or none that makes progress. mask: regions as bits
        """
        calls = self._calls
        calls.library.link_tell(calls.at, rank, self._number, mask, offset, data, num_bytes)

    def queued(self, host: int) -> int:
        """Returns the bytes that what is sent to a host now would wait for; 0 where no rank of it takes part."""
        to = self._calls.entries.get(host)
        return 0 if to is None else self.link.queued(to)

    def later(self, host: int, mask: int, flag_offset: int, flag: int) -> None:
        """Raises a flag in regions of a host with the next that is sent there, or when this rank waits."""
        calls = self._calls
        if (to := calls.entries.get(host)) is not None:
            calls.library.link_later(calls.at, to, self._number, mask, flag_offset, flag)

    @property
    def calls_at(self) -> tuple[int, int]:
        """The first and the third argument of the C functions."""
        return self._calls.at, self._number

    @property
    def functions_at(self) -> list[int]:
        """Where `rows`, `results` and `later` are for C."""
        return [_address(self._calls.library, f"link_{name}") for name in ("rows", "results", "later")]

    def entry(self, host: int) -> int:
        """Returns the rank that takes in what this one sends to a host."""
        return self._calls.entries[host]

    def rows(self, host: int, *arguments: int) -> None:
        """Sends the rows of a dispatch to ranks of a host."""
        calls = self._calls
        calls.library.link_rows(calls.at, calls.entries[host], self._number, *arguments)

    def results(self, rank: int, *arguments: int) -> None:
        """Sends the results of a rank's rows to it, over the connection with this very rank."""
        calls = self._calls
        calls.library.link_results(calls.at, rank, self._number, rank, *arguments)


def _address(library: ctypes.CDLL, function: str) -> int:
    at = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
    assert at is not None
    return at


def _guard_of(head: Int64Array) -> int:
    address: int = head.__array_interface__["data"][0]
    return address + 8 * _GUARD_WORD
