"""A server under hostile clients: 5xx answers, leaks, and the latency of one well-behaved client beside them.

    python -m benchmarks.hostile_clients [--requests 6000] [--rate 200] [--rounds 3] [--at-once 64] [--note TEXT]

Serves the demo model on two ranks. One client sends short requests, one after the other; in every second phase hostile
clients (benchmarks/hostile_mix.py) run beside it, in a process of the lowest priority, since clients and server share
the machine's cores. 100,000 requests at 200 per second take nine minutes. Progress goes to stderr.
"""

import argparse
import asyncio
import collections
import json
import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.conditions import conditions, save
from benchmarks.hostile_mix import KINDS, Kind, Socket, request
from benchmarks.http_streams import _server

BODY = json.dumps(
    {"text": "def add(a, b):", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
).encode()


@dataclass
class Tally:
    """What hostile clients were answered."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: list[str] = field(default_factory=list)  # kinds that got a 5xx or no answer that was due, the first few
    num_sent: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the hostile clients' process

    def add(self, other: "Tally") -> None:
        self.statuses += other.statuses
        self.errors = (self.errors + other.errors)[:20]
        self.num_sent += other.num_sent
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s


@dataclass(frozen=True)
class Resources:
    """Of the front end: resident memory in bytes, descriptors, threads."""

    rss: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Resources":
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return cls(
            int(status["VmRSS"].split()[0]) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"])
        )


@dataclass(frozen=True)
class Attack:
    """at_once: connections; rate: requests per second, 0 = no limit; number: of requests"""

    at_once: int
    rate: float
    number: int
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="hostile ones, in all")
    parser.add_argument("--rate", type=float, default=200.0, help="hostile requests per second; 0: as many as can be")
    parser.add_argument("--quiet-seconds", type=float, default=20.0, help="without hostile clients, in all")
    parser.add_argument("--at-once", type=int, default=64, help="hostile connections")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of a quiet and a hostile phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("uvicorn", "h11", "msgspec")
    quiet: list[list[float]] = []
    hostile: list[list[float]] = []
    tally, front_end_s = Tally(), 0.0
    with _server(["parallel.num_ranks=2", "cache.memory_gib=0.2", "server.header_deadline_s=5"]) as port:
        pid = front_end_of(port)
        _beside(port, Attack(args.at_once, args.rate, 600, args.seed))  # pools and caches grow to their size
        before = Resources.of(pid)
        number = -(-args.requests // args.rounds)
        for index in range(args.rounds):
            quiet.append(asyncio.run(_well_behaved(port, args.quiet_seconds / args.rounds)))
            began_s = cpu_s(pid)
            latencies, found = _beside(port, Attack(args.at_once, args.rate, number, args.seed + 1 + index))
            front_end_s += cpu_s(pid) - began_s
            hostile.append(latencies)
            tally.add(found)
            told = f"round {index + 1} of {args.rounds}: {tally.num_sent} hostile requests, {tally.seconds:.0f} s"
            print(f"{told}, p99 {1e3 * np.quantile(quiet[-1], 0.99):.0f} ms alone, "
                  f"{1e3 * np.quantile(latencies, 0.99):.0f} ms beside", file=sys.stderr, flush=True)  # fmt: skip
        time.sleep(8)  # deadlines pass: what is left open now is a leak
        after = Resources.of(pid)
    _report(args, facts, quiet, hostile, tally, before, after, front_end_s)


def _beside(port: int, attack_plan: Attack) -> tuple[list[float], Tally]:
    """Returns the latencies of the well-behaved client beside hostile ones, and what these were answered."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        attack = pool.apply_async(_attack, (port, attack_plan))
        latencies: list[float] = []
        while not attack.ready():
            latencies += asyncio.run(_well_behaved(port, 1.0))
        return latencies, attack.get()


def _attack(port: int, attack: Attack) -> Tally:
    os.nice(19)
    return asyncio.run(_attackers(port, attack))


async def _attackers(port: int, attack: Attack) -> Tally:
    tally = Tally()
    begin_s = time.monotonic()
    kinds, weights = list(KINDS), list(KINDS.values())

    async def attacker(draw: random.Random) -> None:
        while tally.num_sent < attack.number:
            due_s = begin_s + tally.num_sent / attack.rate if attack.rate else 0.0
            tally.num_sent += 1
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await _one(port, draw, draw.choices(kinds, weights)[0], tally)

    await asyncio.gather(*[attacker(random.Random(f"{attack.seed}.{index}")) for index in range(attack.at_once)])
    tally.seconds, tally.cpu_s = time.monotonic() - begin_s, time.process_time()
    return tally


async def _one(port: int, draw: random.Random, kind: Kind, tally: Tally) -> None:
    """Runs one hostile connection."""
    try:
        socket = Socket(*await asyncio.open_connection("127.0.0.1", port))
    except OSError as error:
        tally.statuses[f"no connection: {error.strerror}"] += 1
        return
    try:
        status = await kind(socket, draw)
        tally.statuses["none due" if status is None else str(status)] += 1
        if status is not None and status >= 500:
            tally.errors.append(f"{kind.__name__}: {status}")
    except (OSError, TimeoutError, ValueError) as error:
        tally.statuses["reset" if isinstance(error, ConnectionError) else "no answer"] += 1
        if not isinstance(error, ConnectionError):
            tally.errors.append(f"{kind.__name__}: {error!r}")
    finally:
        socket.writer.transport.abort()


async def _well_behaved(port: int, seconds: float) -> list[float]:
    """Returns the seconds of requests that were sent one after the other over one connection, each answered 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    latencies = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        begin_s = time.monotonic()
        writer.write(request(BODY))
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        assert head.startswith(b"HTTP/1.1 200"), head
        latencies.append(time.monotonic() - begin_s)
    writer.close()
    return latencies


def cpu_s(pid: int) -> float:
    """Returns the seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def front_end_of(port: int) -> int:
    """Returns the process that listens on a port."""
    for commandline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = commandline.read_bytes().split(b"\0")
            environ = (commandline.parent / "environ").exists()
        except OSError:
            continue
        if environ and b"moe_serve.launcher.frontend" in words and _listens(int(commandline.parent.name), port):
            return int(commandline.parent.name)
    raise RuntimeError(f"nothing listens on port {port}")


def _listens(pid: int, port: int) -> bool:
    inodes = {os.readlink(link)[8:-1] for link in Path(f"/proc/{pid}/fd").iterdir() if "socket" in os.readlink(link)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1][-4:], 16) == port and row[9] in inodes for row in rows)


