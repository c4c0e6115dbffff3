"""How a child process ends: with its parent, and in words. Imports nothing of the package."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; exits at once if it has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def describe_exit(code: int) -> str:
    """Returns how a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        number = signal.Signals(-code)
        # Shared memory takes pages as they are written, and the kernel knows no other way to refuse one.
        reason = " (as where /dev/shm is full: make room there)" if number == signal.SIGBUS else ""
        return f"was killed by {number.name}{reason}"
    except ValueError:
        return f"was killed by signal {-code}"
