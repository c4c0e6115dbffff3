"""A system on several hosts, which are network namespaces, and what can be done to it, for benchmarks/faults.py."""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from benchmarks.fault_streams import body, right_tokens, stream
from benchmarks.fault_system import sockets_of
from tests.launcher.hosts import Host, cut_one_way, make_hosts, mend, set_cable
from tests.launcher.running import Running

PORT = 30000
STEP_DEADLINE_S = 2.0
_AWAY_S = 6.0  # for which a rank is stopped or a cable cut: longer than any deadline
_PROBE_S = 1.5
_SETTINGS = {
    "parallel.device": "cpu",
    "parallel.threads_per_rank": 1,
    "engine.step_deadline_s": STEP_DEADLINE_S,
    "engine.heartbeat_s": 0.5,
    "server.attach_deadline_s": 60,
    "server.worker_deadline_s": 10,
    "eplb.mode": "dynamic",
    "eplb.record_window_steps": 200,
    "cache.memory_gib": 0.2,
    "server.port": PORT,
    "launcher.max_restarts": 1000,
}
CYCLE = (
    "cut a cable for 6 s", "reset links", "stop a rank for 6 s", "cut a cable inwards for 6 s",
    "reset links", "cut a cable outwards for 6 s", "kill a rank", "kill a host",
)  # fmt: skip
# When the others may take ranks for lost. Nobody can tell a dead host, or a stopped rank, from a slow network.
CERTAIN_AFTER_S = {name: 0.0 if name in ("kill a rank", "reset links") else STEP_DEADLINE_S for name in CYCLE}


async def tokens_of_one_rank(count: int, num_tokens: int) -> list[list[int]]:
    """Returns the tokens of each request of the list, by a system of one rank."""
    words = [f"--set={name}={value}" for name, value in {**_SETTINGS, "parallel.num_ranks": 1}.items()]
    with make_hosts(1) as (host,), host.start("moe_serve", "serve", *words) as alone:
        await asyncio.to_thread(alone.wait_for, "ready after")
        return await right_tokens(lambda: _connect(host), count, num_tokens)