def _report(
    args: argparse.Namespace,
    facts: dict[str, object],
    quiet: list[list[float]],
    hostile: list[list[float]],
    tally: Tally,
    before: Resources,
    after: Resources,
    front_end_s: float,
) -> None:
    def quantiles(phases: list[list[float]]) -> tuple[float, float]:
        values = np.concatenate([np.array(phase) for phase in phases])
        return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99))

    (p50, p99), (hostile_p50, hostile_p99) = quantiles(quiet), quantiles(hostile)
    num_5xx = sum(count for status, count in tally.statuses.items() if status.startswith("5"))
    rows = [
        {"what": "hostile requests", "value": tally.num_sent},
        {"what": "answers 5xx", "value": num_5xx},
        {"what": "answers that were due and did not come", "value": tally.statuses["no answer"]},
        {"what": "well-behaved client, p50 alone / beside, ms", "value": _pair(p50, hostile_p50)},
        {"what": "well-behaved client, p99 alone / beside, ms", "value": _pair(p99, hostile_p99)},
        {"what": "p99, beside over alone", "value": f"{hostile_p99 / p99:.2f}"},
        {"what": "memory of the front end, MiB", "value": f"{before.rss / 2**20:.1f} -> {after.rss / 2**20:.1f}"},
        {"what": "descriptors", "value": f"{before.descriptors} -> {after.descriptors}"},
        {"what": "threads", "value": f"{before.threads} -> {after.threads}"},
        {"what": "cores of the front end beside hostile clients", "value": f"{front_end_s / tally.seconds:.2f}"},
        {"what": "cores of the hostile clients", "value": f"{tally.cpu_s / tally.seconds:.2f}"},
    ]
    answers = ", ".join(f"{status}: {count}" for status, count in tally.statuses.most_common())
    notes = (
        f"Up to {args.at_once} hostile connections at a time, {tally.num_sent / tally.seconds:.0f} requests per second "
        f"({args.rate:g} asked for; 0 = as many as can be), of {len(KINDS)} "
        "kinds, in a process of the lowest priority; the well-behaved client asks for 8 tokens, one request after the "
        f"other ({sum(map(len, quiet))} alone, {sum(map(len, hostile))} beside), over {args.rounds} pairs of phases. "
        f"Answers: {answers}. {'First errors: ' + '; '.join(tally.errors[:5]) + '. ' if tally.errors else ''}"
        f"Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("hostile_clients", "A server under hostile clients", rows, facts, notes, per_cpu=True))


def _pair(alone_s: float, beside_s: float) -> str:
    return f"{1e3 * alone_s:.1f} / {1e3 * beside_s:.1f}"


if __name__ == "__main__":
    main()
