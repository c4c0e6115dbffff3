"""Child processes of a launcher: programs, and ranks, which are forked from one process that has imported the engine.

Each has its own process group, dies with its parent, and has its output collected line by line, since its last lines
explain its end.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

FORK_SERVER = "moe_serve.launcher.fork_server"  # the module from which ranks are forked
LAST_LINES = 15  # of a child's output, kept for a report of its end
TERMINATE_S = 2.0  # between SIGTERM and SIGKILL
_MOST_BYTES = 1 << 16  # of what a fork server says at once

OnLine = Callable[[str, str], None]  # (who, line)


class Child(ABC):
    """One process. on_line gets every line it prints, from a thread"""

    def __init__(self, who: str, output: IO[str], on_line: OnLine):
        self.who = who
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._on_line, self._output = on_line, output
        self._reader = threading.Thread(target=self._read, name=f"output of {who}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self.last_lines.append(line.rstrip("\n"))
            self._on_line(self.who, line.rstrip("\n"))

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process; 0: it has not been started yet."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def _ends_within(self, timeout_s: float | None) -> bool:
        """Returns whether it has ended, waiting for that. timeout_s: None: as long as it takes"""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child and all it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, deadline_s: float) -> bool:
        """Returns whether the child has ended, waiting for it until a time of time.monotonic()."""
        return self._ends_within(max(0.0, deadline_s - time.monotonic()))

    def finish(self) -> None:
        """Kills what is left of the child and its own children, and closes its output."""
        self.signal(signal.SIGKILL)
        self._ends_within(None)
        self._reader.join(1.0)
        if not self._reader.is_alive():
            self._output.close()


class Program(Child):
    """A Python module, started as a process."""

    def __init__(
        self,
        who: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
    ):
        command = [sys.executable, "-m", "moe_serve.child_process", str(os.getpid()), module, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=tuple(pass_fds),
            process_group=0,  # so that Ctrl-C reaches only the parent, which ends its children in order
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        super().__init__(who, self._process.stdout, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def _ends_within(self, timeout_s: float | None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None


class Forked(Child):
    """A process that a fork server starts as soon as it has imported what it is to hand on."""

    def __init__(self, who: str, output: IO[str], on_line: OnLine, give_up: Callable[[], None]):
        """give_up: ends the fork server: nothing else ends what it has not started"""
        self._pid, self._code = 0, 0
        self._has_ended = threading.Event()
        self._give_up = give_up
        super().__init__(who, output, on_line)

    def started(self, pid: int) -> None:
        """Notes that it runs."""
        self._pid = pid

    def ended(self, code: int) -> None:
        """Notes how it has ended."""
        self._code = code
        self._has_ended.set()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def code(self) -> int | None:
        return self._code if self._has_ended.is_set() else None

    def signal(self, number: signal.Signals) -> None:
        if self._pid:
            super().signal(number)
        elif not self._has_ended.is_set():
            self._give_up()

    def _ends_within(self, timeout_s: float | None) -> bool:
        return self._has_ended.wait(timeout_s)


class ForkServer:
    """A process that imports a module and what it needs, and is forked for each process that runs the module.

    They share what the imports have put into memory, and begin at once. They end with it, as it does with this process.

    module, arguments: as for a Program;  environ: of all of them, beside what each is told
    """

    def __init__(self, module: str, arguments: Sequence[str], environ: Mapping[str, str], on_line: OnLine):
        self._environ, self._on_line = environ, on_line
        self._lock = threading.Lock()
        self._waiting: deque[Forked] = deque()  # not started yet, in order
        self._running: dict[int, Forked] = {}
        self._is_over = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            own = [str(theirs.fileno()), module, *arguments]
            self._program = Program("fork server", FORK_SERVER, own, environ, on_line, [theirs.fileno()])
        self._listener = threading.Thread(target=self._listen, name="fork server", daemon=True)
        self._listener.start()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return not self._is_over and self._program.code is None

    def fork(self, who: str, environ: Mapping[str, str], files: Mapping[str, Sequence[int]]) -> Forked:
        """Starts a process. files: by variable of its environment that names their descriptors"""
        ours, theirs = os.pipe()
        output = open(ours, encoding="utf-8", errors="replace")  # noqa: SIM115 (the child closes it)
        child = Forked(who, output, self._on_line, self._kill)
        told = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        message = json.dumps([who, told, {name: len(each) for name, each in files.items()}]).encode()
        descriptors = [theirs, *(descriptor for each in files.values() for descriptor in each)]
        try:
            with self._lock:
                if self._is_over:
                    child.ended(self._program.code or 1)
                else:
                    self._waiting.append(child)
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, as _listen sees
                        socket.send_fds(self._socket, [message], descriptors)
        finally:
            os.close(theirs)
        return child

    def _listen(self) -> None:
        """Notes what it says, until it ends."""
        with contextlib.suppress(OSError):
            while said := self._socket.recv(_MOST_BYTES):
                self._note(*json.loads(said))
        self._program.wait(time.monotonic() + TERMINATE_S)  # its socket is closed a moment before it ends
        self._program.finish()
        with self._lock:
            self._is_over = True
        for child in self._running.values():
            child.ended(-signal.SIGKILL)  # with their parent
        for child in self._waiting:
            child.last_lines.extend(self._program.last_lines)
            child.ended(self._program.code or 1)

    def _note(self, pid: int, code: int | None) -> None:
        """Notes that a process has started, or how it has ended."""
        with self._lock:
            if code is None:
                self._running[pid] = child = self._waiting.popleft()
                child.started(pid)
            else:
                self._running.pop(pid).ended(code)

    def _kill(self) -> None:
        self._program.signal(signal.SIGKILL)

    def finish(self) -> None:
        """Ends it, and what is left of the processes that were forked from it."""
        self._kill()
        self._listener.join()
        self._socket.close()


def end_children(children: Sequence[Child], grace_s: float) -> None:
    """Ends processes: waits for those that are ending, then SIGTERM, then SIGKILL. None is left when it returns."""
    steps: list[tuple[float, signal.Signals | None]] = [(grace_s, signal.SIGTERM), (TERMINATE_S, None)]
    for wait_s, next_signal in steps:
        deadline_s = time.monotonic() + wait_s
        left = [child for child in children if not child.wait(deadline_s)]
        for child in left:
            if next_signal is not None:
                child.signal(next_signal)
    for child in children:
        child.finish()
