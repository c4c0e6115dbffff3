"""How a child process ends: with its parent, and in words. Imports nothing of the package.

`python -m moe_serve.child_process PARENT_PID MODULE ARGS…` runs a module as a child that cannot outlive its parent. The
child asks for this itself, because code between fork and exec in the parent is unsafe beside threads.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; exits at once if it has already ended.

    Elsewhere than on Linux, the ranks' own deadlines end them.
    """
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


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the module has a handler of its own: no traceback of imports
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
