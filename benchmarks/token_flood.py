"""The front end while ranks send many tokens, or more than it can pass on: /health, what clients get, and memory.

    python -m benchmarks.token_flood [--rate 77000] [--streams 256] [--seconds 20] [--route chat] [--note TEXT]

The real front end, and in the ranks' place one process (tests/server/fake_worker.py) that makes tokens at this rate.
One more process reads the streams, of /generate, /v1/completions or /v1/chat/completions. All share the machine's
cores. How many tokens came is counted by their text, which is the same for each.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import numpy as np

from benchmarks.conditions import conditions, save
from benchmarks.hostile_clients import Resources, cpu_s
from benchmarks.hostile_mix import request
from benchmarks.http_streams import _wait_until_ready
from moe_serve.engine.protocol.messages import Tokens
from moe_serve.launcher.rank_env import free_port

NUM_RANKS = 2
FLOOD = 77_000.0  # more than the front end can pass on
_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
_PERIOD_S = 0.05  # between two questions for /health
_QUIET_S = 5.0
_TOKEN, _TEXT = 7, b"&"  # of each token; stands nowhere else in an answer
_NUM_TOKENS = 1_000_000
_PARAMS = {"max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
_OPENAI = {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "stream": True}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {  # path and body
    "generate": (
        "/generate",
        {"input_ids": [7], "stream": True, "stream_options": {"incremental": True}, "sampling_params": _PARAMS},
    ),
    "completions": ("/v1/completions", {"prompt": [7], **_OPENAI}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **_OPENAI}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=FLOOD, help="tokens per second of all ranks")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--route", choices=list(ROUTES), default="generate", help="route of the streams")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("uvicorn", "h11", "pyzmq")
    os.environ["MOE_SERVE_TOKEN"] = secrets.token_hex(32)
    with front_end() as (pid, port, worker_port), flood(worker_port, args.rate) as told:
        _wait_until_ready(port, _Alive(pid))
        quiet = health(port, _QUIET_S)
        before, began_cpu_s, began_s = Resources.of(pid), cpu_s(pid), time.monotonic()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        reader = multiprocessing.Process(
            target=read_streams, args=(port, args.route, args.streams, args.seconds, sender)
        )
        reader.start()
        busy = health(port, args.seconds)
        took_s, cores = time.monotonic() - began_s, (cpu_s(pid) - began_cpu_s) / (time.monotonic() - began_s)
        after = Resources.of(pid)
        got = receiver.recv()
        reader.join()
        made = told()
    rows = [
        {"what": "tokens/s that ranks made", "value": f"{made / args.seconds:.0f}"},
        {"what": "tokens/s that clients got", "value": f"{got / args.seconds:.0f}"},
        {"what": "/health alone, p50 / p99 / most, ms", "value": _quantiles(quiet)},
        {"what": "/health in the flood, p50 / p99 / most, ms", "value": _quantiles(busy)},
        {"what": "memory of the front end, MiB", "value": f"{before.rss / 2**20:.0f} -> {after.rss / 2**20:.0f}"},
        {"what": "cores of the front end", "value": f"{cores:.2f}"},
    ]
    notes = (
        f"{args.streams} incremental streams of {ROUTES[args.route][0]} over {NUM_RANKS} ranks without a model, "
        f"{took_s:.0f} s at {args.rate:.0f} tokens/s asked for; {len(busy)} questions for /health, one after the "
        f"other, every {1e3 * _PERIOD_S:.0f} ms. Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    of_route = "" if args.route == "generate" else f"_{args.route}"
    name = f"token_flood{of_route}" if args.rate == FLOOD else f"token_flood{of_route}_{args.rate:.0f}"
    print(save(name, f"{args.rate:.0f} tokens per second through one front end", rows, facts, notes, per_cpu=True))


def _quantiles(values: list[float]) -> str:
    return " / ".join(f"{1e3 * np.quantile(values, share):.1f}" for share in (0.5, 0.99, 1.0))


@contextmanager
def front_end() -> Iterator[tuple[int, int, int]]:
    """Yields process, HTTP port and port of the ranks of a front end."""
    port, worker_port = free_port(), free_port()
    settings = [
        f"parallel.num_ranks={NUM_RANKS}", f"server.port={port}", f"server.worker_port={worker_port}",
        "engine.max_running_requests=1024",
    ]  # fmt: skip
    command = [sys.executable, "-m", "moe_serve", "frontend", *[f"--set={each}" for each in settings]]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process.pid, port, worker_port
    finally:
        process.terminate()
        process.wait(30)


class _Alive:
    """What `_wait_until_ready` asks of a process."""

    def __init__(self, pid: int):
        self._pid = pid

    def poll(self) -> int | None:
        return None if os.path.exists(f"/proc/{self._pid}") else 1


@contextmanager
def flood(worker_port: int, rate: float) -> Iterator[Callable[[], int]]:
    """Ranks in a process of their own. Yields a function that ends them and returns how many tokens they made."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=_flood, args=(worker_port, rate, stop, sender), daemon=True)
    process.start()

    def told() -> int:
        stop.set()
        return int(receiver.recv())

    try:
        yield told
    finally:
        process.terminate()
        process.join()


