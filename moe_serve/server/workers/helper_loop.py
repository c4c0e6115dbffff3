"""The child's side of a `HelperProcess`: reads jobs from stdin and writes answers to stdout.

It imports nothing that serves.
"""

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from moe_serve.child_process import die_with_parent
from moe_serve.server.workers.pool import FRAME, REPLY

_KEPT_BYTES = 256 << 20  # a process that has grown beyond this ends after its answer, and gives the memory back


class _TakesTooLong(BaseException):
    """Not an Exception, which a job might catch."""


def serve_jobs(answer: Callable[[bytes], bytes], max_memory_bytes: int) -> None:
    """Answers until stdin ends. max_memory_bytes: of addresses; beyond it `answer` meets a MemoryError"""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    os.nice(int(sys.argv[2]))
    gc.disable()  # jobs leave no cycles, and looking through millions of lists for them takes seconds
    while serve_one(sys.stdin.buffer, sys.stdout.buffer, answer):
        pass


def serve_one(source: BinaryIO, sink: BinaryIO, answer: Callable[[bytes], bytes]) -> bool:
    """Reads one job and answers; returns False where there is none any more, or the process has grown too large."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return False
    num_bytes, core_s = FRAME.unpack(head)
    job, took_longer = source.read(num_bytes), False
    try:
        with bounded_time(core_s):
            reply = answer(job)
    except _TakesTooLong:
        reply, took_longer = b"", True
    goes_on = _most_memory() <= _KEPT_BYTES
    sink.write(REPLY.pack(len(reply), took_longer, not goes_on) + reply)
    sink.flush()
    return goes_on


@contextmanager
def bounded_time(core_s: float) -> Iterator[None]:
    """Ends the block once it has used its time of a core, however busy the machine is, by a BaseException."""

    def stop(signum: int, frame: object) -> None:
        raise _TakesTooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, core_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def unbounded_time() -> Iterator[None]:
    """Stops the clock of `bounded_time` for the block inside it."""
    left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left_s)


def _most_memory() -> int:
    """Returns the most bytes that this process has held. Not ru_maxrss, which begins with what its parent held."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
