"""Calls of the shared-memory transport: sequence numbers, flags, when buffers may be reused, and waits for flags."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moe_serve.dispatch.shm.region import NUM_BUFFERS, Int64Array, ReceiveSlice
from moe_serve.dispatch.shm.remote import RemotePeers
from moe_serve.dispatch.shm.shared_cores import SharedCores
from moe_serve.errors import PeerError

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.link import HostLink

EPOCH_SHIFT = 40  # a flag is epoch << 40 | sequence number: enough for a call every 80 ns during a day
SPINS = 100  # reads, 10 µs, before the time slice is given up, where each rank has a core
LOOKS_PER_SPIN = 3  # the C helper looks at flags about so many times while Python does once
YIELD_S = 0.002  # how long a rank only yields; most computing steps end within it
LONGEST_SLEEP_S = 0.001
CHECK_S = 0.005  # how often a waiting rank checks whether its peers live


@dataclass
class Peers:
    """Who takes part, shared by all channels of a transport; membership.py changes it.

    rank:   of this process;  others: the ranks that take part beside it;  epoch: counts the groups
    mask:   others as bits
    slices: where this rank writes, by peer;  flags: [R, NUM_FLAGS], what peers have written here
    cores:  None where each thread has a core;  remote: the ranks of other hosts, if any
    """

    rank: int
    others: list[int]
    epoch: int
    slices: list[ReceiveSlice]
    flags: Int64Array
    wait: "FlagWait"
    cores: SharedCores | None = None
    remote: RemotePeers | None = None
    mask: int = field(init=False)
    channels: list["Channel"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = as_bits(self.others)

    def begin_epoch(self, epoch: int, others: list[int]) -> None:
        """Starts over with these peers; what is in flight is never received."""
        self.epoch, self.others, self.mask = epoch, others, as_bits(others)
        self.wait.drop()
        if self.remote is not None:
            self.remote.begin_epoch(epoch, others)
        if self.cores is not None:
            self.cores.give_all_but([self.rank, *others])
        for channel in self.channels:
            channel.restart()


class Channel:
    """Calls of one kind have the numbers 1, 2, 3, …; call n uses buffer n % 2 of every slice."""

    def __init__(self, peers: Peers, name: str, data_flag: int, read_flag: int):
        """name: for errors;  data_flag: column of the first buffer's flag;  read_flag: column of the acknowledgement"""
        self._peers = peers
        self._name = name
        self._data_flag = data_flag
        self._read_flag = read_flag
        self._data_here = [peers.flags[:, data_flag + buffer] for buffer in range(NUM_BUFFERS)]
        self._read_here = peers.flags[:, read_flag]
        self._send_phase, self._receive_phase = f"{name} send", f"{name} receive"
        self._sent = self._read = 0
        peers.channels.append(self)

    def begin(self) -> int:
        """Returns the number of a new call, once every peer has read what its buffer held before."""
        call = self._next()
        if call > NUM_BUFFERS:
            self.wait_until_read(call - NUM_BUFFERS)
        self._sent = call
        return call

    def take_number(self) -> int:
        """Returns the number of a new call, whose buffer may still be read."""
        self._sent = self._next()
        return self._sent

    def _next(self) -> int:
        assert self._sent - self._read < NUM_BUFFERS, (
            f"a third {self._name} while two are in flight; wait for the first"
        )
        return self._sent + 1

    def wait_until_read(self, call: int) -> None:
        """Waits until every peer has read what this rank sent in a call."""
        self._wait(self._read_here, call, self._send_phase, or_more=True)

    @property
    def num_sent(self) -> int:
        """The number of the last call of this epoch."""
        return self._sent

    def was_read(self, call: int) -> bool:
        """Returns whether every rank, this one too, has read what this rank sent in a call; does not wait."""
        flag = self.flag(call)
        return call < 1 or (call <= self._read and all(self._read_here[peer] >= flag for peer in self._peers.others))

    def signal(self, call: int) -> None:
        """Tells the peers that their data of this call are complete."""
        column, flag = self._data_flag + call % NUM_BUFFERS, self.flag(call)
        for peer in self._peers.others:
            self._peers.slices[peer].flags[column] = flag

    def wait(self, call: int) -> None:
        """Waits until the data of all peers are here."""
        assert call == self._read + 1, f"{self._name} {call} is waited for before {self._read + 1}"
        self._wait(self._data_here[call % NUM_BUFFERS], call, self._receive_phase)

    def acknowledge(self, call: int) -> None:
        """Tells the peers that this rank has read the data of this call."""
        flag = self.flag(call)
        for peer in self._peers.others:
            self._peers.slices[peer].flags[self._read_flag] = flag
        self._was_read(call)

    def was_acknowledged(self, call: int) -> None:
        """Notes that the C helper has read the data of this call, and has told the peers."""
        assert call == self._read + 1, f"{self._name} {call} is read before {self._read + 1}"
        self._was_read(call)

    def _was_read(self, call: int) -> None:
        self._read = call
        if self._peers.remote is not None:
            self._peers.remote.acknowledge(self._read_flag, self.flag(call))

    def flag(self, call: int) -> int:
        """Returns what announces a call of this epoch, and acknowledges it."""
        return self._peers.epoch << EPOCH_SHIFT | call

    def restart(self) -> None:
        """Numbers calls from 1 again; in a new epoch no peer reads anything of the old one."""
        self._sent = self._read = 0

    def _wait(self, flags: Int64Array, call: int, phase: str, or_more: bool = False) -> None:
        self._peers.wait(flags, self.flag(call), self._peers.others, phase, call, or_more)


