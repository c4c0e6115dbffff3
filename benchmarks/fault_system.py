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

from moe_serve.launcher.rank_env import free_port

_START_S = 120.0
_PIDFD_GETFD = 438  # the number of the system call


class FaultySystem:
    """`moe-serve serve` with the demo model, for a `with` block. port: of HTTP"""

    def __init__(self, num_ranks: int, num_redundant: int):
        self.port = free_port()
        settings = {
            "parallel.num_ranks": num_ranks,
            "parallel.threads_per_rank": 1,
            "eplb.num_redundant_experts": num_redundant,
            "engine.step_deadline_s": 20,
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        if kind is None:
            self._log.unlink()

    def info(self) -> dict[str, Any]:
        """Returns /server_info."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
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
