"""Roles on hosts of their own: prompts are handed over across hosts, with the tokens of one rank."""

import contextlib
import json
import os
import re
import signal
from typing import Any

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.launcher.llm import LLM
from tests.launcher.hosts import Host, make_hosts, needs_hosts, set_cable
from tests.launcher.running import Running, eventually, gone

pytestmark = [pytest.mark.timeout(400), needs_hosts]
URL = "http://127.0.0.1:30000"
SETTINGS = (
    "parallel.device=cpu", "server.worker_deadline_s=10", "server.attach_deadline_s=60", "model.skip_tokenizer=true",
    "parallel.threads_per_rank=1", "parallel.handover_gb=0.1",
)  # fmt: skip


def serve(host: Host, node_rank: int, first: Host, num_prefill: int = 1) -> Running:
    return serve_roles(host, node_rank, first, ["--nnodes", "2", "--prefill-ranks", str(num_prefill)])


def serve_roles(host: Host, node_rank: int, first: Host, roles: list[str], num_decode: int = 1) -> Running:
    own = ("--node-rank", str(node_rank), "--dist-init-addr", f"{first.address}:20000")
    settings = [word for value in SETTINGS for word in ("--set", value)]
    return host.start("moe_serve", "serve", *roles, *own, "--decode-ranks", str(num_decode), *settings)


class Front:
    """The front end, on the host of the decode ranks."""

    def __init__(self, host: Host):
        self._host = host
        self._num_asked = 0

    def info(self) -> Any:
        return json.loads(self._host.ask(f"{URL}/server_info")[1])

    def prefill_is(self, state: str) -> bool:
        return bool(self.info()["prefill"]["state"] == state)

    def generate(self, length: int = 80, **fields: object) -> Any:
        """Returns the answer to a prompt that was not asked before."""
        self._num_asked += 1
        prompt = [self._num_asked, *range(10, 9 + length)]
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, text = self._host.ask(
            f"{URL}/generate", json.dumps({"input_ids": prompt, "sampling_params": params} | fields)
        )
        assert status == 200, text
        again = json.dumps({"input_ids": prompt, "sampling_params": params, "routed_dp_rank": 0, "extra_key": "own"})
        status, alone = self._host.ask(f"{URL}/generate", again)
        assert status == 200, alone
        found = json.loads(text)
        assert found["output_ids"] == json.loads(alone)["output_ids"], "as one rank computes them"
        return found

    def num_pages(self, fate: str, rank: int | None = None) -> int:
        """rank: that decodes; None: all together"""
        asked = r"\d+" if rank is None else rank
        found = re.findall(rf'fate="{fate}",rank="{asked}"}} (\S+)', self._host.ask(f"{URL}/metrics")[1])
        return sum(int(float(each)) for each in found)

    def hands_over(self) -> bool:
        """Asks a prompt of 80 tokens; returns whether its five blocks have come from the other host."""
        before = self.num_pages("from_prefill")
        return self.generate()["meta_info"]["route"] == "prefill" and eventually(
            lambda: self.num_pages("from_prefill") >= before + 5, 10
        )


def test_prompts_are_handed_over_between_hosts_and_after_a_loss_again(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with serve(a, 0, a) as first, serve(b, 1, a) as second:
        first.wait_for("ready after", 120)
        front = Front(a)
        assert eventually(lambda: front.prefill_is("ready"), 90)
        assert eventually(front.hands_over, 60)
        (rank,) = front.info()["prefill"]["ranks"]
        pids = [*first.descendants(), *second.descendants()]
        assert rank["pid"] in second.descendants()
        os.kill(rank["pid"], signal.SIGKILL)
        front.generate()
        first.wait_for("prefill: rank 0 .* was killed by SIGKILL", 60)
        assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 90), first.output + second.output
        second.process.send_signal(signal.SIGTERM)  # on either host
        assert (first.wait(), second.wait()) == (0, 0)
        assert gone(pids)
        assert os.environ["MOE_SERVE_TOKEN"] not in first.output + second.output


@pytest.mark.slow
def test_one_of_two_prefill_ranks_is_replaced_alone_by_the_launcher_of_its_host(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with serve(a, 0, a, num_prefill=2) as first, serve(b, 1, a, num_prefill=2) as second:
        first.wait_for("ready after", 120)
        front = Front(a)
        assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 90)
        before = front.info()["prefill"]
        os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
        first.wait_for("prefill: rank 1 rejoined", 120)
        after = front.info()["prefill"]
        assert after["launch_id"] == before["launch_id"]
        assert after["ranks"][0]["pid"] == before["ranks"][0]["pid"]
        for _ in range(4):
            assert eventually(front.hands_over, 60), first.output + second.output
        assert (first.end(signal.SIGINT), second.wait()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cable", "host"])
def test_without_the_other_host_decode_ranks_serve_on_until_it_is_back(hosts: tuple[Host, Host], loss: str) -> None:
    a, b = hosts
    with serve(a, 0, a) as first, contextlib.ExitStack() as started:
        other = started.enter_context(serve(b, 1, a))
        first.wait_for("ready after", 120)
        front = Front(a)
        assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 90)
        if loss == "cable":
            set_cable(b, "down")
        else:
            b.kill_all()
        for _ in range(3):
            front.generate()
        assert eventually(lambda: front.generate()["meta_info"]["route"] == "no_prefill_rank", 60)
        if loss == "cable":
            set_cable(b, "up")
        else:
            other = started.enter_context(serve(b, 1, a))
        assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 120), first.output + other.output
        assert (first.end(signal.SIGINT), other.wait()) == (0, 0)


