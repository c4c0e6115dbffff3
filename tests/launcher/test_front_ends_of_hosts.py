"""A front end on each of several hosts: which of them answer while hosts are killed and cut off, and come back."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launcher.hosts import Host, make_hosts, needs_hosts, set_cable
from tests.launcher.running import Running, eventually

pytestmark = [pytest.mark.timeout(400), needs_hosts]
SETTINGS = (
    "parallel.device=cpu", "engine.step_deadline_s=5", "server.worker_deadline_s=10", "server.attach_deadline_s=120",
    "engine.numerics=batch_invariant", "launcher.front_ends=every_host",
)  # fmt: skip
URL = "http://127.0.0.1:30000"
PARAMS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def serve(hosts: list[Host], node_rank: int, *more: str) -> Running:
    own = ("--nnodes", str(len(hosts)), "--node-rank", str(node_rank), "--ep", str(len(hosts)))
    settings = [word for value in (*SETTINGS, *more) for word in ("--set", value)]
    meet = ("--dist-init-addr", f"{hosts[0].address}:20000")
    return hosts[node_rank].start("moe_serve", "serve", *own, *meet, *settings)


def info(host: Host) -> dict:
    return json.loads(host.ask(f"{URL}/server_info")[1])


def is_ready(*hosts: Host) -> bool:
    return all(host.ask(f"{URL}/ready")[0] == 200 for host in hosts)


def out(host: Host) -> list[int]:
    """Returns the ranks that take no part, as the front end of a host sees it."""
    return [rank["rank"] for rank in info(host)["ranks"] if rank["out"] is not None]


@dataclass
class Asker:
    """Asks the front end of one host for the same tokens, one call after the other. timeout_s: of a call"""

    host: Host
    num_tokens: int
    timeout_s: float = 100.0
    calls: list[tuple[float, float, int, str]] = field(default_factory=list)  # began, ended, status, text

    def run(self, has_ended: threading.Event) -> None:
        body = json.dumps({"text": "The king ", "sampling_params": PARAMS | {"max_new_tokens": self.num_tokens}})
        while not has_ended.is_set():
            began_s = time.monotonic()
            status, text = self.host.ask(f"{URL}/generate", body, self.timeout_s)
            self.calls.append((began_s, time.monotonic(), status, text))
            time.sleep(0.0 if status == 200 else 0.1)

    def between(self, since_s: float, until_s: float = math.inf) -> list[int]:
        """Returns the statuses of the calls that began and ended in between."""
        return [status for began_s, ended_s, status, _ in self.calls if since_s < began_s and ended_s < until_s]

    def tokens(self) -> set[tuple[int, ...]]:
        """Returns all different answers."""
        return {tuple(json.loads(text)["output_ids"]) for _, _, status, text in self.calls if status == 200}


@contextmanager
def asking(*askers: Asker) -> Iterator[None]:
    has_ended = threading.Event()
    threads = [threading.Thread(target=asker.run, args=(has_ended,)) for asker in askers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join(120)


def answer_again(*askers: Asker) -> bool:
    """Waits until each has asked and been answered, from now on."""
    now_s = time.monotonic()
    return eventually(lambda: all(200 in asker.between(now_s) for asker in askers), 60)


@pytest.mark.slow
def test_front_ends_of_the_hosts_that_go_on_lose_no_request_and_one_that_is_cut_off_says_so(token: None) -> None:
    spare = "eplb.num_redundant_experts=128"  # each expert on each rank
    with make_hosts(3) as hosts, ExitStack() as stack:
        a, b, c = hosts
        running = [stack.enter_context(serve(hosts, number, spare)) for number in range(3)]
        assert eventually(lambda: is_ready(*hosts), 120), running[0].output
        launch_id = info(b)["launch_id"]
        long, short = [Asker(host, 400) for host in (b, c)], [Asker(host, 4) for host in hosts]
        impatient = Asker(c, 4, timeout_s=1.0)
        with asking(*long, *short, impatient):
            assert answer_again(*long, *short, impatient)
            a.kill_all()
            assert eventually(lambda: out(b) == out(c) == [0], 30), running[1].output + running[2].output
            running[2].wait_for("node rank 0 is not reached at .*; ranks that reach the hosts of most serve on", 30)
            assert answer_again(*long, *short[1:])
            again = stack.enter_context(serve(hosts, 0, spare))
            again.wait_for("rank 0 rejoined; ranks 0, 1, 2 serve", 60)
            assert eventually(lambda: is_ready(*hosts) and out(a) == out(b) == out(c) == [], 30)
            assert {info(host)["launch_id"] for host in hosts} == {launch_id}, again.output
            assert answer_again(*short)

            set_cable(c, "down")
            cut_s = time.monotonic()
            assert eventually(lambda: c.ask(f"{URL}/ready")[0] == 503, 30), running[2].output
            status, text = c.ask(f"{URL}/generate", '{"text": "a"}')
            assert (status, "does not reach the hosts of most ranks" in text) == (503, True), text
            assert c.ask(f"{URL}/health")[0] == 200
            assert eventually(lambda: out(a) == out(b) == [2], 30)
            assert answer_again(*short[:2])
            assert eventually(lambda: 503 in impatient.between(cut_s), 20)
            mended_s = time.monotonic()
            set_cable(c, "up")
            assert eventually(lambda: is_ready(c) and out(a) == out(b) == out(c) == [], 30), running[2].output
            assert answer_again(*long, *short, impatient)
        while_cut = {*impatient.between(cut_s, mended_s), *short[2].between(cut_s, mended_s)}
        assert while_cut <= {0, 503}, "two sides have answered"
        for asker in (*long, short[1]):
            assert {status for _, _, status, _ in asker.calls if asker.host is b or status != 503} == {200}
        for askers in (long, short):
            assert len(set.union(*(asker.tokens() for asker in askers))) == 1
        running[1].process.send_signal(signal.SIGTERM)
        assert [each.wait() for each in (again, *running[1:])] == [0, 0, 0]


@pytest.mark.slow
def test_front_ends_of_two_hosts_act_as_one_and_a_drain_ends_no_request_of_either(token: None) -> None:
    with make_hosts(2) as hosts, ExitStack() as stack:
        a, b = hosts
        running = [stack.enter_context(serve(hosts, number, "server.api_workers=2")) for number in range(2)]
        assert eventually(lambda: is_ready(*hosts), 120), running[0].output
        numbers = {info(b)["front_end"]["number"] for _ in range(40)}
        assert numbers <= {2, 3}
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running[1].descendants()}
        front_end = next(pid for pid, command in commands.items() if b"--worker\x002" in command)
        os.kill(front_end, signal.SIGKILL)
        running[1].wait_for("the front end 2 was killed by SIGKILL; it is started again")
        back = {"number": 2, "of": 4}
        assert eventually(lambda: (found := info(b))["front_end"] == back and found["state"] == "ready", 60)
        assert b.ask(f"{URL}/pause_generation", "{}")[0] == 200
        long = [Asker(host, 300) for host in hosts]
        with asking(*long):
            assert eventually(lambda: info(a)["requests"]["open"] == 1)
            time.sleep(1)
            assert not [*long[0].calls, *long[1].calls], "all are paused"
            assert a.ask(f"{URL}/continue_generation", "{}")[0] == 200
            assert answer_again(*long)
            running[1].process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert eventually(lambda: all(asker.between(began_s) for asker in long))
        assert [each.wait() for each in running] == [0, 0]
        for asker in long:
            statuses = [status for _, _, status, _ in asker.calls]
            assert statuses == sorted(statuses, key=lambda status: status != 200), "open ones have ended"
