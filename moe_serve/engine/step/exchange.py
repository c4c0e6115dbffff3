"""The all-gather of `RankState` that precedes every step.

`OneRankExchange` has nothing to wait for. The others end a wait at the deadline with a `PeerError`.
A `ShmExchange` takes microseconds on one host, where it is a page of shared memory. Across hosts each one has such a
page, and a rank writes its row into all of them. On one host it can go on without masked ranks.
"""

import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist

from moe_serve.dispatch.membership import Membership
from moe_serve.dispatch.peer_calls import barrier, broadcast, reason_of
from moe_serve.dispatch.shared_files import SharedFiles
from moe_serve.dispatch.shm.channel import EPOCH_SHIFT, FirstWait, as_bits
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.engine.step.plan import ROW_LENGTH, Int64Array, RankState
from moe_serve.errors import ConfigError, PeerError
from moe_serve.process_facts import runs

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.link import HostLink, Space

_ALL_RANKS = slice(None)
_LINE = 8  # int64 words of a cache line
_BUFFER_WORDS = -(-(ROW_LENGTH + 1) // _LINE) * _LINE
_FILE = "exchange"  # its name among shared files
_MOST_BITS = 62  # of a set of ranks in a word
_SPINS = 200  # checks of a flag before the waiting rank yields its time slice
_PID_CHECK_S = 0.02  # how often a waiting rank checks that its peers are alive
_MEMBER_CHECK_S = 0.005  # the same where ranks can be masked; often enough for peers to see that it waits


class Exchange(Protocol):
    """Gathers the states of all ranks.

    survives_lost_rank: whether it can gather without a masked rank, once it follows a membership
    """

    survives_lost_rank: ClassVar[bool] = False

    def gather(self, state: RankState, step: int) -> Sequence[RankState]:
        """Returns the states of all ranks, by rank; zeros for a masked one. Raises PeerError at the deadline."""
        ...

    def follow(self, membership: Membership) -> None:
        """Gathers from now on the states of the ranks that take part. Only where it survives a lost rank."""
        raise AssertionError(f"{type(self).__name__} cannot gather without a rank")

    def dead_peers(self) -> list[int]:
        """Returns the ranks that are known to be dead; empty where this exchange cannot tell."""
        return []

    def missing(self) -> Sequence[int]:
        """Returns the ranks for which this one waits; empty where it does not wait, or this exchange cannot tell."""
        return ()

    def close(self) -> None:
        """Frees what the exchange holds."""
        return


class OneRankExchange(Exchange):
    """The exchange of a rank that is alone."""

    def gather(self, state: RankState, step: int) -> Sequence[RankState]:
        return (state,)


class GlooExchange(Exchange):
    """One gloo all-gather. A step in which a peer is missing ends by the process group's timeout."""

    def __init__(self, group: dist.ProcessGroup, deadline_s: float):
        self._group = group
        self._num_ranks = group.size()
        self._deadline_s = deadline_s

    def gather(self, state: RankState, step: int) -> Sequence[RankState]:
        rows = [torch.empty(ROW_LENGTH, dtype=torch.int64) for _ in range(self._num_ranks)]
        try:
            work = dist.all_gather(rows, torch.from_numpy(state.to_row()), group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise PeerError(
                f"a rank did not arrive at the exchange of step {step} within {self._deadline_s:g} s, or died "
                f"({reason_of(error)}); look at the other ranks' last lines",
                rank=-1,
                phase="exchange",
                step=step,
            ) from None
        return [RankState.from_row(row.numpy()) for row in rows]


class ShmExchange(Exchange):
    """One page of shared memory: every rank writes its own rows and reads those of all.

    Layout, in int64 words: a page head of one cache line per rank (its pid), then for each rank two buffers of
    [flag, row], each on cache lines of its own. A flag is a sequence number with the group's epoch in its high bits;
    each group counts anew.

    Why it is right: a row is written first and its flag second, and x86-64 makes stores visible in program order (each
    store below is one aligned 8-byte move), so a rank that sees the flag sees the row. Two buffers suffice: to
    overwrite buffer s % 2 a rank must have passed gather s+1, which a peer enters only after it has read all of s. No
    rank of a new group reads rows of the old one: all of them have left their gather to agree on the new group. A
    rank that was stopped while it read, and masked meanwhile, may have read rows of the new group: it looks at the
    pages of the others before it uses them.
    """

    survives_lost_rank = True

    def __init__(self, page: mmap.mmap, rank: int, num_ranks: int, deadline_s: float, link: "HostLink | None" = None):
        """page: shared by the ranks of this host, of `page_bytes`;  link: with the other hosts, if there are any"""
        self._rank, self._num_ranks = rank, num_ranks
        self._link = link
        self._space: Space | None = None
        if link is not None:  # all ranks of a host have this one region
            self._space = link.share([torch.frombuffer(page, dtype=torch.uint8)] * num_ranks)
        self._ranks = np.arange(self._num_ranks)
        self._deadline_s = deadline_s
        self._sequence = 0
        self._membership: Membership | None = None
        self._epoch = 0
        self._members: slice | Int64Array = _ALL_RANKS  # a slice costs half as much as a list of all ranks
        self._masked: Sequence[int] = ()
        self._check_s = _PID_CHECK_S
        self._missing: Sequence[int] = ()
        self._map = page
        words = np.frombuffer(page, dtype=np.int64)
        self._pids = words[: self._num_ranks * _LINE].reshape(self._num_ranks, _LINE)[:, 0]
        self._buffers = words[self._num_ranks * _LINE :].reshape(self._num_ranks, 2, _BUFFER_WORDS)
        self._pids[self._rank] = os.getpid()
        self._spins = _SPINS if self._num_ranks <= (os.cpu_count() or 1) and link is None else 1
        self._member_bits = (1 << num_ranks) - 1
        library, _ = load_library() if num_ranks <= _MOST_BITS else (None, "")
        self._first: FirstWait | None = None
        if library is not None:
            self._first = FirstWait(library, rank, np.zeros(num_ranks, dtype=np.int64), self._spins, link)

    def follow(self, membership: Membership) -> None:
        """Gathers from now on without masked ranks, whose rows are zeros. Called before any gather.

        As in the transport, a wait that fails ends the epoch of the group, and all ranks must agree on a new one.
        """
        self._membership = membership
        self._check_s = min(_MEMBER_CHECK_S, self._deadline_s / 5)

    def gather(self, state: RankState, step: int) -> Sequence[RankState]:
        membership = self._membership
        if membership is not None and membership.epoch != self._epoch:
            self._epoch, self._sequence = membership.epoch, 0
            self._masked = tuple(membership.masked)
            self._members = np.array(membership.members) if self._masked else _ALL_RANKS
            self._member_bits = as_bits(membership.members)
        self._sequence += 1
        flag = self._epoch << EPOCH_SHIFT | self._sequence
        buffers = self._buffers[:, self._sequence % 2]
        buffers[self._rank, 1 : 1 + ROW_LENGTH] = state
        buffers[self._rank, 0] = flag
        if self._space is not None:
            self._send(self._space, flag)
        lend_core = None if membership is None else membership.lend_core
        with nullcontext() if lend_core is None else lend_core():
            self._wait(buffers[:, 0], flag, step, 1 if lend_core else self._spins)
        self._missing = ()
        states = list(map(RankState._make, buffers[:, 1 : 1 + ROW_LENGTH].tolist()))
        if membership is not None:
            membership.check_takes_part("exchange", step)
        for rank in self._masked:
            states[rank] = RankState(0, 0)
        return states

    def _wait(self, flags: Int64Array, flag: int, step: int, spins: int) -> None:
        members = self._members
        started_s = checked_s = time.monotonic()
        if self._first is not None and self._first(flags, flag, self._member_bits):
            return
        checks = 0
        while not (flags[members] == flag).all():
            checks += 1
            if checks < spins:
                continue
            if self._link is not None:
                self._link.poll()
            now_s = time.monotonic()
            # A computing step takes milliseconds: yield at first, then sleep longer the longer it takes.
            if now_s - started_s < 0.002:
                os.sched_yield()
            else:
                time.sleep(min(0.001, (now_s - started_s) / 20))
            if now_s - checked_s > self._check_s:
                checked_s = now_s
                missing = [int(rank) for rank in self._ranks[members] if flags[rank] != flag]
                self._missing = missing
                try:
                    self._check_missing(missing, now_s - started_s, step)
                except PeerError:
                    # A peer that had all rows may have begun the next group, with a rank that rejoins.
                    if self._has_suspects or not (flags[members] == flag).all():
                        raise

    def _send(self, space: "Space", flag: int) -> None:
        """Writes this rank's row and its flag into the page of every other host."""
        own = self._buffers[self._rank, self._sequence % 2]
        at: int = own.__array_interface__["data"][0]
        offset = at - self._buffers.__array_interface__["data"][0] + 8 * _LINE * self._num_ranks
        for host in space.link.others:
            page = 1 << space.link.hosts.ranks(host)[0]  # its ranks have one page
            space.write(host, page, offset + 8, at + 8, 8 * ROW_LENGTH, offset, flag)

    @property
    def _has_suspects(self) -> bool:
        return self._membership is None or bool(self._membership.suspects)

    def _check_missing(self, missing: list[int], waited_s: float, step: int) -> None:
        if self._membership is not None:
            self._membership.check(missing, "exchange", step, waited_s, self._deadline_s)
            return
        for rank, why in {} if self._link is None else self._link.broken().items():
            assert self._link is not None
            text = f"{self._link.hosts.named(rank)} was lost before the exchange of step {step}: {why}"
            raise PeerError(text, rank, "exchange", step)
        dead = [rank for rank in self.dead_peers() if rank in missing]
        if dead:
            raise PeerError(f"rank {dead[0]} died before the exchange of step {step}", dead[0], "exchange", step)
        if missing and waited_s > self._deadline_s:
            raise PeerError(
                f"rank {missing[0]} did not arrive at the exchange of step {step} within {self._deadline_s:g} s; "
                "if its steps are really that slow, raise engine.step_deadline_s",
                rank=missing[0],
                phase="exchange",
                step=step,
            )

    def missing(self) -> Sequence[int]:
        return self._missing

    def dead_peers(self) -> list[int]:
        here = range(self._num_ranks) if self._link is None else self._link.local_ranks
        return [rank for rank in here if not runs(int(self._pids[rank]))]

    def close(self) -> None:
        # numpy views keep the map open; without them it can be closed. Other hosts may write into it until the end.
        del self._pids, self._buffers
        if self._link is None:
            self._map.close()


def make_exchange(
    kind: str,
    group: dist.ProcessGroup,
    one_host: bool,
    deadline_s: float,
    files: SharedFiles | None = None,
    link: "HostLink | None" = None,
) -> Exchange:
    """Returns the exchange of a kind: "gloo", "shm", or "auto" (shm on x86-64, with a link between hosts).

    One rank exchanges nothing, whatever the kind.
    files: keep the page for replacement ranks;  link: with the other hosts
    """
    if kind == "auto":
        kind = "shm" if (one_host or link) and platform.machine() in ("x86_64", "AMD64") else "gloo"
    if kind == "shm" and not (one_host or link):
        raise ConfigError("engine.exchange is shm but the ranks are on several hosts; set engine.exchange: gloo")
    if group.size() == 1:
        return OneRankExchange()
    if kind == "gloo":
        return GlooExchange(group, deadline_s)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            f"engine.exchange: shm relies on the store order of x86-64 and this is {platform.machine()}; "
            "set engine.exchange: gloo"
        )
    page = _map_shared(group, page_bytes(group.size()), files, None if link is None else link.local_ranks)
    exchange = ShmExchange(page, group.rank(), group.size(), deadline_s, link)
    barrier(group)  # all process ids are there
    return exchange


def open_exchange(
    files: SharedFiles, rank: int, num_ranks: int, deadline_s: float, link: "HostLink | None" = None
) -> ShmExchange:
    """Returns the exchange of a replacement rank, beside others that serve. Raises PeerError.

    link: with the other hosts, if there are any
    """
    descriptor = files.open(_FILE, os.O_RDWR)
    try:
        page = mmap.mmap(descriptor, page_bytes(num_ranks))
    finally:
        os.close(descriptor)
    return ShmExchange(page, rank, num_ranks, deadline_s, link)


def page_bytes(num_ranks: int) -> int:
    """Returns the size of the page of a `ShmExchange`."""
    return 8 * num_ranks * (_LINE + 2 * _BUFFER_WORDS)


def _map_shared(
    group: dist.ProcessGroup, num_bytes: int, files: SharedFiles | None, local_ranks: Sequence[int] | None
) -> mmap.mmap:
    """Returns a zeroed mapping that all ranks of this host share. Its name is removed before this returns."""
    name = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    broadcast(name, group)
    first = 0 if local_ranks is None else local_ranks[0]
    path = f"/dev/shm/moe_serve_{int(name):016x}_{first}"
    if group.rank() == first:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, num_bytes)
    barrier(group)
    try:
        if group.rank() != first:
            descriptor = os.open(path, os.O_RDWR)
        mapping = mmap.mmap(descriptor, num_bytes)
        if files is not None:
            files.keep(_FILE, descriptor)
        os.close(descriptor)
        barrier(group)
    finally:
        if group.rank() == first:  # nothing is left behind, whatever happens to the ranks later
            os.unlink(path)
    return mapping
