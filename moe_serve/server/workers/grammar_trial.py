"""Tries constraints in a fork, which may take so much time and memory, and end as it likes.

A fork costs more than most constraints do, so one tries many, until it ends over a hostile one or has grown. It runs
when nobody else wants the core; where that is never, another one runs at a low priority for a moment.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from io import BufferedRWPair

from moe_serve.child_process import die_with_parent
from moe_serve.process_facts import core_seconds

CPU_S = 1.0  # for one constraint
_ADDRESS_BYTES = 512 << 20  # of addresses, beyond what the fork begins with
_GROWN_BYTES = 64 << 20  # of addresses; beyond it the fork ends after its answer, so that the next one has its room
_SOON_S = 0.1  # most constraints take a few ms
_STARVED_S = 0.02  # of CPU: a fork that has had less after _SOON_S waits for the core
_PATIENCE_S = 10.0  # for an answer on a busy machine
_TASK = struct.Struct("<I")  # before a constraint: its bytes
_REPLY = struct.Struct("<I?")  # before an answer: its bytes; whether the fork ends now

Check = Callable[[bytes], bytes]


class TooMuchTime(Exception):
    """The constraint took all the CPU time that one may take."""


class TooMuchMemory(Exception):
    """The fork ended over the constraint otherwise: for the memory that it takes, as a rule."""


class _Killed(Exception):
    """Somebody has killed the fork, as the kernel does where memory runs out."""


class Busy(Exception):
    """The machine left the fork too little time to say anything about the constraint."""


class Trials:
    """The fork, made with the first constraint. check: what it does with each, from encoded to encoded"""

    def __init__(self, check: Check):
        self._check = check
        self._fork: _Fork | None = None

    def answer(self, task: bytes) -> bytes:
        """Returns the answer to a constraint. Raises TooMuchTime, TooMuchMemory or Busy."""
        try:
            return self._try(task)
        except _Killed:  # perhaps for memory that others needed
            pass
        try:
            return self._try(task)
        except _Killed:
            raise TooMuchMemory from None

    def _try(self, task: bytes) -> bytes:
        if self._fork is not None and self._fork.has_ended():
            self.close()
        fork = self._fork = self._fork or _Fork(self._check, gives_way=True)
        try:
            fork.send(task)
            if not fork.answers_within(_SOON_S) and fork.gives_way and fork.cpu_s() < _STARVED_S:
                fork.end()
                fork = self._fork = _Fork(self._check, gives_way=False)
                fork.send(task)
            if not fork.answers_within(_SOON_S):
                fork.give_way()  # it may well be hostile
            reply, ends = fork.reply(_PATIENCE_S)
        except BaseException:
            self.close()
            raise
        if ends:
            self.close()
        return reply

    def close(self) -> None:
        """Ends the fork."""
        fork, self._fork = self._fork, None
        if fork is not None:
            fork.end()


class _Fork:
    """A process that tries one constraint after the other. gives_way: runs only while nobody else wants the core"""

    def __init__(self, check: Check, gives_way: bool):
        ours, its = socket.socketpair()
        self.gives_way = False
        parent_pid = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:  # the machine has no process or no memory left
            ours.close()
            its.close()
            raise Busy from None
        if self._pid == 0:
            ours.close()
            with contextlib.suppress(BaseException):
                _try_all(its.makefile("rwb"), check, parent_pid)
            os._exit(1)
        its.close()
        self._ours, self._stream = ours, ours.makefile("rwb")
        self._began_s = 0.0
        if gives_way:
            self.give_way()

    def send(self, task: bytes) -> None:
        """Sends a constraint; `cpu_s` counts from now on."""
        self._began_s = core_seconds(self._pid)
        try:
            self._stream.write(_TASK.pack(len(task)) + task)
            self._stream.flush()
        except ConnectionError:
            raise _Killed from None

    def answers_within(self, seconds: float) -> bool:
        """Returns whether an answer begins to come, or the fork ends, within so many seconds."""
        return bool(select.select([self._ours], [], [], seconds)[0])

    def cpu_s(self) -> float:
        """Returns the CPU time since the constraint was sent."""
        return core_seconds(self._pid) - self._began_s

    def give_way(self) -> None:
        """Lets the fork run only while nobody else wants the core."""
        if not self.gives_way:
            os.sched_setscheduler(self._pid, os.SCHED_IDLE, os.sched_param(0))
            self.gives_way = True

    def has_ended(self) -> bool:
        """Returns whether the fork has ended, and reaps it then."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return not self._pid

    def reply(self, seconds: float) -> tuple[bytes, bool]:
        """Returns the answer, and whether the fork ends after it. Raises as `Trials.answer` does."""
        if not self.answers_within(seconds):
            raise Busy
        with contextlib.suppress(ConnectionError):  # it ended before it had read the whole constraint
            head = self._stream.read(_REPLY.size)
            if len(head) == _REPLY.size:
                size, ends = _REPLY.unpack(head)
                answer = self._stream.read(size)
                if len(answer) == size:
                    return answer, ends
        code = os.waitstatus_to_exitcode(self._wait())
        raise {-signal.SIGPROF: TooMuchTime, -signal.SIGKILL: _Killed}.get(code, TooMuchMemory)

    def end(self) -> None:
        """Kills and reaps the fork."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()
        with contextlib.suppress(OSError):  # of what it did not read
            self._stream.close()
        self._ours.close()

    def _wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status


def _try_all(stream: BufferedRWPair, check: Check, parent_pid: int) -> None:
    """Answers constraints in the fork until the stream ends, each within its bounds of time and memory."""
    die_with_parent(parent_pid)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the parent's pipes; and where Rust says why it aborts
        os.dup2(null, number)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that does not close it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    held = _addresses()
    resource.setrlimit(resource.RLIMIT_AS, (held + _ADDRESS_BYTES, held + _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := stream.read(_TASK.size):
        task = stream.read(*_TASK.unpack(head))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = check(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(_REPLY.pack(len(answer), _addresses() > held + _GROWN_BYTES) + answer)
        stream.flush()
    os._exit(0)


def _addresses() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
