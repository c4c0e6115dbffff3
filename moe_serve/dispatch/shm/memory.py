"""Shared memory of the processes of one host: one segment per rank, mapped by all of them.

A segment loses its name as soon as all ranks have mapped it, so nothing is left behind when they end; a rank that is
started anew gets it from a living one (shared_files.py). It is sparse: pages that are never written take no memory.
"""

import hashlib
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.peer_calls import all_gather, barrier
from moe_serve.dispatch.shared_files import SharedFiles
from moe_serve.dispatch.votes import BUFFERS, LOG_NAME, Log
from moe_serve.errors import CapacityError, ConfigError, PeerError
from moe_serve.process_facts import runs

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.link import HostLink, Space

HEAD_BYTES = 4096  # a page in front of the region: the owner's process id, and its guard (hosts/link.c)
_FOLDER = "/dev/shm"
STORE_ORDER = ("x86_64", "AMD64")  # machines that make stores visible in program order


@dataclass(frozen=True)
class SegmentUse:
    """What segments are for, in the words of the error when they do not fit.

    advise: returns from the free bytes which setting to lower
    """

    what: str = BUFFERS
    advise: Callable[[int], str] = lambda free_bytes: "lower dispatch.max_tokens_per_rank"


@dataclass(frozen=True)
class Mappings:
    """The segments of all ranks as one process has mapped them, and their decisions; one segment for each rank."""

    segments: list[mmap.mmap]
    decisions: Log

    def __len__(self) -> int:
        return len(self.segments)


