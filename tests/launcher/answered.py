"""Clients that send calls, many at a time, and wait for every answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

C = TypeVar("C")


@dataclass
class Answers:
    """What came back. wrong: what was not answered as it should have been, with the call"""

    number: int = 0
    wrong: list[str] = field(default_factory=list)


async def send_all(
    address: str, calls: Iterable[C], ask: Callable[[httpx.AsyncClient, C], Awaitable[str]], limit_s: float
) -> Answers:
    """Sends calls, 32 at a time, and waits limit_s at most for each answer. ask: returns what is wrong with it"""
    answers, left, num_clients = Answers(), iter(calls), 32

    async def send_next(client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        for call in left:
            started_s = loop.time()
            try:
                async with asyncio.timeout(limit_s):
                    problem = await ask(client, call)
            except (TimeoutError, httpx.HTTPError, ValueError) as error:
                problem = repr(error)
            answers.number += 1
            if problem:
                answers.wrong.append(f"{problem} after {loop.time() - started_s:.1f} s: {str(call)[:3000]}")

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=address, timeout=None, trust_env=False, limits=limits) as client:
        await asyncio.gather(*[send_next(client) for _ in range(num_clients)])
    return answers
