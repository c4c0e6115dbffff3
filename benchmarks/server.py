"""`moe-serve serve` as a benchmark starts it, its processes, and their memory."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_serve.launcher.rank_env import free_port

_START_S = 1800.0


class Server:
    """`moe-serve serve`, for a `with` block. ready_s: from its start until it was ready"""

    def __init__(self, settings: Mapping[str, object]):
        """settings: by dotted name, parallel.num_ranks among them"""
        self.port, self._num_ranks = free_port(), int(str(settings["parallel.num_ranks"]))
        options = [f"--set={name}={each}" for name, each in {**settings, "server.port": self.port}.items()]
        command = [sys.executable, "-m", "moe_serve", "serve", *options]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it is read where the server ends by itself)
        started_s = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log)
        self.wait(_START_S)
        self.ready_s = time.perf_counter() - started_s

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *args: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def pids(self) -> dict[int, int]:
        """Returns the processes of the ranks that take part."""
        return {each["rank"]: each["pid"] for each in self.info()["ranks"] if each["phase"] == "ready"}

    def wait(self, timeout_s: float, gone: int = 0) -> None:
        """Waits until all ranks take part. gone: a process that is none of them"""
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            if self._process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(self._log.read().decode()[-2000:])
            with contextlib.suppress(OSError):
                if self.info()["state"] == "ready":
                    pids = self.pids()
                    if len(pids) == self._num_ranks and gone not in pids.values():
                        return
            time.sleep(0.02)
        raise TimeoutError(f"not all ranks serve after {timeout_s:g} s: {self.info()['ranks']}")

    def answer(self, num_tokens: int = 64) -> None:
        """Lets each rank compute, so that all experts are looked at."""
        for rank in range(self._num_ranks):
            self.generate([(37 * rank + 11 * i) % 150000 for i in range(512)], num_tokens, rank)

    def generate(self, ids: list[int], num_tokens: int, rank: int | None = None) -> None:
        """Asks for so many tokens, of a rank if one is given, and waits for them."""
        body: dict[str, Any] = {"input_ids": ids}
        body["sampling_params"] = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        if rank is not None:
            body["routed_dp_rank"] = rank
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=600).read()

    def fork_server(self) -> int:
        """Returns the process that the ranks are forked from."""
        stat = Path(f"/proc/{self.pids()[0]}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])


def pss(pid: int, kind: str = "Pss") -> int:
    """Returns a sum over the memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind + ":")).split()[1]) << 10