def as_bits(ranks: list[int]) -> int:
    """Returns a set of ranks as the C helper takes it."""
    return sum(1 << rank for rank in ranks)


def check_epoch(peers: Peers, epoch: int, phase: str) -> None:
    """Raises PeerError when a call belongs to an epoch that has ended."""
    if peers.epoch != epoch:
        raise PeerError(f"{phase} belongs to epoch {epoch}, which was voided; run the step again", -1, phase, epoch)


class FirstWait:
    """The first milliseconds of a wait, in the C helper (wait.h)."""

    def __init__(
        self,
        library: ctypes.CDLL,
        rank: int,
        waited_ns: Int64Array,
        looks: int,
        link: "HostLink | None" = None,
        cores_at: int = 0,
    ):
        """waited_ns: [R], counts waits for each rank;  looks: before the core is given away between two of them

        link: to poll;  cores_at: `SharedCores.table_at`, 0: each thread has a core
        """
        poll = (0, 0) if link is None else link.poll_at
        words = [rank, len(waited_ns), looks, cores_at, *poll, waited_ns.__array_interface__["data"][0], 0, 0]
        self._words, self._waited_ns = np.array(words, dtype=np.int64), waited_ns
        self.at: int = self._words.__array_interface__["data"][0]
        self._call = library.wait_flags

    def __call__(self, flags: Int64Array, wanted: int, ranks: int, or_more: bool = False) -> bool:
        """Returns whether flags[r] is `wanted` (or more) for every r of `ranks`, which are bits. flags: [R], a view"""
        at = flags.__array_interface__["data"][0]
        return bool(self._call(self.at, at, flags.strides[0], ranks, wanted, or_more))


class FlagWait:
    """Waits until flags hold a value: spins, then yields, then sleeps. `check` decides whether to go on waiting.

    A rank reads only flags in its own region. It spins for about as long as a running peer needs; with more threads
    than cores it does not spin at all: the peer may need this very core, and workers of the peers may use it. Where the
    C helper is, it makes the first milliseconds of each wait (wait.h).
    """

    def __init__(
        self,
        num_ranks: int,
        deadline_s: float,
        check: Callable[[list[int], str, int, float], None],
        cores: SharedCores | None = None,
    ):
        """check(missing ranks, phase, sequence, waited_s): raises PeerError where waiting is useless"""
        self.waited_ns = np.zeros(num_ranks, dtype=np.int64)
        """How long this rank has waited for each other one since the start, spinning not counted: its row of the wait
        matrix. A rank that is late for all shows as a column."""
        self._kept_ns = self.waited_ns.copy()
        self._check = check
        self._check_s = min(CHECK_S, deadline_s / 5)
        self._cores = cores
        self.poll: Callable[[], object] | None = None
        """Takes in what other hosts have sent."""
        self.spins = SPINS if num_ranks <= len(os.sched_getaffinity(0)) and cores is None else 1
        self.first: FirstWait | None = None
        """Makes the first milliseconds of each wait, once the C helper is there."""

    def use(self, library: ctypes.CDLL, rank: int, link: "HostLink | None") -> None:
        """Waits in the C helper first. rank: of this process"""
        table = self._cores.table_at if self._cores else 0
        self.first = FirstWait(library, rank, self.waited_ns, LOOKS_PER_SPIN * self.spins, link, table)

    def keep(self) -> None:
        """Keeps the waits so far: their step is done."""
        self._kept_ns[:] = self.waited_ns

    def drop(self) -> None:
        """Forgets the waits since the last `keep`: their step is void."""
        self.waited_ns[:] = self._kept_ns

    def __call__(
        self,
        flags: Int64Array,
        wanted: int,
        ranks: list[int],
        phase: str,
        sequence: int,
        or_more: bool = False,
    ) -> None:
        """Returns when flags[r] is `wanted` (or more) for every r of `ranks`. flags: [R], a view of memory.

        Raises PeerError naming rank, phase and sequence number.
        """
        if self.first is not None and self.first(flags, wanted, as_bits(ranks), or_more):
            return None
        if self._cores is None:
            return self._wait(flags, wanted, ranks, phase, sequence, or_more)
        with self._cores.lent():
            return self._wait(flags, wanted, ranks, phase, sequence, or_more)

    def _wait(self, flags: Int64Array, wanted: int, ranks: list[int], phase: str, sequence: int, or_more: bool) -> None:
        looks = 0
        started_s = counted_s = 0.0
        for rank in ranks:
            while (flags[rank] < wanted) if or_more else (flags[rank] != wanted):
                looks += 1
                if looks < self.spins:
                    continue
                if self.poll is not None:
                    self.poll()
                now_s = time.monotonic()
                if started_s == 0.0:
                    started_s = checked_s = counted_s = now_s
                waited_s = now_s - started_s
                if waited_s < YIELD_S and self.first is None:
                    os.sched_yield()
                else:
                    time.sleep(min(LONGEST_SLEEP_S, waited_s / 20))
                if now_s - checked_s > self._check_s:
                    checked_s = now_s
                    missing = [r for r in ranks if (flags[r] < wanted if or_more else flags[r] != wanted)]
                    if missing:
                        self._check(missing, phase, sequence, waited_s)
            if started_s:
                now_s = time.monotonic()
                self.waited_ns[rank] += int(1e9 * (now_s - counted_s))
                counted_s = now_s
