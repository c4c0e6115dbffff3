"""Helper processes for jobs that may take long or much memory. Each does one job at a time, and clients take turns.

A thread would block all other Python; a process can be bounded in seconds and bytes, and killed. `HelperPair` has a
second process for clients with long jobs, so that they hold up no others. Time is CPU time, not that of a clock: on a
busy machine all jobs are late. `serve_jobs` is the child's side, which reads jobs from stdin and writes answers to
stdout.
"""

import asyncio
import gc
import os
import resource
import signal
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from moe_serve.child_process import die_with_parent
from moe_serve.errors import QueueFullError
from moe_serve.log import get_logger
from moe_serve.process_facts import core_seconds
from moe_serve.server.workers.fair_queue import FairQueue

log = get_logger(__name__)

FRAME = struct.Struct("<Id")  # of what the process gets: bytes of the job; seconds of a core that it may take
REPLY = struct.Struct("<I??")  # of what it answers: bytes of the answer; whether the job took longer; whether it ends
_START_CORE_S = 0.5  # of a core, for a new process
_KILLED = (ConnectionError, asyncio.IncompleteReadError)  # what shows that the process has ended
_SLOW_NICENESS = 10  # ranks and the front end may need the same core, and serve those whose jobs are short
_MOST_NOTED = 4096  # clients
_SLOW_S = 60.0  # how long after a job that was ended its client's jobs go to the second process at once
_KEPT_BYTES = 256 << 20  # a process that has grown beyond this ends after its answer, and gives the memory back


class HelperEnded(Exception):
    """The process was killed twice over a job, most likely for want of memory."""


class TooLongError(Exception):
    """A job has used up its CPU time."""


class HelperPair:
    """Two processes, for short jobs and for long ones, each started by `start` or with its first job."""

    def __init__(self, module: str, deadline_s: float, short_s: float, core_s: float):
        """module, deadline_s: as of HelperProcess

        short_s:  CPU time after which a job is ended, and begun again in the second process
        core_s:   CPU time in the second process
        """
        self._module = module
        self._first = HelperProcess(module, deadline_s, short_s, niceness=0)
        self._second = HelperProcess(module, deadline_s, core_s, _SLOW_NICENESS)
        self._slow: dict[str, float] = {}  # until when each slow client counts as one; the last noted comes last

    async def start(self, job: bytes) -> None:
        """Starts both processes before the first client asks, and returns when each has answered a job.

        Logs what keeps a process from starting now; the first client's job tries it again.
        """
        started = (self._first.ask("", job), self._second.ask("", job))
        for problem in await asyncio.gather(*started, return_exceptions=True):
            if isinstance(problem, QueueFullError | TimeoutError | HelperEnded | TooLongError):
                log.warning("%s could not be started ahead: %s", self._module, str(problem) or type(problem).__name__)
            elif isinstance(problem, BaseException):
                raise problem

    async def ask(self, client: str, *job: bytes) -> bytes:
        """Returns the answer to a job, and raises as HelperProcess does."""
        if self._slow.get(client, 0.0) < time.monotonic():
            try:
                return await self._first.ask(client, *job)
            except TooLongError:
                self._note(client)
            except (TimeoutError, HelperEnded):
                self._note(client)
                raise
        return await self._second.ask(client, *job)

    def _note(self, client: str) -> None:
        self._slow.pop(client, None)
        self._slow[client] = time.monotonic() + _SLOW_S
        while len(self._slow) > _MOST_NOTED:
            del self._slow[next(iter(self._slow))]

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.gather(self._first.close(), self._second.close())


