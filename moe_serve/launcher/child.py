"""Runs a module as a child that cannot outlive its parent: `python -m moe_serve.launcher.child PARENT_PID MODULE ARGS…`

On Linux the kernel kills the child when its parent ends, for whatever reason. The child asks for this itself, because
code between fork and exec in the parent is unsafe beside threads. Elsewhere the ranks' own deadlines end them.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; exits at once if it has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
