"""Runs a module as a child that cannot outlive its parent: `python -m moe_serve.launcher.child PARENT_PID MODULE ARGS…`

On Linux the kernel kills the child when its parent ends, for whatever reason. The child asks for this itself, because
code between fork and exec in the parent is unsafe beside threads. Elsewhere the ranks' own deadlines end them.
"""

import runpy
import sys

from moe_serve.child_process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
