"""Pauses between tokens while long prompts arrive: prefill and decode ranks, beside chunked prefill on as many cores.

    python -m benchmarks.roles [--rounds 4] [--seconds 12] [--streams 8] [--chunk 256] [--prompt 2048]

Serves the bench model twice, on two ranks with one thread each: one prefill and one decode rank, and two ranks that do
both. Each round measures each system with streams alone (idle), then with the same streams while prompts arrive one by
one, at half of the rate that the prefill rank can take. A pause is the time between two tokens of a stream at its
client. Streams run from before a measurement to its end, so that their own short prompts hold up none of them. One
process with one thread sends and reads everything; it and the front ends share the cores with the ranks.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.bench_model import CONFIG, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from benchmarks.server import Server

VOCAB: int = int(str(CONFIG["vocab_size"]))
SETTLE_S = 1.0  # of streams, before pauses count
OUTPUT = 8  # tokens of each long prompt


@dataclass
class Seen:
    """What clients saw of a system, over all rounds. Times in seconds"""

    idle: list[float] = field(default_factory=list)  # pauses
    busy: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # of each prompt that arrived
    whole: list[float] = field(default_factory=list)
    num_tokens: int = 0  # of streams and prompts while prompts arrived
    busy_s: float = 0.0


class Clients:
    """Sends requests to one server and reads their tokens as they come."""

    def __init__(self, port: int, seed: int, num_streams: int, num_prompt: int):
        self._url, self._draw = f"http://127.0.0.1:{port}/generate", random.Random(seed)
        self._num_streams, self._num_prompt = num_streams, num_prompt

    async def _ask(self, session: aiohttp.ClientSession, num_prompt: int, num_output: int, times: list[float]) -> None:
        """Asks for tokens behind a new prompt, and adds the time at which each has come."""
        body: dict[str, Any] = {
            "input_ids": [self._draw.randrange(3, VOCAB) for _ in range(num_prompt)],
            "stream": True,
        }
        body["sampling_params"] = {"max_new_tokens": num_output, "ignore_eos": True, "temperature": 0}
        num_seen = 0
        async with session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    found = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    times += [time.perf_counter()] * (found > num_seen)
                    num_seen = found

    async def streams(self, seconds: float, period_s: float | None, seen: Seen) -> None:
        """Reads streams for so long. period_s: between two long prompts; None: none come"""
        end_s = time.perf_counter() + SETTLE_S + seconds
        pauses = seen.idle if period_s is None else seen.busy
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

            async def stream() -> None:
                times: list[float] = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(end_s - time.perf_counter()):
                        await self._ask(session, 64, 2 * self._num_prompt - 64, times)
                counted = [at for at in times if begin_s <= at <= end_s]
                pauses.extend(b - a for a, b in itertools.pairwise(counted))
                seen.num_tokens += 0 if period_s is None else len(counted)

            async def prompt() -> None:
                times: list[float] = []
                began_s = time.perf_counter()
                await self._ask(session, self._num_prompt, OUTPUT, times)
                seen.first.append(times[0] - began_s)
                seen.whole.append(times[-1] - began_s)
                seen.num_tokens += len(times)

            begin_s = time.perf_counter() + SETTLE_S
            tasks = [asyncio.create_task(stream()) for _ in range(self._num_streams)]
            await asyncio.sleep(SETTLE_S)
            while period_s is not None and time.perf_counter() < end_s:
                tasks.append(asyncio.create_task(prompt()))
                await asyncio.sleep(period_s)
            await asyncio.gather(*tasks)
        if period_s is not None:
            seen.busy_s += seconds

    async def alone(self) -> float:
        """Returns the time to the first token of a long prompt that nobody else waits for."""
        async with aiohttp.ClientSession() as session:
            times: list[float] = []
            began_s = time.perf_counter()
            await self._ask(session, self._num_prompt, 1, times)
            return times[0] - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0, help="of a measurement with prompts; half of it idle")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=256, help="engine.max_batch_tokens")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt that arrives")
    args = parser.parse_args()
    facts = conditions("aiohttp")
    with tempfile.TemporaryDirectory() as scratch:
        model = write_bench_model(Path(scratch) / "model", max_position_embeddings=2 * args.prompt)
        settings = {
            "model.path": model, "model.skip_tokenizer": True, "parallel.device": "cpu",
            "parallel.threads_per_rank": 1, "engine.max_batch_tokens": args.chunk, "cache.memory_gib": 0.5,
        }  # fmt: skip
        roles = settings | {"parallel.num_ranks": 1, "parallel.num_prefill_ranks": 1}
        both = settings | {"parallel.num_ranks": 2}
        with Server(roles) as apart, Server(both) as together:
            late_s = time.monotonic() + 60
            while apart.info()["prefill"]["state"] != "ready" and time.monotonic() < late_s:
                time.sleep(0.05)
            servers = {"1 prefill + 1 decode": apart, "2 ranks, chunked prefill": together}
            clients = {
                name: Clients(server.port, seed, args.streams, args.prompt)
                for seed, (name, server) in enumerate(servers.items())
            }
            seen = {name: Seen() for name in servers}
            for each in clients.values():
                asyncio.run(each.streams(1.0, None, Seen()))  # meets cold pools
            period_s = 2 * statistics.median(asyncio.run(clients["1 prefill + 1 decode"].alone()) for _ in range(3))
            for _ in range(args.rounds):
                for name, each in clients.items():
                    asyncio.run(each.streams(args.seconds / 2, None, seen[name]))
                    asyncio.run(each.streams(args.seconds, period_s, seen[name]))
            routes = apart.info()["prefill"]["routes"]
    rows = [_row(name, each) for name, each in seen.items()]
    notes = (
        f"{args.streams} streams; prompts of {args.prompt} tokens with {OUTPUT} tokens of output, one every "
        f"{1e3 * period_s:.0f} ms; chunks of {args.chunk} tokens; {args.rounds} rounds, systems interleaved. Where "
        f"requests of the first system began: {routes}."
    )
    print(save("roles", "Pauses between tokens while long prompts arrive", rows, facts, notes, per_cpu=True))


def _row(name: str, seen: Seen) -> dict[str, Any]:
    idle, busy = (float(np.percentile(pauses, 99)) for pauses in (seen.idle, seen.busy))
    return {
        "ranks": name,
        "p99 pause idle, ms": f"{1e3 * idle:.1f}",
        "p99 pause, prompts arrive, ms": f"{1e3 * busy:.1f}",
        "over idle": f"{busy / idle:.2f}",
        "median pause, ms": f"{1e3 * statistics.median(seen.busy):.1f}",
        "TTFT of the prompts, median, ms": f"{1e3 * statistics.median(seen.first):.0f}",
        "TTFT p99, ms": f"{1e3 * float(np.percentile(seen.first, 99)):.0f}",
        "prompts": str(len(seen.first)),
        "output tokens/s": f"{seen.num_tokens / seen.busy_s:.0f}",
    }


if __name__ == "__main__":
    main()
