"""A server whose processes and connections can be disturbed, for benchmarks/faults.py. Linux 5.6 or later."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.fault_network import Interposed
from moe_serve.launcher.rank_env import free_port
from moe_serve.links.link import SOCKETS

_START_S = 120.0
_KINDS = {
    "moe_serve.launcher.serve": "rank", "launcher.frontend": "front end", "planner_process": "planner",
}  # fmt: skip
_PIDFD_GETFD = 438  # the number of the system call


class FaultySystem:
    """`moe-serve serve` with the demo model, for a `with` block.

    port: of HTTP;  trace: where the load is recorded;  network: between the ranks and the front end, once in the block,
    where there is one front end
    """

    network: Interposed

    def __init__(self, num_ranks: int, num_redundant: int, num_front_ends: int = 1):
        self.port = free_port()
        self.num_front_ends = num_front_ends
        self._folder = tempfile.TemporaryDirectory(prefix="moe_serve_faults_")
        self.trace = Path(self._folder.name) / "load.jsonl"
        settings = {
            "parallel.num_ranks": num_ranks,
            "parallel.threads_per_rank": 1,
            "eplb.num_redundant_experts": num_redundant,
            "engine.step_deadline_s": 20,
            "eplb.mode": "dynamic",
            "eplb.record_window_steps": 200,
            "eplb.record_path": self.trace,
            "cache.memory_gib": 0.2,
            "server.port": self.port,
            "server.api_workers": num_front_ends,
            "launcher.max_restarts": 1000,
        }
        arguments = [f"--set={name}={value}" for name, value in settings.items()]
        self._log = Path(tempfile.gettempdir()) / f"moe_serve_faults_{self.port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "moe_serve", "serve", *arguments], stderr=log)

    def __enter__(self) -> Self:
        asyncio.run(self.serves_with(None, _START_S))
        if self.num_front_ends > 1:  # one that is started again would take the socket from what lies between
            return self
        environ = Path(f"/proc/{self.rank_pid(0)}/environ").read_bytes().split(b"\0")
        folder = next(each for each in environ if each.startswith(SOCKETS.encode())).partition(b"=")[2].decode()
        self.network = Interposed(Path(folder) / "front_end")
        self.cut()  # from now on ranks attach through it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._folder.cleanup()
        if kind is None:
            self._log.unlink()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns a connection with a front end."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    def info(self) -> dict[str, Any]:
        """Returns /server_info."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def processes(self) -> dict[str, int]:
        """Returns the processes of the system by name: "launcher", "front end", "rank 0", "planner", "fork server".

        Of several front ends each has its number: "front end 0".
        """
        found, ranks = {"launcher": self._process.pid}, dict[int, int]()
        with contextlib.suppress(OSError):
            ranks = {int(each["pid"]): int(each["rank"]) for each in self.info()["ranks"]}
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                for mark, name in _KINDS.items():
                    if mark in command:
                        found[self._numbered(name, pid, command, ranks)] = pid
        return found

    def _numbered(self, name: str, pid: int, command: str, ranks: dict[int, int]) -> str:
        if name == "rank":
            rank = ranks.get(pid, _rank_of(pid))
            return "fork server" if rank is None else f"rank {rank}"
        if name == "front end" and self.num_front_ends > 1:
            return f"front end {command.partition('--worker')[2].split(chr(0))[1]}"
        return name

    def kill_front_end(self, pid: int) -> set[int]:
        """Kills a front end; returns the ports of the clients that were connected to it."""
        os.kill(pid, signal.SIGSTOP)
        ports = _ports_of_clients(pid, self.port)
        os.kill(pid, signal.SIGKILL)
        return ports

    def rank_pid(self, rank: int) -> int:
        """Returns the process of a rank."""
        return next(int(each["pid"]) for each in self.info()["ranks"] if each["rank"] == rank)

    def serving_ranks(self) -> list[int]:
        """Returns the ranks that take requests."""
        return _serving(self.info())

    async def serves_with(self, num_ranks: int | None, timeout_s: float) -> None:
        """Waits until the system is ready. num_ranks: that serve; None: any number. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        ready: set[int] = set()  # front ends: any of them takes a connection
        while time.monotonic() < deadline_s:
            assert self._process.poll() is None, f"the server has ended; see {self._log}"
            with contextlib.suppress(OSError):
                info = self.info()
                if info["state"] == "ready" and num_ranks in (None, len(_serving(info))):
                    ready.add(info["front_end"]["number"])
                if len(ready) == self.num_front_ends:
                    return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the system was not ready within {timeout_s:g} s; see {self._log}")

    def cut(self) -> int:
        """Cuts the connections of all ranks to the front end; returns how many."""
        return sum(_cut_connections(self.rank_pid(rank), "/front_end") for rank in self.serving_ranks())


def _serving(info: dict[str, Any]) -> list[int]:
    return [each["rank"] for each in info["ranks"] if each["phase"] == "ready"]


def _ports_of_clients(pid: int, port: int) -> set[int]:
    """Returns the remote ports of a process's connections at one of its own."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [(row[1], row[2]) for row in rows if row[9] in sockets]
    return {int(theirs[-4:], 16) for own, theirs in ends if int(own[-4:], 16) == port}


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:  # grows while it is read
        found += children.get(each, [])
    return found


def _rank_of(pid: int) -> int | None:
    """Returns the rank as which a process was forked; None: it is the one that they are forked from."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name.rpartition(" ")[2]) if name.startswith("moe rank ") else None


def _cut_connections(pid: int, name: str) -> int:
    """Shuts down the sockets of a process that are connected to a path with this end; returns how many."""
    count = 0
    for connection in sockets_of(pid):
        with contextlib.suppress(OSError):
            peer = connection.getpeername()
            if connection.family == socket.AF_UNIX and isinstance(peer, str) and peer.endswith(name):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Yields a duplicate of each socket of a process, open until the next one is asked for."""
    process = os.pidfd_open(pid)
    for link in Path(f"/proc/{pid}/fd").iterdir():
        number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(link.name), 0)
        if number < 0:
            continue  # closed meanwhile
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as connection:
                    yield connection
        os.close(number)
    os.close(process)
