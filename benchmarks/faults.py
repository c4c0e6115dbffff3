"""What becomes of requests while processes are killed, stopped and slowed, connections reset and bad bodies sent.

    python -m benchmarks.faults [--events 12] [--ranks 2] [--redundant 0] [--streams 16] [--seed 0]

Serves the demo model by `moe-serve serve`. Streams go on all the time; a stream that ends is replaced by the next one
of a fixed list. One fault after the other is injected, each once the streams run again. The tokens of every stream are
compared with those of the same server before anything was disturbed. With --redundant 64 a lost rank is spared; with 0
all ranks are started again. An event takes 2 to 8 s.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.conditions import conditions, save
from benchmarks.fault_system import FaultySystem

PROMPTS = ("def __init__(self", "import os", "class A:", "The server", "x = [", "for i in range(", "return", "# how")
_READY_S = 60.0  # within which the system must serve again after a fault
_STREAM_S = 120.0  # within which a stream must end, faults included


@dataclass
class Tally:
    """What became of streams. gaps_s: the longest pause between two events of each stream that has ended"""

    offered: int = 0
    finished: int = 0
    refused: int = 0
    lost: int = 0
    wrong: int = 0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """One fault. ready_s: until the system answered a new request again"""

    name: str
    ready_s: float


def body(number: int, num_tokens: int) -> bytes:
    """Returns the request of a number, always the same one: greedy and seeded ones in turn."""
    params = {"temperature": 0.8 * (number % 2), "sampling_seed": number, "ignore_eos": True}
    call = {"text": PROMPTS[number % len(PROMPTS)], "sampling_params": params | {"max_new_tokens": num_tokens}}
    return json.dumps(call | {"stream": True}).encode()


async def stream(port: int, data: bytes) -> tuple[int, list[int] | None, float]:
    """Returns status, tokens (None: ended with an error or without an end) and the longest pause of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    status = int((await reader.readline()).split()[1])
    tokens: list[int] | None = None
    is_whole, last_s, gap_s = False, time.monotonic(), 0.0
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            is_whole = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            tokens = event.get("output_ids")
            gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
    writer.close()
    return status, tokens if is_whole else None, gap_s


async def right_tokens(port: int, count: int, num_tokens: int) -> list[list[int]]:
    """Returns the tokens of each request of the list, with nothing going wrong."""
    answers = await asyncio.gather(*[stream(port, body(number, num_tokens)) for number in range(count)])
    assert all(status == 200 and tokens is not None for status, tokens, _ in answers)
    return [tokens for _, tokens, _ in answers if tokens is not None]


class Load:
    """Streams that go on until they are told to end."""

    def __init__(self, port: int, right: list[list[int]], num_tokens: int):
        self.tally = Tally()
        self.goes_on = True
        self._port = port
        self._right = right
        self._num_tokens = num_tokens
        self._numbers = itertools.cycle(range(len(right)))

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*[self._client() for _ in range(at_once)])

    async def _client(self) -> None:
        tally = self.tally
        while self.goes_on:
            number = next(self._numbers)
            tally.offered += 1
            try:
                async with asyncio.timeout(_STREAM_S):
                    status, tokens, gap_s = await stream(self._port, body(number, self._num_tokens))
            except (OSError, TimeoutError, IndexError):
                tally.lost += 1
                continue
            if status in (429, 503):
                tally.refused += 1
                await asyncio.sleep(0.2)  # as Retry-After asks for, at least
            elif status != 200 or tokens is None:
                tally.lost += 1
            else:
                tally.finished += 1
                tally.wrong += tokens != self._right[number]
                tally.gaps_s.append(gap_s)


