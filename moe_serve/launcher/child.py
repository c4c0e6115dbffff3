"""Runs a module as a child that cannot outlive its parent: `python -m moe_serve.launcher.child PARENT_PID MODULE ARGS…`

The kernel kills the child when its parent is gone, however that ended. The child asks for this itself, so that the
parent needs no code between fork and exec, which is unsafe beside threads. Linux; elsewhere the ranks' own deadlines
end them.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; ends at once where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