def _flood(worker_port: int, rate: float, stop: Event, answer: Connection) -> None:
    from tests.server.fake_worker import LIMITS, FakeWorker

    sevens = [_TOKEN] * _NUM_TOKENS
    limits = msgspec.structs.replace(LIMITS, max_model_len=2_000_000, max_prompt_len=1_000_000)

    class Paced(FakeWorker):
        """A rank that makes its share of the rate, as long as it has requests."""

        made = 0

        async def _produce(self) -> None:
            due_s = time.monotonic()
            while not stop.is_set():
                events = [self._step(submit) for submit in list(self.running.values())]
                now_s = time.monotonic()
                if not events:
                    due_s = now_s
                else:
                    self.say(Tokens(self.rank, self.launch_id, events))
                    self.made += len(events)
                    due_s = max(due_s, now_s - 1) + len(events) * NUM_RANKS / rate
                await asyncio.sleep(max(0.0 if events else 0.001, due_s - now_s))
            self.was_shut_down = True

    async def run() -> None:
        ranks = [
            Paced(rank, NUM_RANKS, worker_port, limits=limits, reply=lambda submit: sevens) for rank in range(NUM_RANKS)
        ]
        tasks = [asyncio.create_task(rank.run()) for rank in ranks]
        while not stop.is_set():
            await asyncio.sleep(0.1)
        answer.send(sum(rank.made for rank in ranks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def read_streams(port: int, route: str, num_streams: int, seconds: float, answer: Connection) -> None:
    """Reads streams for so long, then leaves; answers with the number of tokens that came."""
    path, fields = ROUTES[route]
    epoll, streams, num_tokens = select.epoll(), {}, 0
    until_s = time.monotonic() + seconds
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port), timeout=60)
        stream.sendall(request(json.dumps(fields).encode(), path))
        stream.setblocking(False)
        epoll.register(stream.fileno(), select.EPOLLIN)
        streams[stream.fileno()] = stream
    while time.monotonic() < until_s:
        for number, _ in epoll.poll(0.1):
            num_tokens += streams[number].recv(1 << 18).count(_TEXT)
    answer.send(num_tokens)


def health(port: int, seconds: float) -> list[float]:
    """Returns the seconds that /health took, asked over one connection."""
    found: list[float] = []
    until_s = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection, connection.makefile("rb") as answers:
        while time.monotonic() < until_s:
            begin_s = time.monotonic()
            connection.sendall(_HEALTH)
            assert answers.readline().startswith(b"HTTP/1.1 200")
            length = 0
            while (line := answers.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            answers.read(length)
            found.append(time.monotonic() - begin_s)
            time.sleep(_PERIOD_S)
    return found


if __name__ == "__main__":
    main()