class HostsSystem:
    """The demo model on several hosts, for a `with` block. Streams go to the front end of the first host."""

    def __init__(self, num_hosts: int, ranks_per_host: int, num_redundant: int, settings: Mapping[str, Any] = {}):
        """settings: more of them;  `prepare` is called with each host before anything runs there"""
        self.prepare: Callable[[Host], object] = lambda host: None
        self.num_hosts, self.num_ranks = num_hosts, num_hosts * ranks_per_host
        self._per_host = ranks_per_host
        self.settings: dict[str, Any] = {**_SETTINGS, "parallel.num_ranks": self.num_ranks, **settings}
        self.settings["eplb.num_redundant_experts"] = num_redundant
        self._stack = ExitStack()
        self.running: dict[str, Running] = {}

    def __enter__(self) -> Self:
        os.environ |= {"MOE_SERVE_TOKEN": "0123456789abcdef" * 2}
        self.hosts = self._stack.enter_context(make_hosts(self.num_hosts))
        for host in self.hosts:
            self.prepare(host)
        for host in self.hosts:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, host: Host) -> None:
        """Starts what runs on a host."""
        first, number = self.hosts[0], self.hosts.index(host)
        words = [f"--set={name}={value}" for name, value in self.settings.items()]
        join = [f"--nnodes={self.num_hosts}", f"--node-rank={number}", f"--dist-init-addr={first.address}:29511"]
        self.running[host.name] = self._stack.enter_context(host.start("moe_serve", "serve", *join, *words))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns a connection with the front end of the first host."""
        return await _connect(self.hosts[0])

    def info(self) -> dict[str, Any]:
        """Returns /server_info."""
        status, text = self.hosts[0].ask(f"http://127.0.0.1:{PORT}/server_info", timeout_s=10)
        if status != 200:
            raise OSError(f"/server_info: {status} {text}")
        found: dict[str, Any] = json.loads(text)
        return found

    def serving(self) -> dict[int, int]:
        """Returns the processes of the ranks that take requests."""
        return {each["rank"]: int(each["pid"]) for each in self.info()["ranks"] if each["phase"] == "ready"}

    async def serves_with(self, num_ranks: int, timeout_s: float) -> None:
        """Waits until so many ranks take requests. Raises TimeoutError."""
        until_s, problem = time.monotonic() + timeout_s, ""
        while time.monotonic() < until_s:
            for name, each in self.running.items():
                assert each.process.poll() is None, f"{name} has ended:\n{each.output[-4000:]}"
            try:
                info = await asyncio.to_thread(self.info)
                phases = [each["phase"] for each in info["ranks"]]
                if info["state"] == "ready" and phases.count("ready") == num_ranks:
                    return
                problem = f"state {info['state']}, ranks {phases}"
            except OSError as error:
                problem = str(error)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"not {num_ranks} ranks within {timeout_s:g} s: {problem}\n{self.said()}")

    def said(self) -> str:
        """Returns the last lines of all hosts."""
        return "\n".join(f"--- {name}:\n{each.output[-4000:]}" for name, each in self.running.items())

    def ranks_of(self, host: Host) -> range:
        """Returns the ranks of a host."""
        first = self.hosts.index(host) * self._per_host
        return range(first, first + self._per_host)


class HostFaults:
    """The faults of a system by name.

    num_two_sides: cuts during which two sides answered, which must never be
    """

    def __init__(self, system: HostsSystem, seed: int):
        self.num_two_sides = 0
        self._system, self._draw = system, random.Random(seed)
        self.by_name: dict[str, Callable[[], Awaitable[None]]] = {
            "kill a rank": self._kill_rank,
            "kill a host": self._kill_host,
            "stop a rank for 6 s": self._stop_rank,
            "cut a cable for 6 s": lambda: self._cut(lambda host: set_cable(host, "down")),
            "cut a cable inwards for 6 s": lambda: self._cut(lambda host: cut_one_way(host, "in")),
            "cut a cable outwards for 6 s": lambda: self._cut(lambda host: cut_one_way(host, "out")),
            "reset links": self._reset_links,
        }

    def _another_host(self) -> Host:
        return self._draw.choice(self._system.hosts[1:])

    def _any_rank(self) -> int:
        return self._draw.choice(list(self._system.serving().values()))

    async def _kill_rank(self) -> None:
        os.kill(self._any_rank(), signal.SIGKILL)

    async def _kill_host(self) -> None:
        host = self._another_host()
        await asyncio.to_thread(host.kill_all)
        self._system.start(host)

    async def _stop_rank(self) -> None:
        pid = self._any_rank()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(_AWAY_S)
        os.kill(pid, signal.SIGCONT)

    async def _cut(self, cut: Callable[[Host], None]) -> None:
        """Cuts the cable of a host for a while, in which all front ends are asked."""
        host = self._another_host()
        await asyncio.to_thread(cut, host)
        until_s, answering = time.monotonic() + _AWAY_S, set[int]()
        while time.monotonic() < until_s:
            answers = await asyncio.gather(*[_answers(each) for each in self._system.hosts])
            answering |= {each is host for each, answer in zip(self._system.hosts, answers, strict=True) if answer}
            await asyncio.sleep(0.1)
        self.num_two_sides += len(answering) > 1
        await asyncio.to_thread(set_cable, host, "up")
        await asyncio.to_thread(mend, host)

    async def _reset_links(self) -> None:
        """Ends all TCP connections of a host's ranks with other hosts, as a box between them does: both ends see it."""
        host = self._another_host()
        serving = self._system.serving()
        for rank in self._system.ranks_of(host):
            for connection in sockets_of(serving[rank]):
                with contextlib.suppress(OSError):
                    peer = connection.getpeername()
                    if connection.family == socket.AF_INET and peer[0] not in ("127.0.0.1", host.address):
                        _reset(connection)


def _reset(connection: socket.socket) -> None:
    address = (ctypes.c_char * 16)()  # AF_UNSPEC: the kernel sends RST, and the socket reports ECONNRESET
    ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), address, 16)


async def _connect(host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with host.network():
        made = socket.socket()
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", PORT))
    except OSError:
        made.close()
        raise
    return await asyncio.open_connection(sock=made)


async def _answers(host: Host) -> bool:
    """Whether a front end on this host gives tokens for a request that it gets now."""
    with contextlib.suppress(OSError, TimeoutError, IndexError):
        async with asyncio.timeout(_PROBE_S):
            status, tokens, _ = await stream(lambda: _connect(host), body(0, 2))
            return status == 200 and tokens is not None
    return False
