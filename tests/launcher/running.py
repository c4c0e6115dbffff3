"""A serving system in a process of its own, watched from outside: what it prints, what it starts, what it leaves."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from moe_serve.launcher import local
from tests.conftest import _descendants


@contextlib.contextmanager
def fake_ranks() -> Iterator[None]:
    """Starts fake_rank.py in the place of ranks within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "WORKER", "tests.launcher.fake_rank")
        yield


class Running:
    """`python -m module arguments…` as a child. Killed at the end of the `with` block, whatever happened in it."""

    def __init__(self, module: str, arguments: Sequence[str] = (), **environ: str):
        self._start([sys.executable, "-m", module, *arguments], environ)

    @classmethod
    def of(cls, command: Sequence[str]) -> Self:
        """Returns any command as a running system."""
        running = cls.__new__(cls)
        running._start(command, {})
        return running

    def _start(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in [*self.descendants(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(30)
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def descendants(self) -> list[int]:
        return _descendants(self.process.pid)

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> re.Match[str]:
        """Returns the first match in what was printed, waiting for it; fails with the output when it does not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            match = re.search(pattern, self.output)
            if match:
                return match
            if self.process.poll() is not None:
                time.sleep(0.1)
                match = re.search(pattern, self.output)
                assert match, f"ended with {self.process.returncode}, having said:\n{self.output}"
                return match
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} within {timeout_s} s in:\n{self.output}")

    def client(self, timeout_s: float = 120.0, answer_s: float = 30.0) -> httpx.Client:
        """Returns an HTTP client for the system, once it is ready.

        timeout_s: for which it is waited;  answer_s: for which the client waits for each answer
        """
        address = self.wait_for(r"ready after [\d.]+ s: (http://[\w.:\[\]-]+)", timeout_s)[1]
        return httpx.Client(base_url=address, timeout=answer_s, trust_env=False)

    def end(self, number: signal.Signals, timeout_s: float = 60.0) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s, having said:\n{self.output}") from None
        self._reader.join(30)
        return code


def quiet_port() -> int:
    """Returns a free port that the kernel gives to no outgoing connection."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(15_000, 32_000, 2)))
            port: int = probe.getsockname()[1]
            return port


def gone(pids: Sequence[int]) -> bool:
    """Whether none of these processes runs any more, or soon: one that is killed takes a moment to die."""
    return eventually(lambda: not any(_runs(pid) for pid in pids), timeout_s=60.0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def eventually(condition: Callable[[], Any], timeout_s: float = 90.0) -> bool:
    """Whether something becomes true in time, which is generous: other tests may hold all cores."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def pid_of_rank(client: httpx.Client, rank: int) -> int:
    """Returns the process of a rank, as /server_info reports it."""
    ranks = client.get("/server_info").json()["ranks"]
    return int(next(each["pid"] for each in ranks if each["rank"] == rank))
