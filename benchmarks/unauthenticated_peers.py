"""What unauthenticated peers read, inject and cost on every port of a serving system.

    python -m benchmarks.unauthenticated_peers [--seconds 60] [--rate 200] [--streams 16] [--tokens 256] [--note TEXT]

Two ranks and a front end that talk by TCP on this machine, each found by its listening ports. Unauthenticated peers
send noise, length prefixes of 4 GB, invalid UTF-8, messages without the token and with another one, and bytes that were
recorded from processes that know the token. In every pair of rounds they do it once to these ports and once to ports of
their own: so the difference is what the system spends on them, not what they take from its cores. The order within
pairs alternates, so that drift cancels. --seconds: of rounds with peers at our ports.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import numpy as np
import zmq

from benchmarks.conditions import conditions, save
from benchmarks.http_streams import _over_http, _wait_until_ready
from moe_serve.engine.protocol.messages import Fatal, Hello, Wake, encode
from moe_serve.launcher.rank_env import free_port
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from tests.launcher.listening import listening


def payloads() -> list[bytes]:
    """Returns what peers send: noise, length prefixes of 4 GB, invalid UTF-8, and real messages without a token."""
    draw = random.Random(11)
    huge = b"\x02" + struct.pack(">Q", 2**32)
    frames = [encode(Wake(0, 1)), encode(Fatal(1, 0, "rank 1 has ended", 1)), b"\x93\xa4wak\xff\xff\0"]
    return [
        b"",
        bytes(draw.randrange(256) for _ in range(4096)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"\x80\x04K\x01.",
        struct.pack("<Q", 2**32) + b"\xff" * 64,
        struct.pack(">I", 2**32 - 1) + b"\xff" * 64,
        greeting(b"NULL") + huge + b"x" * 1000,
        greeting(b"CURVE") + huge + b"x" * 1000,
        *(greeting(b"NULL") + b"\0" + bytes([len(frame)]) + frame for frame in frames),
    ]


def greeting(mechanism: bytes) -> bytes:
    """Returns the greeting of ZMTP 3.0."""
    return b"\xff" + b"\0" * 8 + b"\x7f\x03\0" + mechanism.ljust(20, b"\0") + b"\0" * 32


_CONNECT_S = 0.5
_LISTEN_S = 0.2  # how long a peer waits for an answer


@dataclass(frozen=True)
class Attack:
    """Where, with what, how often per second, and which texts must not be heard."""

    addresses: Sequence[tuple[str, int]]
    payloads: Sequence[bytes]
    rate: float
    secrets: Sequence[bytes]


@dataclass(frozen=True)
class Heard:
    """What came of the connections to one port. secrets: answers with a text that no peer may hear"""

    tried: int = 0
    made: int = 0
    num_bytes: int = 0
    secrets: int = 0

    def plus(self, other: "Heard") -> "Heard":
        return Heard(
            self.tried + other.tried,
            self.made + other.made,
            self.num_bytes + other.num_bytes,
            self.secrets + other.secrets,
        )


def attack(plan: Attack, stop: Event, answer: Connection) -> None:
    """Sends payloads to all addresses in turn, until stop; answers with what was heard, by port."""
    os.nice(19)
    answer.send(asyncio.run(_attack(plan, stop)))


async def _attack(plan: Attack, stop: Event) -> dict[int, Heard]:
    heard = {number: Heard() for _, number in plan.addresses}
    turns = itertools.cycle(itertools.product(plan.payloads, plan.addresses))
    open_calls: set[asyncio.Task[None]] = set()
    next_s = time.monotonic()

    async def call(host: str, number: int, payload: bytes) -> None:
        found = await _call(host, number, payload, plan.secrets)
        heard[number] = heard[number].plus(found)

    while not stop.is_set():
        payload, (host, number) = next(turns)
        task = asyncio.create_task(call(host, number, payload))
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
        next_s = max(next_s + 1 / plan.rate, time.monotonic() - 0.1)  # what it misses it does not make up for
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    await asyncio.gather(*open_calls)
    return heard


async def _call(host: str, number: int, payload: bytes, secrets: Sequence[bytes]) -> Heard:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, number), _CONNECT_S)
    except (OSError, TimeoutError):
        return Heard(tried=1)
    data = b""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(payload)
        data = await asyncio.wait_for(reader.read(65536), _LISTEN_S)
    writer.close()
    return Heard(1, 1, len(data), int(any(secret in data for secret in secrets)))


def listen_as_decoy(count: int, answer: Connection) -> None:
    """Listens on ports of its own, until it is ended; answers with their addresses."""
    os.nice(19)
    asyncio.run(_listen(count, answer))


async def _listen(count: int, answer: Connection) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()

    servers = [await asyncio.start_server(take, "127.0.0.1", 0) for _ in range(count)]
    answer.send([server.sockets[0].getsockname()[:2] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))


SECRET = "the prompt that no peer may read "


@dataclass(frozen=True)
class Port:
    """One TCP port that a process of the system listens on."""

    owner: str
    host: str
    number: int


@dataclass(frozen=True)
class System:
    """The ports of a running system."""

    http_port: int
    ports: Sequence[Port]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200.0, help="connections per second that peers open")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq", "uvicorn")
    token = secrets.token_hex(32)
    recorded = record(token)
    prompts = [f"{SECRET}{number}" for number in range(args.streams)]
    rates: dict[str, list[float]] = {"decoys": [], "ours": []}
    heard: dict[int, Heard] = {}
    with running(token) as system, decoys(len(system.ports)) as others:
        before = answer(system.http_port)
        _over_http(system.http_port, prompts, 16)
        at_ours = [(port.host, port.number) for port in system.ports]
        attacked_s = 0.0
        while attacked_s < args.seconds:
            pair = [("decoys", others), ("ours", at_ours)]
            for name, addresses in pair if len(rates["ours"]) % 2 else reversed(pair):
                plan = Attack(addresses, [*payloads(), recorded], args.rate, [SECRET.encode(), token.encode()])
                begin_s = time.monotonic()
                with attacked(plan, heard if name == "ours" else {}):
                    rates[name].append(_over_http(system.http_port, prompts, args.tokens)[0])
                    attacked_s += time.monotonic() - begin_s if name == "ours" else 0.0
        after = answer(system.http_port)
        assert json.loads(urllib.request.urlopen(f"http://127.0.0.1:{system.http_port}/server_info").read())
    report(args, facts, system, heard, rates, injected=before != after, attacked_s=attacked_s)


def report(
    args: argparse.Namespace,
    facts: dict[str, object],
    system: System,
    heard: dict[int, Heard],
    rates: dict[str, list[float]],
    injected: bool,
    attacked_s: float,
) -> None:
    """Prints and saves the table."""
    rows = [
        {
            "port of": port.owner,
            "address": port.host,
            "connections tried": heard[port.number].tried,
            "made": heard[port.number].made,
            "bytes heard": heard[port.number].num_bytes,
            "secrets heard": heard[port.number].secrets,
        }
        for port in system.ports
    ]
    ratios = [ours / decoy for decoy, ours in zip(rates["decoys"], rates["ours"], strict=True)]
    middle, low, high = mean_ratio(ratios)
    notes = (
        f"Demo model, 2 ranks and a front end by TCP, {args.streams} streams of {args.tokens} tokens. {attacked_s:.0f} "
        f"s of peers at {args.rate:g} connections/s over all ports. Greedy tokens after it: "
        f"{'CHANGED' if injected else 'as before'}; the system {'still serves, with the ranks it had'}. Tokens/s: "
        f"{statistics.median(rates['ours']):.0f} against {statistics.median(rates['decoys']):.0f} while the peers do "
        f"the same to ports of their own: ratio {middle:.3f}, with 95 % confidence {low:.3f} to {high:.3f} (geometric "
        f"mean and bootstrap over {len(ratios)} pairs of rounds, {min(ratios):.2f} to {max(ratios):.2f}). Load average "
        f"at the end: {os.getloadavg()[0]:.2f}. Bytes heard are greetings and refusals. {args.note}"
    )
    title = "Unauthenticated peers on every port of the system"
    print(save("unauthenticated_peers", title, rows, facts, notes, per_cpu=True))


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios, and the bounds within which it lies with 95 % confidence (bootstrap)."""
    logs = np.log(ratios)
    means = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


