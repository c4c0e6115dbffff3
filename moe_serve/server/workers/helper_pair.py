"""Two helper processes of one kind: the second one is for clients whose jobs take long, so that they hold up no others.

What counts is the time of a core, not that of a clock: on a busy machine everybody's jobs are late. Torch-free.
"""

import asyncio
import time

from moe_serve.errors import QueueFullError
from moe_serve.log import get_logger
from moe_serve.server.workers.helper_process import HelperEnded, HelperProcess, TooLongError

log = get_logger(__name__)

_SLOW_NICENESS = 10  # ranks and the front end may need the same core, and serve those whose jobs are short
_MOST_NOTED = 4096  # clients


class HelperPair:
    """The processes, each started with its first job, or by `start`."""

    def __init__(self, module: str, deadline_s: float, short_s: float, core_s: float, memory_s: float = 60.0):
        """module, deadline_s: as of HelperProcess

        short_s:  of a core: a job that takes longer is ended, and begun again in the second process
        core_s:   of a core, in the second process
        memory_s: after such a job, its client's jobs go to the second process at once for so long
        """
        self._module = module
        self._first = HelperProcess(module, deadline_s, short_s, niceness=0)
        self._second = HelperProcess(module, deadline_s, core_s, _SLOW_NICENESS)
        self._memory_s = memory_s
        self._slow: dict[str, float] = {}  # clients, and until when they are; who was noted last comes last

    async def start(self, job: bytes) -> None:
        """Starts both processes before the first client asks, and returns when each has answered a job.

        What keeps one from it now is logged; it is tried again with the first client's job.
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
        self._slow[client] = time.monotonic() + self._memory_s
        while len(self._slow) > _MOST_NOTED:
            del self._slow[next(iter(self._slow))]

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.gather(self._first.close(), self._second.close())
