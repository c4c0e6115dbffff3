"""What this process holds of its machine, which one it is, and who else runs. Linux; elsewhere nothing is known: 0 or
""."""

import contextlib
import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node. cpus: those of it that this process may use"""

    number: int
    cpus: frozenset[int]


def is_private(facts: os.stat_result) -> bool:
    """Returns whether a file or folder with these facts belongs to this user, and nobody else can write to it."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def not_private(setting: str, folder: Path) -> str:
    """Returns what is said of a folder that is not private. setting: that names it"""
    return (
        f"{setting} {folder} belongs to another user, or others can write to it; chmod go-w it, or name another folder"
    )


def resident_bytes() -> int:
    """Returns the memory that this process has in RAM; 0 where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def give_freed_memory_back() -> None:
    """Gives the system what this process has freed; glibc keeps pieces that lie between others in its heap."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def num_open_files() -> int:
    """Returns how many file descriptors this process has open; 0 where that is not known."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing itself has one
    except OSError:
        return 0


def core_seconds(pid: int) -> float:
    """Returns the time of a core that a process of this host has used; 0 where that is not known."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
    except OSError:
        return 0.0


def own_node() -> int:
    """Returns the one NUMA node whose CPUs this process may use; -1: several, or none that the system names."""
    nodes = numa_nodes()
    return nodes[0].number if len(nodes) == 1 else -1


def numa_nodes() -> list[NumaNode]:
    """Returns the NUMA nodes with CPUs that this process may use, ascending; none where the system names none."""
    mine = os.sched_getaffinity(0)
    nodes = []
    for path in NODES.glob("node[0-9]*"):
        try:
            cpus = _listed((path / "cpulist").read_text(encoding="ascii")) & mine
        except (OSError, ValueError):
            continue
        if cpus:
            nodes.append(NumaNode(int(path.name.removeprefix("node")), cpus))
    return sorted(nodes, key=lambda node: node.number)


def _listed(text: str) -> frozenset[int]:
    """Returns the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def boot_id() -> str:
    """Returns the id of this boot of this host, whose processes read the same monotonic clock; "" where not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Returns whether no thread of a process of this host runs any more; False where this process cannot look."""
    try:
        return not runs(pid) and len(os.listdir(f"/proc/{pid}/task")) <= 1  # the first thread may end before others
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def runs(pid: int) -> bool:
    """Returns False once a process of this host is known to have ended, as a zombie or altogether.

    Where this process cannot look, as without a free file descriptor, nothing is known of the other one: True.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


class ProcessorWaits:
    """How long a thread has been ready to run while others had its processor."""

    def __init__(self) -> None:
        self._file: int | None = None  # of the thread that has asked first; -1: the system has none

    def seconds(self) -> float:
        """Returns the time since this thread began; 0 where that is not known. One thread may ask. Takes 2 us."""
        try:
            if self._file is None:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return 0.0 if self._file < 0 else int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # an emulated /proc may lack the file, or have an empty one
            self._close()
            return 0.0

    def _close(self) -> None:
        if self._file is not None and self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self._close()