@contextlib.contextmanager
def running(token: str) -> Iterator[System]:
    """A front end and two ranks, started one by one as another launcher would."""
    ports = {name: free_port() for name in ("HTTP", "ranks attach", "store")}
    settings = [
        "parallel.num_ranks=2", "parallel.device=cpu", "cache.memory_gib=0.2", "eplb.mode=off",
        f"server.port={ports['HTTP']}", f"server.worker_port={ports['ranks attach']}",
    ]  # fmt: skip
    arguments = [f"--set={setting}" for setting in settings]
    environ = {**os.environ, "MOE_SERVE_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    commands = {"front end": (["moe_serve", "frontend"], {})}
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports["store"])}
        commands[f"rank {rank}"] = (["moe_serve.launcher.serve"], place)
    processes = {
        name: subprocess.Popen([sys.executable, "-m", *module, *arguments], env=environ | place)
        for name, (module, place) in commands.items()
    }
    try:
        _wait_until_ready(ports["HTTP"], processes["front end"])
        names = {number: name for name, number in ports.items()}
        found = [
            Port(f"{name}: {names.get(number, 'wakes or gloo')}", host, number)
            for name, process in processes.items()
            for host, number in listening(process.pid)
        ]
        yield System(ports["HTTP"], found)
        assert all(process.poll() is None for process in processes.values()), "a process of the system has ended"
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)