@pytest.mark.slow
def test_the_host_of_the_decode_ranks_that_is_started_again_finds_the_other_one_waiting(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    with serve(a, 0, a) as first, serve(b, 1, a) as other:
        first.wait_for("ready after", 120)
        a.kill_all()
        other.wait_for("node rank 0 is not reached", 60)
        with serve(a, 0, a) as again:
            again.wait_for("ready after", 120)
            front = Front(a)
            assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 90), again.output + other.output
            assert (again.end(signal.SIGINT), other.wait()) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefill_ranks_of_two_hosts_are_started_again_beside_the_launchers_that_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: their store is where the first of these launchers has opened one for the launch before."""
    monkeypatch.setenv("MOE_SERVE_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    roles = ["--nnodes", "3", "--prefill-nnodes", "2", "--prefill-ranks", "2"]
    with make_hosts(3) as hosts, contextlib.ExitStack() as started:
        running = [
            started.enter_context(serve_roles(host, number, hosts[0], roles)) for number, host in enumerate(hosts)
        ]
        first, front = running[0], Front(hosts[0])
        first.wait_for("ready after", 200)
        launches = set[int]()
        while True:
            assert eventually(lambda: front.prefill_is("ready") and front.hands_over(), 120), first.output
            prefill = front.info()["prefill"]
            launches.add(prefill["launch_id"])
            if len(launches) == 3:
                break
            for rank in prefill["ranks"]:
                os.kill(rank["pid"], signal.SIGKILL)
            assert eventually(lambda: not front.prefill_is("ready"), 60), first.output
        assert first.end(signal.SIGINT) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "lost", "loss"),
    [(2, 1, 1, "cable"), (1, 2, 1, "host"), (1, 2, 2, "cable"), (2, 2, 1, "host"), (2, 2, 3, "host")],
)
def test_roles_over_several_hosts_hand_over_to_each_other_and_outlive_a_host(
    monkeypatch: pytest.MonkeyPatch, num_decode: int, num_prefill: int, lost: int, loss: str
) -> None:
    """lost: node rank of a host of a role that has two, each with one rank. Without the first one the other one waits,
    and both are started again."""
    monkeypatch.setenv("MOE_SERVE_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    number = num_decode + num_prefill
    who = f"prefill: rank {lost - num_decode}" if lost >= num_decode else f"rank {lost}"
    numbers = ("--nnodes", str(number), "--prefill-nnodes", str(num_prefill), "--prefill-ranks", str(num_prefill))
    more = ("eplb.num_redundant_experts=64", "eplb.mode=dynamic", "engine.step_deadline_s=5")
    roles = [*numbers, *(word for value in more for word in ("--set", value))]
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with make_hosts(number) as hosts, contextlib.ExitStack() as started:
        running = [
            started.enter_context(serve_roles(host, node_rank, hosts[0], roles, num_decode))
            for node_rank, host in enumerate(hosts)
        ]
        first, front = running[0], Front(hosts[0])
        first.wait_for("ready after", 200)
        assert eventually(lambda: front.prefill_is("ready"), 120), first.output

        def every_rank_gets_pages() -> bool:
            front.hands_over()
            return all(front.num_pages("from_prefill", rank) for rank in range(num_decode))

        assert eventually(every_rank_gets_pages, 120), first.output
        assert front.num_pages("elsewhere") == front.num_pages("version") == front.num_pages("checksum") == 0
        prompts = [[1000 + i, *range(100 + i, 260 + i)] for i in range(4)]
        body = json.dumps({"input_ids": prompts, "sampling_params": params})
        answers = [hosts[0].ask(f"{URL}/generate", body)]
        if loss == "cable":
            set_cable(hosts[lost], "down")
        else:
            hosts[lost].kill_all()
        goes_on = lost not in (0, num_decode)
        first.wait_for(f"{who} is masked" if goes_on else "does not reach the hosts of most ranks", 90)
        for _ in range(2):
            front.generate()
        answers.append(hosts[0].ask(f"{URL}/generate", body))
        if loss == "cable":
            set_cable(hosts[lost], "up")
        else:
            started.enter_context(serve_roles(hosts[lost], lost, hosts[0], roles, num_decode))
        first.wait_for(f"{who} rejoined" if goes_on else "they are started again", 150)
        assert ("they are started again" in first.output) == (not goes_on)
        before = [front.num_pages("from_prefill", rank) for rank in range(num_decode)]
        routes = front.info()["prefill"]["routes"]

        def every_rank_gets_more() -> bool:
            front.hands_over()
            return all(front.num_pages("from_prefill", rank) > before[rank] for rank in range(num_decode))

        assert eventually(every_rank_gets_more, 120), (routes, first.output)
        assert first.end(signal.SIGINT) == 0
    assert [status for status, _ in answers] == [200, 200]
    with LLM("demo", num_ranks=1) as llm:
        alone = llm.generate(prompts, SamplingParams(**params))
    for _, text in answers:
        assert [each["output_ids"] for each in json.loads(text)] == [each.token_ids for each in alone]
