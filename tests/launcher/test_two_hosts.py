"""A system on two hosts: examined, started, its cable cut and mended."""

import contextlib
import json
import os
import re
import signal
import threading

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.model.expert_sources import CHECKPOINT, FAR
from moe_serve.launcher.llm import LLM
from tests.engine.offline import prompts_with_shared_beginnings, submits_of
from tests.engine.offline import serve as serve_offline
from tests.launcher.hosts import Host, needs_hosts, set_cable
from tests.launcher.running import Running, eventually, gone

pytestmark = [pytest.mark.timeout(400), needs_hosts]
WORKER = "moe_serve.launcher.serve"
SETTINGS = (
    "parallel.num_ranks=2", "parallel.device=cpu", "engine.step_deadline_s=5", "server.worker_deadline_s=10",
    "engine.numerics=batch_invariant", "server.attach_deadline_s=60", "eplb.mode=dynamic",
)  # fmt: skip
URL = "http://127.0.0.1:30000"
CALL = json.dumps({"text": "def ", "sampling_params": {"temperature": 0, "max_new_tokens": 5}})


def settings(first: Host) -> list[str]:
    values = (*SETTINGS, f"server.worker_host={first.address}")
    return [word for value in values for word in ("--set", value)]


def serve(host: Host, node_rank: int, first: Host, *more: str) -> Running:
    own = ("--nnodes", "2", "--node-rank", str(node_rank), "--dist-init-addr", f"{first.address}:20000")
    return host.start("moe_serve", "serve", *own, *settings(first), *more)


def torchrun(host: Host, rank: int, first: Host, *module: str) -> Running:
    join = ("--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", f"--master-addr={first.address}")
    return host.start("torch.distributed.run", *join, "--master-port=29511", "-m", *module, *settings(first))