class ShmMemory:
    """The regions of all ranks as one rank sees them. The mappings live as long as any tensor that views them."""

    def __init__(self, rank: int, shared: Mappings, watch_processes: bool = True):
        """shared: as `share_regions` maps them; called once in each rank.

        watch_processes: ranks are processes that see each other's ids
        """
        check_machine(platform.machine())
        self.rank = rank
        self.num_ranks = len(shared)
        self.decisions = shared.decisions
        mappings = shared.segments
        self.watches_processes = watch_processes
        self.space: Space | None = None  # with other hosts
        self._regions = [torch.frombuffer(mapping, dtype=torch.uint8)[HEAD_BYTES:] for mapping in mappings]
        self._heads = [np.frombuffer(mapping, dtype=np.int64, count=HEAD_BYTES // 8) for mapping in mappings]
        if watch_processes:
            self._heads[rank][0] = os.getpid()

    def join(self, link: "HostLink") -> None:
        """Lets other hosts write into these regions; all ranks of all hosts call it, in one order."""
        self.space = link.share(self._regions)
        link.guard({rank: self._heads[rank] for rank in link.local_ranks})

    def region(self, rank: int) -> Tensor:
        """Returns the region of a rank, mapped here: [num_bytes] uint8, aligned to a cache line. Own rank included."""
        return self._regions[rank]

    def lives(self, rank: int) -> bool:
        """Returns False once the process behind a rank is known to be dead; True where that cannot be told."""
        pid = int(self._heads[rank][0])
        return not self.watches_processes or pid == 0 or runs(pid)  # 0: it has not started yet


def share_regions(
    group: dist.ProcessGroup,
    num_bytes: int,
    use: SegmentUse = SegmentUse(),
    files: SharedFiles | None = None,
    link: "HostLink | None" = None,
) -> ShmMemory:
    """Returns the regions of a process group; a collective call.

    files: keep the segments for ranks that are started anew, under the name of their use
    link:  with the other hosts; None: all ranks are on one. Each host has a region for each rank of another one too:
           what this host sends there is written there first, and what comes from it arrives there
    Raises CapacityError when /dev/shm is too small, ConfigError on a machine without x86-64's order of stores and when
    the ranks are on several hosts.
    """
    check_machine(platform.machine())
    rank, num_ranks = group.rank(), group.size()
    size = HEAD_BYTES + num_bytes
    hosts, free_bytes, secret = compare_hosts(group)
    if link is None:
        _check_one_host(hosts, rank)
    _check_free(size, num_ranks, free_bytes, use)
    host = 0 if link is None else link.hosts.of_rank[rank]
    name = f"{_FOLDER}/moe_serve_{secret:016x}_{host}"
    paths, log = [f"{name}_{owner}" for owner in range(num_ranks)], f"{name}_log"
    here = range(num_ranks) if link is None else link.local_ranks
    is_first = rank == here[0]
    made = [paths[owner] for owner in range(num_ranks) if owner == rank or (is_first and owner not in here)]
    own = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) for path in made]
    try:
        for descriptor in own:
            os.ftruncate(descriptor, size)
        if is_first:
            made.append(log)
            own.append(os.open(log, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        barrier(group)
        opened = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        segments = [mmap.mmap(descriptor, size) for descriptor in opened]
        decided = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        for name, descriptor in zip(_names(use, num_ranks), [*opened, decided], strict=True):
            if files is not None:
                files.keep(name, descriptor)
        for descriptor in opened:
            os.close(descriptor)
        decisions = Log(decided, 1 if link is None else link.hosts.num_hosts)
        barrier(group)
    finally:
        for path, descriptor in zip(made, own, strict=True):
            os.close(descriptor)
            os.unlink(path)
    memory = ShmMemory(rank, Mappings(segments, decisions))
    if link is not None:
        memory.join(link)
    barrier(group)
    return memory


def open_regions(
    files: SharedFiles,
    rank: int,
    num_ranks: int,
    num_bytes: int,
    use: SegmentUse,
    link: "HostLink | None" = None,
) -> ShmMemory:
    """Returns the regions that the other ranks share, for a rank that is started anew in the place of a dead one.

    link: with the other hosts; None: all ranks are on one
    The others must have masked it. Raises PeerError where the rank that hands the files on has ended, or shares less.
    """
    size = HEAD_BYTES + num_bytes
    *names, log = _names(use, num_ranks)
    opened = [files.open(name, os.O_RDWR) for name in names]
    try:
        if any(os.fstat(descriptor).st_size != size for descriptor in opened):
            text = f"the other ranks share {use.what} of another size; start all ranks with the same configuration"
            raise PeerError(text, -1, "start", 0)
        segments = [mmap.mmap(descriptor, size) for descriptor in opened]
    finally:
        for descriptor in opened:
            os.close(descriptor)
    decisions = Log(files.open(log, os.O_RDWR | os.O_APPEND), 1 if link is None else link.hosts.num_hosts)
    memory = ShmMemory(rank, Mappings(segments, decisions))
    if link is not None:
        memory.join(link)
    return memory


def _names(use: SegmentUse, num_ranks: int) -> list[str]:
    """Returns the names of the segments among shared files, by rank, and that of the decisions."""
    return [f"{use.what} {owner}" for owner in [*map(str, range(num_ranks)), LOG_NAME]]


def check_machine(machine: str) -> None:
    """Raises ConfigError where rows could become visible after the flag that announces them."""
    if machine not in STORE_ORDER:
        raise ConfigError(
            f"dispatch.backend low_latency relies on the store order of x86-64 and this is {machine}; "
            "set dispatch.backend: collective"
        )


def compare_hosts(group: dist.ProcessGroup) -> tuple[list[int], int, int]:
    """Returns each rank's host, the least free bytes of any rank, and a secret of rank 0; the same on all ranks."""
    host = int(host_mark(), 16) & (2**62 - 1)
    stat = os.statvfs(_FOLDER)
    facts = torch.tensor([host, stat.f_bavail * stat.f_frsize, secrets.randbits(62)], dtype=torch.int64)
    gathered = [torch.empty_like(facts) for _ in range(group.size())]
    all_gather(gathered, facts, group)
    rows = torch.stack(gathered).numpy()
    return [int(row[0]) for row in rows], int(rows[:, 1].min()), int(rows[0, 2])


def host_mark() -> str:
    """Returns a hexadecimal text that is equal for two processes exactly if they share a kernel, a pid namespace and
    /dev/shm. Two containers of one machine differ."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        facts = [boot_id.read().strip(), str(os.stat(_FOLDER).st_dev), os.readlink("/proc/self/ns/pid")]
    return hashlib.blake2b("|".join(facts).encode(), digest_size=16).hexdigest()


def _check_one_host(hosts: list[int], rank: int) -> None:
    elsewhere = [other for other, host in enumerate(hosts) if host != hosts[rank]]
    if elsewhere:
        raise ConfigError(
            f"dispatch.backend is low_latency but ranks {elsewhere} are on another host than rank {rank}; shared "
            "memory serves one host: set dispatch.backend: collective"
        )


def _check_free(size: int, num_ranks: int, free_bytes: int, use: SegmentUse) -> None:
    if size * num_ranks > free_bytes:
        raise CapacityError(
            f"{use.what} take up to {size * num_ranks / 2**30:.2f} GiB of {_FOLDER} for {num_ranks} ranks and "
            f"{free_bytes / 2**30:.2f} GiB are free; {use.advise(free_bytes)}, or give the container "
            "more shared memory (docker run --shm-size)"
        )
