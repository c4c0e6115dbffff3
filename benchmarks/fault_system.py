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
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.fault_network import Interposed
from moe_serve.launcher.rank_env import free_port
from moe_serve.links.link import SOCKETS

_START_S = 120.0
_KINDS = {
    "moe_serve.launcher.serve": "rank", "launcher.frontend": "front end", "planning.worker": "planner",
    "body_parser_process": "body parser",
}  # fmt: skip
_PIDFD_GETFD = 438  # the number of the system call


class FaultySystem:
    """`moe-serve serve` with the demo model, for a `with` block.

    port: of HTTP;  trace: where the load is recorded;  network: between the ranks and the front end, once in the block
    """

    network: Interposed

    def __init__(self, num_ranks: int, num_redundant: int):
        self.port = free_port()
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
            "launcher.max_restarts": 1000,
        }
        arguments = [f"--set={name}={value}" for name, value in settings.items()]
        self._log = Path(tempfile.gettempdir()) / f"moe_serve_faults_{self.port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moe_serve.launcher.cli", "serve", *arguments], stderr=log
            )

    def __enter__(self) -> Self:
        asyncio.run(self.serves_with(None, _START_S))
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

    def info(self) -> dict[str, Any]:
        """Returns /server_info."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def processes(self) -> dict[str, int]:
        """Returns the processes of the system by name: "launcher", "front end", "rank 0", "planner", "body parser"."""
        found = {"launcher": self._process.pid}
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                for mark, name in _KINDS.items():
                    if mark in command:
                        found[name if name != "rank" else f"rank {_rank_of(pid)}"] = pid
        return found

    def rank_pid(self, rank: int) -> int:
        """Returns the process of a rank."""
        return next(int(each["pid"]) for each in self.info()["ranks"] if each["rank"] == rank)

    def serving_ranks(self) -> list[int]:
        """Returns the ranks that take requests."""
        return [each["rank"] for each in self.info()["ranks"] if each["phase"] == "ready"]

    async def serves_with(self, num_ranks: int | None, timeout_s: float) -> None:
        """Waits until the system is ready. num_ranks: that serve; None: any number. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self._process.poll() is None, f"the server has ended; see {self._log}"
            with contextlib.suppress(OSError):
                ready = self.info()["state"] == "ready"
                if ready and num_ranks in (None, len(self.serving_ranks())):
                    return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the system was not ready within {timeout_s:g} s; see {self._log}")

    def cut(self) -> int:
        """Cuts the connections of all ranks to the front end; returns how many."""
        return sum(_cut_connections(self.rank_pid(rank), "/front_end") for rank in self.serving_ranks())


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


def _rank_of(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((each[5:].decode() for each in environ if each.startswith(b"RANK=")), "?")


def _cut_connections(pid: int, name: str) -> int:
    """Shuts down the sockets of a process that are connected to a path with this end; returns how many."""
    process, count = os.pidfd_open(pid), 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(link.name), 0)
        if number < 0:
            continue  # closed meanwhile
        if not os.readlink(link).startswith("socket:"):
            os.close(number)
            continue
        with socket.socket(fileno=number) as connection, contextlib.suppress(OSError):
            peer = connection.getpeername()
            if connection.family == socket.AF_UNIX and isinstance(peer, str) and peer.endswith(name):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    os.close(process)
    return count
