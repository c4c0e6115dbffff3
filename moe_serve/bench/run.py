"""Sends a load to a server: a closed loop, an open loop by arrival times, or all requests at once."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.bench.client import Client, Outcome
from moe_serve.bench.load import Load, Prompts, arrivals
from moe_serve.errors import LaunchError

_AFTER_ERROR_S = 0.1  # a client of a closed loop waits, where no refusal says how long: else it would only count errors
_LONGEST_WAIT_S = 60.0  # that a refusal may ask a client of a closed loop for


@dataclass(frozen=True)
class Ran:
    """The outcomes of a load. seconds: from the first request's time to the last one's end;  cpu_s: of this process"""

    outcomes: list[Outcome]
    seconds: float
    cpu_s: float
    was_interrupted: bool


async def run_load(load: Load, prompts: Prompts, client: Client, progress: Callable[[Outcome], None]) -> Ran:
    """Warms up, sends the load, and returns all outcomes in the order of their numbers.

    Raises LaunchError when a warm-up fails. Cancelled once (Ctrl-C), it ends open requests and returns what there is.
    """
    await _warm_up(load, prompts, client)
    due = arrivals(load, random.Random(load.seed))
    prompts.prepare()
    sending = _Sending(load, prompts, client, progress)
    begin_cpu_s, was_interrupted = time.process_time(), False
    try:
        await (sending.closed() if due is None else sending.open(due))
    except asyncio.CancelledError:
        was_interrupted = True
        await sending.end()
    outcomes = sorted(sending.outcomes, key=lambda outcome: outcome.number)
    seconds = max((outcome.end_s for outcome in outcomes), default=0.0)
    return Ran(outcomes, seconds, time.process_time() - begin_cpu_s, was_interrupted)


async def _warm_up(load: Load, prompts: Prompts, client: Client) -> None:
    for number in range(load.num_warmups):
        found = await client.ask(prompts.ask(-1 - number, load.domains[0]), 0.0, time.monotonic())
        if found.error is not None:
            raise LaunchError(f"the warm-up failed: {found.error}: {found.detail}; see --base-url and --endpoint")


class _Sending:
    def __init__(self, load: Load, prompts: Prompts, client: Client, progress: Callable[[Outcome], None]):
        self.outcomes: list[Outcome] = []
        self._load = load
        self._prompts = prompts
        self._client = client
        self._progress = progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin_s = time.monotonic()
        self._next = 0

    async def open(self, due: list[float]) -> None:
        """Sends each request when it is due, or later where max_concurrency holds it back."""
        places = asyncio.Semaphore(self._load.max_concurrency or len(due) or 1)
        for number, due_s in enumerate(due):
            wait_s = due_s - self._elapsed_s
            await asyncio.sleep(max(0.0, wait_s))  # where it is behind, too: answers must be read all the same
            await places.acquire()
            task = asyncio.create_task(self._in_its_place(number, due_s, places))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _in_its_place(self, number: int, due_s: float, places: asyncio.Semaphore) -> None:
        await self._one(number, due_s)
        places.release()

    async def closed(self) -> None:
        """Keeps max_concurrency requests open; a client that is refused waits as long as the refusal says."""
        assert self._load.max_concurrency is not None
        self._tasks = {asyncio.create_task(self._client_of_many()) for _ in range(self._load.max_concurrency)}
        await asyncio.gather(*self._tasks)

    async def end(self) -> None:
        """Ends the open requests: each becomes an outcome."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client_of_many(self) -> None:
        while (self._load.num_prompts is None or self._next < self._load.num_prompts) and (
            self._load.duration_s is None or self._elapsed_s < self._load.duration_s
        ):
            number, self._next = self._next, self._next + 1
            outcome = await self._one(number, self._elapsed_s)
            if outcome.error == "interrupted":
                return
            if outcome.error is not None:
                await asyncio.sleep(min(outcome.retry_after_s or _AFTER_ERROR_S, _LONGEST_WAIT_S))

    async def _one(self, number: int, due_s: float) -> Outcome:
        ask = self._prompts.ask(number, self._load.domain_at(due_s))
        outcome = await self._client.ask(ask, due_s, self._begin_s)
        self.outcomes.append(outcome)
        self._progress(outcome)
        return outcome

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s