def num_tokens(host: Host) -> float:
    """Returns how many tokens have come out so far."""
    found = re.search(r"^moe_serve_generation_tokens_total\S* (\S+)$", host.ask(f"{URL}/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_two_hosts_give_the_tokens_of_one_rank_over_their_own_connections_while_experts_move(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    prompts = prompts_with_shared_beginnings(4, 2048, max_len=12)
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    every = ("--front-ends", "every_host")
    with serve(a, 0, a, *every) as first, serve(b, 1, a, *every) as second:
        for each in (first, second):
            each.wait_for("ready after", 120)
        second.wait_for("this host takes HTTP: http://127.0.0.1:30000")
        status, text = a.ask(f"{URL}/generate", json.dumps(body))
        placement = json.loads(a.ask(f"{URL}/eplb/placement")[1])
        placement["physical_to_logical_map"] = [row[::-1] for row in placement["physical_to_logical_map"]]
        assert b.ask(f"{URL}/eplb/placement", json.dumps(placement))[0] == 200
        answers = [host.ask(f"{URL}/generate", json.dumps(body)) for host in (b, a, b)]
        wanted = placement["physical_to_logical_map"]
        assert eventually(
            lambda: json.loads(a.ask(f"{URL}/eplb/placement")[1])["physical_to_logical_map"] == wanted, 60
        ), a.ask(f"{URL}/eplb/status")[1] + first.output
        answers.append(a.ask(f"{URL}/generate", json.dumps(body)))
        info = json.loads(a.ask(f"{URL}/server_info")[1])
        seen = [rank["info"] for rank in info["ranks"]]
        assert [each["num_nodes"] for each in seen] == [2, 2]
        assert [f"({host.address})" in each["host"] for host, each in zip(hosts, seen, strict=True)] == [True, True]
        assert seen[0]["network"] == seen[1]["network"]
        assert seen[0]["network"]["bytes_per_s"] > 0
        assert "dispatch.backend auto: hosts (2 CPU ranks on 2 hosts)" in first.output
        assert "the network between 2 hosts: " in first.output
        assert "GlooExchange" not in json.dumps(info)
        assert "[c10d]" not in first.output + second.output
        assert os.environ["MOE_SERVE_TOKEN"] not in first.output + second.output
        pids = [*first.descendants(), *second.descendants()]
        second.process.send_signal(signal.SIGTERM)  # on either host
        assert (first.wait(), second.wait()) == (0, 0)
        assert gone(pids)
    assert status == 200, text
    tokens = [answer["output_ids"] for answer in json.loads(text)]
    assert [[answer["output_ids"] for answer in json.loads(later)] for _, later in answers] == [tokens] * 4
    greedy = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    alone = serve_offline(1, submits_of(prompts, greedy), ["engine.numerics=batch_invariant"]).tokens
    assert tokens == [alone[str(number)] for number in range(4)]


@pytest.mark.slow
def test_a_rank_takes_pages_that_a_rank_of_the_other_host_has_and_its_tokens_are_the_same(
    hosts: tuple[Host, Host],
) -> None:
    """The rank that has the prompt runs its only request, so the next one with that prompt goes to the other host."""
    a, b = hosts
    tiers = ("--set", "cache.host_gb=0.05", "--set", "engine.max_running_requests=1")
    tries: list[tuple[str, list[int]]] = []

    def generate(text: str, num_tokens: int) -> list[int]:
        params = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": num_tokens, "ignore_eos": True}
        status, answer = a.ask(f"{URL}/generate", json.dumps({"text": text, "sampling_params": params}), 300)
        assert status == 200, answer
        return json.loads(answer)["output_ids"]

    def num_pages(fate: str) -> float:
        found = re.findall(rf'cache_pages_total{{fate="{fate}",rank="."}} (\S+)', a.ask(f"{URL}/metrics")[1])
        return sum(map(float, found))

    def takes_pages() -> bool:
        text = f"{len(tries)}. " + "".join(f"x{i} = [{i}, " for i in range(60))
        kept, before = num_pages("down"), num_pages("from_other_host")
        tokens = generate(text, 8)
        assert eventually(lambda: num_pages("down") >= kept + 20, 60)
        long: list[int] = []
        thread = threading.Thread(target=lambda: long.extend(generate(text, 550)))
        thread.start()
        eventually(lambda: json.loads(a.ask(f"{URL}/server_info")[1])["requests"]["open"] == 1, 5)
        assert generate(text, 8) == tokens
        thread.join(300)
        assert long[:8] == tokens
        tries.append((text, tokens))
        return eventually(lambda: num_pages("from_other_host") >= before + 20, 3)

    with serve(a, 0, a, *tiers) as first, serve(b, 1, a, *tiers) as second:
        first.wait_for("ready after", 120)
        assert eventually(takes_pages, 120), a.ask(f"{URL}/metrics")[1] + first.output
        info = json.loads(a.ask(f"{URL}/server_info")[1])
        assert all(rank["info"]["asks_other_hosts"] for rank in info["ranks"])
        metrics = a.ask(f"{URL}/metrics")[1]
        assert re.search(r"moe_serve_rank_page_cost{rank=\"\d\"} \d", metrics)
        assert re.search(r'moe_serve_requests_prefix_total{where="other_host"} [1-9]', metrics)
        assert num_pages("to_other_host") >= num_pages("from_other_host")
        assert (first.end(signal.SIGINT), second.wait()) == (0, 0)
    text, tokens = tries[-1]
    with LLM("demo", num_ranks=1, numerics="batch_invariant") as llm:
        (alone,) = llm.generate([text], SamplingParams(temperature=0.8, seed=5, max_new_tokens=8, ignore_eos=True))
    assert tokens == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["rank 1", "a host", "rank 0"])
def test_a_lost_rank_or_host_comes_back_into_the_running_launch_and_no_request_is_lost(
    hosts: tuple[Host, Host], loss: str
) -> None:
    a, b = hosts
    params = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
    call = json.dumps({"text": ["def ", "The king "], "sampling_params": params})
    answers: list[tuple[int, str]] = []
    spare = ("--set", f"eplb.num_redundant_experts={0 if loss == 'rank 0' else 64}")
    with serve(a, 0, a, *spare) as first, contextlib.ExitStack() as second:
        other = second.enter_context(serve(b, 1, a, *spare))
        first.wait_for("ready after", 120)
        thread = threading.Thread(target=lambda: answers.append(a.ask(f"{URL}/generate", call, 300)))
        thread.start()
        assert eventually(lambda: json.loads(a.ask(f"{URL}/server_info")[1])["requests"]["open"] == 2)
        ranks = json.loads(a.ask(f"{URL}/server_info")[1])["ranks"]
        if loss == "a host":
            b.kill_all()
            first.wait_for("rank 1 is masked", 60)
            other = second.enter_context(serve(b, 1, a, *spare))
        else:
            os.kill(int(ranks[int(loss == "rank 1")]["pid"]), signal.SIGKILL)
        first.wait_for("rank 0 rejoined; ranks" if loss == "rank 0" else "rank 1 rejoined; ranks", 120)
        assert "ready again" not in first.output

        def has_come() -> bool:
            ranks = json.loads(a.ask(f"{URL}/server_info")[1])["ranks"]
            return any("experts_from" in rank["info"] for rank in ranks)

        assert eventually(has_come, 20), "the others may report it before it has told the front end"
        ranks = json.loads(a.ask(f"{URL}/server_info")[1])["ranks"]
        (came_from,) = [rank["info"]["experts_from"] for rank in ranks if "experts_from" in rank["info"]]
        assert (CHECKPOINT if loss == "rank 0" else FAR) in came_from, "the other host holds what it can"
        thread.join(300)
        (status, text), undisturbed = answers[0], json.loads(a.ask(f"{URL}/generate", call)[1])
        assert status == 200, text
        assert [each["output_ids"] for each in json.loads(text)] == [each["output_ids"] for each in undisturbed]
        assert first.end(signal.SIGINT) == other.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["rank 3", "rank 0", "a host"])
