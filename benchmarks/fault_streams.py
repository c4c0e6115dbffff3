"""Streams that go on while a system is disturbed, and what becomes of them, for benchmarks/faults.py."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

PROMPTS = ("def __init__(self", "import os", "class A:", "The server", "x = [", "for i in range(", "return", "# how")
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]  # to a front end
_STREAM_S = 120.0  # within which a stream must end, faults included


@dataclass
class Tally:
    """What became of streams. pauses: (when it ended, seconds): the longest one between two events of each stream"""

    offered: int = 0
    finished: int = 0
    refused: int = 0
    cut_off: int = 0  # with the front end that they were connected to
    lost: int = 0
    wrong: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)


def body(number: int, num_tokens: int) -> bytes:
    """Returns the request of a number, always the same one: greedy and seeded ones in turn."""
    params = {"temperature": 0.8 * (number % 2), "sampling_seed": number, "ignore_eos": True}
    call = {"text": PROMPTS[number % len(PROMPTS)], "sampling_params": params | {"max_new_tokens": num_tokens}}
    return json.dumps(call | {"stream": True}).encode()


async def stream(
    connect: Connect,
    data: bytes,
    begin: Callable[[int], None] = lambda port: None,
    heard: Callable[[float], object] = lambda now_s: None,
) -> tuple[int, list[int] | None, tuple[float, float]]:
    """Returns status, tokens (None: ended with an error or without an end) and the longest pause of one stream, with
    the time at which it ended. begin: is told the client's own port;  heard: the time of each event"""
    reader, writer = await connect()
    begin(writer.get_extra_info("sockname")[1])
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    status = int((await reader.readline()).split()[1])
    tokens: list[int] | None = None
    is_whole, last_s, longest = False, time.monotonic(), (0.0, 0.0)
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            is_whole = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            tokens = event.get("output_ids")
            now_s = time.monotonic()
            heard(now_s)
            if now_s - last_s > longest[1]:
                longest = (now_s, now_s - last_s)
            last_s = now_s
    writer.close()
    return status, tokens if is_whole else None, longest


async def right_tokens(connect: Connect, count: int, num_tokens: int) -> list[list[int]]:
    """Returns the tokens of each request of the list, with nothing going wrong."""
    answers = await asyncio.gather(*[stream(connect, body(number, num_tokens)) for number in range(count)])
    assert all(status == 200 and tokens is not None for status, tokens, _ in answers)
    return [tokens for _, tokens, _ in answers if tokens is not None]


class Load:
    """Streams that go on until they are told to end.

    cut_off: ports of the clients whose front end was killed while they were connected to it
    """

    def __init__(self, connect: Connect, right: list[list[int]], num_tokens: int, cut_off: set[int]):
        self.tally = Tally()
        self.goes_on = True
        self._connect = connect
        self._right = right
        self._num_tokens = num_tokens
        self._cut_off = cut_off
        self._numbers = itertools.cycle(range(len(right)))

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*[self._client() for _ in range(at_once)])

    async def _client(self) -> None:
        tally = self.tally
        while self.goes_on:
            number = next(self._numbers)
            tally.offered += 1
            own: list[int] = []
            try:
                async with asyncio.timeout(_STREAM_S):
                    status, tokens, pause = await stream(self._connect, body(number, self._num_tokens), own.append)
            except (OSError, TimeoutError, IndexError):
                self._count_lost(own)
                continue
            if status in (429, 503):
                tally.refused += 1
                await asyncio.sleep(0.2)  # as Retry-After asks for, at least
            elif status != 200 or tokens is None:
                self._count_lost(own)
            else:
                tally.finished += 1
                tally.wrong += tokens != self._right[number]
                tally.pauses.append(pause)

    def _count_lost(self, own: list[int]) -> None:
        was_cut_off = bool(own) and own[0] in self._cut_off
        self._cut_off.difference_update(own)  # the port may be another client's later
        self.tally.cut_off += was_cut_off
        self.tally.lost += not was_cut_off
