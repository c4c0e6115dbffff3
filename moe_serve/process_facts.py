"""What this process holds of its machine, for its metrics. Linux; elsewhere nothing is known, and zeros say so."""

import os


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