def test_where_a_lost_rank_ends_the_launch_all_are_started_again_and_open_streams_go_on(
    hosts: tuple[Host, Host], loss: str
) -> None:
    """As with NCCL and NVSHMEM, which cannot go on without a rank either."""
    a, b = hosts
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    call = json.dumps({"text": ["def ", "The king "], "sampling_params": params})
    answers: list[tuple[int, str]] = []
    ends = ("--set", "dispatch.backend=collective", "--set", "parallel.num_ranks=4")
    with serve(a, 0, a, *ends) as first, contextlib.ExitStack() as second:
        other = second.enter_context(serve(b, 1, a, *ends))
        first.wait_for("ready after", 120)
        thread = threading.Thread(target=lambda: answers.append(a.ask(f"{URL}/generate", call, 300)))
        thread.start()
        assert eventually(lambda: num_tokens(a) > 20)
        info = json.loads(a.ask(f"{URL}/server_info")[1])
        pids = {rank["rank"]: int(rank["pid"]) for rank in info["ranks"]}
        if loss == "a host":
            b.kill_all()
            first.wait_for("waiting for node rank 1: start moe-serve serve there again", 60)
            other = second.enter_context(serve(b, 1, a, *ends))
        else:
            os.kill(pids[int(loss.removeprefix("rank "))], signal.SIGKILL)
        first.wait_for("the ranks are started again", 60)
        assert gone(list(pids.values()))
        assert a.ask(f"{URL}/ready")[0] == 503
        first.wait_for("ready again after", 120)
        thread.join(300)
        (status, text), undisturbed = answers[0], json.loads(a.ask(f"{URL}/generate", call)[1])
        assert status == 200, text
        assert [each["output_ids"] for each in json.loads(text)] == [each["output_ids"] for each in undisturbed]
        again = json.loads(a.ask(f"{URL}/server_info")[1])
        assert again["launch_id"] != info["launch_id"]
        assert again["requests"]["num_resubmitted"] == 2
        assert first.end(signal.SIGINT) == other.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "is killed meanwhile"])
def test_one_side_of_a_cut_cable_goes_on_with_all_requests_and_the_other_joins_again(
    hosts: tuple[Host, Host], dies: bool
) -> None:
    a, b = hosts
    params = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
    call = json.dumps({"text": ["def ", "The king ", "x = [1, ", "Once"], "sampling_params": params})
    answers: list[tuple[int, str]] = []

    def out() -> list[int]:
        ranks = json.loads(a.ask(f"{URL}/server_info")[1])["ranks"]
        return [rank["rank"] for rank in ranks if rank["out"] is not None]

    spare = ("--set", "eplb.num_redundant_experts=64")
    with serve(a, 0, a, *spare) as first, serve(b, 1, a, *spare) as second:
        first.wait_for("ready after", 120)
        thread = threading.Thread(target=lambda: answers.append(a.ask(f"{URL}/generate", call, 300)))
        thread.start()
        assert eventually(lambda: json.loads(a.ask(f"{URL}/server_info")[1])["requests"]["open"] == 4)
        set_cable(b, "down")
        assert eventually(lambda: out() == [1], 30), first.output
        assert a.ask(f"{URL}/generate", CALL)[0] == 200
        if dies:  # its launcher asks nobody
            os.kill(int(json.loads(a.ask(f"{URL}/server_info")[1])["ranks"][1]["pid"]), signal.SIGKILL)
            second.wait_for("rank 1 .* was killed by SIGKILL; it is started again here .restart 1 of 3")
        set_cable(b, "up")
        assert eventually(lambda: out() == [], 30), first.output + second.output
        thread.join(300)
        (status, text), undisturbed = answers[0], json.loads(a.ask(f"{URL}/generate", call)[1])
        assert status == 200, text
        assert [each["output_ids"] for each in json.loads(text)] == [each["output_ids"] for each in undisturbed]
        assert first.end(signal.SIGINT) == second.wait() == 0


