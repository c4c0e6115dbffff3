"""What this process holds of its machine, which one it is, and who else runs. Linux; elsewhere nothing is known: 0 or
""."""

import os
import time


def resident_bytes() -> int:
    """Returns the memory that this process has in RAM; 0 where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


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