def faults(system: FaultySystem, draw: random.Random) -> dict[str, Callable[[], Awaitable[None]]]:
    """Returns what can be done to a system, by name."""

    async def kill_rank() -> None:
        os.kill(system.rank_pid(draw.choice(system.serving_ranks())), signal.SIGKILL)

    async def kill_all_ranks() -> None:
        for rank in system.serving_ranks():
            os.kill(system.rank_pid(rank), signal.SIGKILL)

    async def stop_rank() -> None:
        pid = system.rank_pid(draw.choice(system.serving_ranks()))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    async def slow_rank() -> None:
        pid = system.rank_pid(draw.choice(system.serving_ranks()))
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)

    async def reset_connections() -> None:
        system.cut()

    async def bad_input() -> None:
        for data in (b"{", b"[]", b'{"text": 5}', b'{"input_ids": [-1]}', b"\xff" * 4096, b"[" * 5000):
            status, _, _ = await stream(system.port, data)
            assert 400 <= status < 500, status

    return {
        "kill a rank": kill_rank,
        "stop a rank for 1 s": stop_rank,
        "slow a rank to half for 2 s": slow_rank,
        "reset connections of ranks": reset_connections,
        "kill all ranks": kill_all_ranks,
        "bad input": bad_input,
    }


async def disturb(system: FaultySystem, args: argparse.Namespace, right: list[list[int]]) -> tuple[Tally, list[Event]]:
    """Runs streams and faults; returns what became of the streams, and the faults."""
    load = Load(system.port, right, args.tokens)
    streams = asyncio.create_task(load.run(args.streams))
    kinds = faults(system, random.Random(args.seed))
    events: list[Event] = []
    for name in itertools.islice(itertools.cycle(kinds), args.events):
        before = load.tally.finished
        await asyncio.sleep(args.pause)
        begin_s = time.monotonic()
        await kinds[name]()
        status = 0
        while status != 200:
            assert time.monotonic() - begin_s < _READY_S, f"not ready {_READY_S:g} s after: {name}"
            await asyncio.sleep(0.1)
            status, _, _ = await stream(system.port, body(0, 2))
        events.append(Event(name, time.monotonic() - begin_s))
        print(
            f"{name}: serves again after {events[-1].ready_s:.1f} s; {load.tally.finished - before} ended", flush=True
        )
        if name.startswith("kill a rank") and len(system.serving_ranks()) < args.ranks:
            await kinds["kill all ranks"]()  # a killed rank comes back with the next launch only
            await system.serves_with(args.ranks, _READY_S)
    load.goes_on = False
    await streams
    return load.tally, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=12, help="faults, of six kinds in turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=0, help="eplb.num_redundant_experts")
    parser.add_argument("--streams", type=int, default=16, help="open at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq", "msgspec")
    with FaultySystem(args.ranks, args.redundant) as system:
        right = asyncio.run(right_tokens(system.port, 4 * args.streams, args.tokens))
        tally, events = asyncio.run(disturb(system, args, right))
        counters = json.load(urllib.request.urlopen(f"http://127.0.0.1:{system.port}/server_info"))["requests"]
    report(args, facts, tally, events, counters)


def rows_of(events: list[Event]) -> Iterator[dict[str, object]]:
    for name in dict.fromkeys(event.name for event in events):
        times = [event.ready_s for event in events if event.name == name]
        yield {
            "fault": name,
            "times": len(times),
            "serves again after, median s": statistics.median(times),
            "longest, s": max(times),
        }


def report(
    args: argparse.Namespace, facts: dict[str, object], tally: Tally, events: list[Event], counters: dict[str, int]
) -> None:
    gaps = sorted(tally.gaps_s)
    notes = (
        f"Demo model, {args.ranks} ranks, {args.redundant} redundant experts, {args.streams} streams of {args.tokens} "
        f"tokens at a time, {len(events)} faults. Streams offered {tally.offered}, finished {tally.finished}, refused "
        f"{tally.refused} (429 or 503), lost {tally.lost}, with wrong tokens {tally.wrong}; moved to another rank "
        f"{counters['num_moved']}, submitted again {counters['num_resubmitted']}. Longest pause of a stream: median "
        f"{statistics.median(gaps):.2f} s, longest {gaps[-1]:.1f} s. {args.note}"
    )
    name = f"faults_{args.ranks}_ranks_{args.redundant}_redundant"
    print(
        save(name, "Requests while processes and connections fail", list(rows_of(events)), facts, notes, per_cpu=True)
    )
    if tally.lost or tally.wrong:
        raise SystemExit("requests were lost or wrong")


if __name__ == "__main__":
    main()