class HelperProcess:
    """The process, started with the first job."""

    def __init__(self, module: str, deadline_s: float, core_s: float, niceness: int):
        """module: that calls `serve_jobs`

        deadline_s: for one job;  core_s: of a core, for one job;  niceness: of the process
        """
        self._module = module
        self._deadline_s = deadline_s
        self._core_s = core_s
        self._niceness = niceness
        self._process: Process | None = None
        self._began_core_s = 0.0  # what the process had used before its job
        self._queue = FairQueue("jobs")

    async def ask(self, client: str, *job: bytes) -> bytes:
        """Returns the answer to a job of a client, given in parts.

        Raises TooLongError, HelperEnded, TimeoutError if only the deadline ends the job, and QueueFullError if too many
        of the client's wait, or if the machine has no time or no process for the job.
        """
        async with self._queue.turn(client):
            try:
                async with asyncio.timeout(self._deadline_s):
                    try:
                        return await self._ask_once(job)
                    except _KILLED:  # perhaps for what it had done before
                        await self.close()
                        return await self._ask_once(job)
            except TooLongError:  # the process has answered, and goes on
                raise
            except TimeoutError:
                had_its_time = self._used_core_s() > self._core_s
                await self.close()
                if had_its_time:
                    raise
                raise QueueFullError(
                    f"the machine was too busy for {self._deadline_s:g} s to do a part of the call; try again later"
                ) from None
            except _KILLED:
                await self.close()
                raise HelperEnded from None
            except BaseException:  # the caller was cancelled: what the process answers belongs to nobody
                await asyncio.shield(self.close())
                raise

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _ask_once(self, job: tuple[bytes, ...]) -> bytes:
        if self._process is None or self._process.returncode is not None:
            await self.close()
            command = (sys.executable, "-m", self._module, str(os.getpid()), str(self._niceness))
            try:
                self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
            except OSError as error:
                raise QueueFullError(
                    f"no process can be started for a part of the call ({error.strerror}); try again later"
                ) from None
            self._began_core_s = _START_CORE_S
        else:
            self._began_core_s = core_seconds(self._process.pid)
        answer, took_longer, has_ended = await _exchange(self._process, self._core_s, job)
        if has_ended:
            await self.close()
        if took_longer:
            raise TooLongError
        return answer

    def _used_core_s(self) -> float:
        """Returns the time of a core that the process has used for its job."""
        return 0.0 if self._process is None else core_seconds(self._process.pid) - self._began_core_s


async def _exchange(process: Process, core_s: float, job: tuple[bytes, ...]) -> tuple[bytes, bool, bool]:
    """Returns what the process answered, whether the job took longer than core_s, and whether the process ends now."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(FRAME.pack(sum(map(len, job)), core_s))
    for part in job:
        process.stdin.write(part)
    await process.stdin.drain()
    size, took_longer, has_ended = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
    return await process.stdout.readexactly(size), took_longer, has_ended


class _TakesTooLong(BaseException):
    """Not an Exception, which a job might catch."""


def serve_jobs(answer: Callable[[bytes], bytes], max_memory_bytes: int | None) -> None:
    """Answers until stdin ends.

    max_memory_bytes: of addresses; beyond it `answer` meets a MemoryError. None: no bound, and the process stays
                      however much it grows
    """
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    if max_memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    kept_bytes = None if max_memory_bytes is None else _KEPT_BYTES
    os.nice(int(sys.argv[2]))
    gc.disable()  # jobs leave no cycles, and looking through millions of lists for them takes seconds
    while serve_one(sys.stdin.buffer, sys.stdout.buffer, answer, kept_bytes):
        pass


def serve_one(
    source: BinaryIO, sink: BinaryIO, answer: Callable[[bytes], bytes], kept_bytes: int | None = None
) -> bool:
    """Reads one job and answers; returns False after the last one, or where the process has grown beyond kept_bytes."""
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
    goes_on = kept_bytes is None or _most_memory() <= kept_bytes
    sink.write(REPLY.pack(len(reply), took_longer, not goes_on) + reply)
    sink.flush()
    return goes_on


@contextmanager
def bounded_time(core_s: float) -> Iterator[None]:
    """Ends the block by a BaseException once it has used its CPU time, however busy the machine is."""

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