def record(token: str) -> bytes:
    """Returns the bytes of a conversation with a front end of the same token: a launcher reports a dead rank."""
    link = Link(token=token, host="127.0.0.1")
    inner, outer = LinkSockets(link), LinkSockets(link)
    router = inner.bound(zmq.ROUTER, link.front_end)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    kept = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        launcher = outer.connected(zmq.DEALER, f"tcp://127.0.0.1:{listener.getsockname()[1]}", linger_ms=0)
        for message in (Hello(-1, 2, 0, 1, "recorded"), Fatal(-1, 0, "rank 1 was killed, says a recording", 1)):
            launcher.send(encode(message))
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        asyncio.run(_pass_on(client, server, kept, router))
    outer.close()
    inner.close()
    return bytes(kept)


async def _pass_on(client: socket.socket, server: socket.socket, kept: bytearray, router: "zmq.Socket[bytes]") -> None:
    """Passes bytes on both ways until the router has heard both messages."""
    loop = asyncio.get_running_loop()
    for each in (client, server):
        each.setblocking(False)

    async def one_way(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        while data := await loop.sock_recv(source, 65536):
            if keep:
                kept.extend(data)
            await loop.sock_sendall(sink, data)

    ways = [asyncio.create_task(one_way(client, server, True)), asyncio.create_task(one_way(server, client, False))]
    for _ in range(2):
        assert await asyncio.to_thread(router.poll, 20_000), "the messages to record have not arrived"
        router.recv_multipart()
    for way in ways:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)
    client.close()
    server.close()


@contextlib.contextmanager
def decoys(count: int) -> Iterator[list[tuple[str, int]]]:
    """Ports of a process that takes what comes and says nothing."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=listen_as_decoy, args=(count, sender), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def attacked(plan: Attack, heard: dict[int, Heard]) -> Iterator[None]:
    """Peers do their work during the block; what they heard is added to `heard`, by port."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=attack, args=(plan, stop, sender), daemon=True)
    process.start()
    try:
        yield
    finally:
        stop.set()
        for number, found in receiver.recv().items():
            heard[number] = heard.get(number, Heard()).plus(found)
        process.join()


def answer(port: int) -> list[int]:
    """Returns the greedy tokens of one request."""
    body = json.dumps({"text": SECRET, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: list[int] = json.loads(response.read())["output_ids"]
    return found


if __name__ == "__main__":
    main()
