"""A child process that does work for the front end which may take long or much memory, one job at a time: clients
take turns. Torch-free.

While Python works no other thread runs; and a process can be bounded in seconds and bytes, and killed. The child's side
is helper_loop.py.
"""

import asyncio
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process

from moe_serve.errors import QueueFullError
from moe_serve.process_facts import core_seconds
from moe_serve.server.workers.turns import Turns

FRAME = struct.Struct("<Id")  # of what the process gets: bytes of the job; seconds of a core that it may take
REPLY = struct.Struct("<I??")  # of what it answers: bytes of the answer; whether the job took longer; whether it ends
_START_CORE_S = 0.5  # of a core, for a new process
_KILLED = (ConnectionError, asyncio.IncompleteReadError)  # what shows that the process has ended


class HelperEnded(Exception):
    """The process was killed over a job twice: for the memory that it takes, most likely."""


class TooLongError(Exception):
    """A job has used up the time of a core that it was given."""


class HelperProcess:
    """The process, started with the first job."""

    def __init__(self, module: str, deadline_s: float, core_s: float, niceness: int):
        """module: that calls helper_loop.serve_jobs

        deadline_s: for one job;  core_s: of a core, for one job;  niceness: of the process
        """
        self._module = module
        self._deadline_s = deadline_s
        self._core_s = core_s
        self._niceness = niceness
        self._process: Process | None = None
        self._began_core_s = 0.0  # what the process had used before its job
        self._turns = Turns("jobs")

    async def ask(self, client: str, *job: bytes) -> bytes:
        """Returns the answer to a job of a client, given in parts.

        Raises TooLongError, HelperEnded, TimeoutError where nothing but the deadline ends the job, and QueueFullError
        where too many of the client wait, or the machine has no time or no process for the job.
        """
        async with self._turns.turn(client):
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