@pytest.mark.slow
def test_the_host_of_node_rank_0_that_is_started_again_serves_with_the_others(hosts: tuple[Host, Host]) -> None:
    """Without it node rank 1 is no side that may answer. Its front end keeps the open requests for the next launch."""
    a, b = hosts
    call = json.dumps(
        {"text": "def ", "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}
    )
    answers: list[tuple[int, str]] = []
    every = ("--front-ends", "every_host")
    with serve(a, 0, a, *every) as first, serve(b, 1, a, *every) as other:
        first.wait_for("ready after", 120)
        assert eventually(lambda: b.ask(f"{URL}/ready")[0] == 200, 30)
        thread = threading.Thread(target=lambda: answers.append(b.ask(f"{URL}/generate", call)))
        thread.start()
        assert eventually(lambda: json.loads(b.ask(f"{URL}/server_info")[1])["requests"]["open"] == 1)
        a.kill_all()
        other.wait_for(r"node rank 0 is not reached at .* \(nothing listens there\)", 60)
        assert eventually(lambda: b.ask(f"{URL}/ready")[0] == 503, 60), other.output
        status, text = b.ask(f"{URL}/generate", CALL)
        assert (status, "does not reach the hosts of most ranks" in text) == (503, True), text
        assert not answers
        with serve(a, 0, a, *every) as again:
            again.wait_for("ready after", 120)
            assert a.ask(f"{URL}/generate", CALL)[0] == 200
            thread.join(60)
            (status, text), undisturbed = answers[0], json.loads(a.ask(f"{URL}/generate", call)[1])
            assert (status, json.loads(text)["output_ids"]) == (200, undisturbed["output_ids"]), text
            assert (other.end(signal.SIGINT), again.wait()) == (0, 0)


@pytest.mark.slow
def test_the_doctor_sees_both_hosts_and_who_is_missing_without_a_cable(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    doctor = ("moe_serve", "doctor", "--json")
    with torchrun(a, 0, a, *doctor) as first, torchrun(b, 1, a, *doctor) as second:
        assert (first.wait(120), second.wait(120)) == (0, 0), first.output + second.output
    found = json.loads(first.output[first.output.index("{") : first.output.rindex("}") + 1])
    assert [rank["address"] for rank in found["ranks"]] == [a.address, b.address]
    assert len({rank["host_mark"] for rank in found["ranks"]}) == 2
    assert len(found["pairs"]) == 2
    assert all(pair["error"] == "" for pair in found["pairs"])


@pytest.mark.slow
def test_a_cut_cable_ends_the_ranks_with_a_reason_and_new_ones_serve_beside_the_same_front_end(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    url = "http://127.0.0.1:30000"

    def is_ready() -> bool:
        return a.ask(f"{url}/ready")[0] == 200

    with a.start("moe_serve", "frontend", *settings(a)) as front_end:
        front_end.wait_for("HTTP on")
        with torchrun(a, 0, a, WORKER) as first, torchrun(b, 1, a, WORKER) as second:
            assert eventually(is_ready, 120), first.output + second.output
            status, right = a.ask(f"{url}/generate", CALL)
            assert status == 200
            launch_id = json.loads(a.ask(f"{url}/server_info")[1])["launch_id"]
            set_cable(b, "down")
            assert first.wait(120) != 0
            assert second.wait(120) != 0
            status, reason = a.ask(f"{url}/ready")
            assert status == 503
            assert "rank" in reason
            assert a.ask(f"{url}/generate", CALL)[0] == 503, "refused at once, not kept waiting"
        set_cable(b, "up")
        with torchrun(a, 0, a, WORKER) as first, torchrun(b, 1, a, WORKER) as second:
            assert eventually(is_ready, 120), first.output + second.output + front_end.output
            answer = json.loads(a.ask(f"{url}/generate", CALL)[1])
            assert answer["output_ids"] == json.loads(right)["output_ids"]
            info = json.loads(a.ask(f"{url}/server_info")[1])
            assert info["launch_id"] != launch_id
            assert [rank["info"]["num_nodes"] for rank in info["ranks"]] == [2, 2]
            assert front_end.process.poll() is None
            assert os.environ["MOE_SERVE_TOKEN"] not in first.output + second.output + front_end.output
