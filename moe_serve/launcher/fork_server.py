"""The process from which a launcher's ranks are forked (children.py has the launcher's side).

    python -m moe_serve.launcher.fork_server SOCKET MODULE ARGS…

Most of what a rank takes to start, and all it has in memory before it has a model, are the imports of torch and the
engine. Here these are done once: `prepare(ARGS)` of the module does them. For each message from the socket, which
brings the output, files and environment of a rank, this process forks itself, and the module runs as if it had been
started so. It has no other threads, since none would be there in the fork.

What it says: [process, null] once one was started, [process, exit code] when that has ended.
"""

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

from moe_serve.child_process import die_with_parent

_MOST_FILES = 253  # in one message, by the kernel
_MOST_BYTES = 1 << 17
_PR_SET_NAME = 15


def main() -> None:
    """Forks ranks until the launcher is gone; in each of them, runs the module."""
    control, module = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sys.argv = sys.argv[2:]
    importlib.import_module(module).prepare(sys.argv[1:])
    del sys.modules[module]  # it runs as __main__; what it imports is there
    if fork_ranks(control):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_ranks(control: socket.socket) -> bool:
    """Returns True in each rank, and False here when the launcher is gone."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    ranks: set[int] = set()
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
        for pid, code in _ended():
            if pid in ranks:
                ranks.remove(pid)
                control.send(json.dumps([pid, code]).encode())
        if control not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        parent, pid = os.getpid(), os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (control, woken, wake):
                each.close()
            _become(parent, message, files)
            return True
        os.setpgid(pid, pid)  # as it does itself, whichever comes first
        ranks.add(pid)
        control.send(json.dumps([pid, None]).encode())
        for descriptor in files:
            os.close(descriptor)


def _ended() -> list[tuple[int, int]]:
    """Returns the children that have ended since the last call, and how."""
    found: list[tuple[int, int]] = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return found
            found.append((pid, os.waitstatus_to_exitcode(status)))
    except ChildProcessError:
        return found


def _become(parent: int, message: bytes, files: list[int]) -> None:
    """Gives this process its name, group, output, files and environment."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    who, environ, named = json.loads(message)
    output, *rest = files
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    for name, count in named.items():
        environ[name] = ",".join(map(str, rest[:count]))
        del rest[:count]
    os.environ.update(environ)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"moe {who}".encode(), 0, 0, 0)  # as top and ps show it


if __name__ == "__main__":
    main()
