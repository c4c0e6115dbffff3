"""`moe-serve serve` as processes: it starts, serves, says what is wrong, and leaves nothing. Ranks without torch."""

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from moe_serve.config import load_config
from moe_serve.errors import LaunchError
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.system import serve_on_this_machine
from moe_serve.links.folder import OwnFolder, remove_left_behind
from tests.conftest import _descendants
from tests.launcher.running import Running, eventually, fake_ranks, gone, pid_of_rank, quiet_port

FIVE = {"input_ids": [7], "sampling_params": {"max_new_tokens": 5, "sampling_seed": 10}}
ENDLESS = {"input_ids": [7], "sampling_params": {"max_new_tokens": 200}}


def serving(*overrides: str, mishap: str = "") -> Running:
    """Ids in, ids out: front ends then start no processes for chats."""
    return Running("tests.launcher.serve_fake", ["model.skip_tokenizer=true", *overrides], FAKE_RANK=mishap)


def test_it_serves_and_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as system, system.client() as client:
        assert client.post("/generate", json=FIVE).json()["output_ids"] == [12, 13, 14, 15, 16]
        header, example = system.wait_for(r"try: curl \S+ -H '(.*)' -d '(.*)'").groups()
        assert client.post("/generate", content=example, headers=[header.split(": ")]).status_code == 200
        assert client.get("/ready").status_code == 200
        pids = system.descendants()
        port = client.base_url.port
        assert len(pids) == 4  # two ranks, the process that they are forked from, and the front end
        assert system.end(signal.SIGINT) == 0
        assert gone(pids)
        assert list(tmp_path.iterdir()) == []
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        assert "rank 0: ready" in system.output  # earlier phases are shown if the parent listens in time
        assert "[rank 1] this is rank 1" in system.output


def test_sigterm_while_starting_ends_everything():
    with serving(mishap="1:never ready") as system:
        system.wait_for("rank 1: loading weights")
        pids = system.descendants()
        assert system.end(signal.SIGTERM) == 0
        assert gone(pids)


def test_open_calls_end_with_an_error_and_a_rank_that_does_not_end_is_ended():
    with serving(mishap="all:slow,1:hangs at the end") as system, system.client() as client:
        pids = system.descendants()
        answers: list[httpx.Response] = []
        fields = {"input_ids": [[7]] * 40, "sampling_params": ENDLESS["sampling_params"], "stream": True}
        call = threading.Thread(target=lambda: answers.append(client.post("/generate", json=fields)))
        call.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] > 0)
        assert system.end(signal.SIGINT) == 0
        call.join(60)
        (answer,) = answers
        assert "the server is ending" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert gone(pids)


def test_sigterm_loses_no_open_request_and_exits_with_0():
    with serving(mishap="all:slow") as system, system.client() as client:
        pids = system.descendants()
        answers: list[httpx.Response] = []
        params = {"max_new_tokens": 30, "sampling_seed": 10}
        fields = {"input_ids": [[7]] * 20, "sampling_params": params}
        call = threading.Thread(target=lambda: answers.append(client.post("/generate", json=fields)))
        call.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] > 0)
        assert system.end(signal.SIGTERM) == 0
        call.join(60)
        assert [answer["output_ids"] for answer in answers[0].json()] == [list(range(12, 42))] * 20
        assert "lost" not in system.output
        assert gone(pids)


@pytest.mark.slow  # by default test_restarting.py holds it without processes
def test_sigterm_loses_no_request_where_ranks_are_lost_before_or_after_it():
    with serving(mishap="all:slow") as system, system.client() as client:
        pids = system.descendants()
        answers: list[httpx.Response] = []
        fields = {"input_ids": [[7]] * 4, "sampling_params": {"max_new_tokens": 30, "sampling_seed": 10}}
        call = threading.Thread(target=lambda: answers.append(client.post("/generate", json=fields)))
        call.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] > 0)
        os.kill(pid_of_rank(client, 1), signal.SIGKILL)
        system.wait_for(r"the ranks are started again \(restart 1")
        system.process.send_signal(signal.SIGTERM)
        system.wait_for("ready again after")
        os.kill(pid_of_rank(client, 0), signal.SIGKILL)
        system.wait_for(r"the ranks are started again \(restart 2")
        assert system.wait() == 0
        call.join(60)
        assert [answer["output_ids"] for answer in answers[0].json()] == [list(range(12, 42))] * 4
        assert gone(pids)


def test_a_second_ctrl_c_does_not_wait():
    patient = {"FAKE_RANK": "1:hangs at the end", "END_GRACE_S": "1000"}  # one Ctrl-C would wait for rank 1 so long
    with Running("tests.launcher.serve_fake", ["model.skip_tokenizer=true"], **patient) as system, system.client():
        pids = system.descendants()
        system.process.send_signal(signal.SIGINT)
        system.wait_for("ending")
        assert system.end(signal.SIGINT) == 0
        assert gone(pids)


def test_no_process_outlives_a_parent_that_is_killed_and_the_next_one_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as system, system.client():
        pids = system.descendants()
        (left,) = tmp_path.iterdir()
        remove_left_behind(tmp_path)
        assert list(tmp_path.iterdir()) == [left], "it is held"
        os.kill(system.process.pid, signal.SIGKILL)
        assert gone(pids)
    assert list(tmp_path.iterdir()) == [left], "no process was left to remove it"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with OwnFolder() as own:  # as each launcher does at its start
        assert list(tmp_path.iterdir()) == [own]


ROLES = ["parallel.num_ranks=1", "parallel.num_prefill_ranks=1", "parallel.handover_gb=0.001"]
DIFFERENCE = "roles differ in the files of weights: ours on role decode; theirs on role prefill. Give all roles the"


def test_roles_that_compute_other_values_are_refused_at_the_start_in_one_line_with_the_fix():
    with serving(*ROLES, mishap="prefill:other weights") as system:
        assert system.wait() == 2
        assert system.output.count("roles differ") == system.output.count(DIFFERENCE) == 1
        assert "ready after" not in system.output


def test_a_wrong_setting_of_prefill_ranks_ends_the_start():
    with serving(*ROLES, mishap="prefill:settings") as system:
        assert system.wait() == 2
        assert "the setting x is wrong; set y" in system.output
        assert "ready after" not in system.output


def of_prefill(client: httpx.Client) -> dict:
    return client.get("/server_info").json()["prefill"]


def test_prefill_ranks_that_come_back_with_other_weights_end_and_decode_ranks_serve_on():
    with serving(*ROLES, mishap="prefill:other weights when started again") as system, system.client() as client:
        os.kill(of_prefill(client)["ranks"][0]["pid"], signal.SIGKILL)
        system.wait_for(DIFFERENCE)
        system.wait_for("they are not started again; the decode ranks serve on")
        assert client.post("/generate", json=FIVE).json()["output_ids"] == [12, 13, 14, 15, 16]
        assert "roles differ" in of_prefill(client)["state"]


def test_prefill_ranks_are_started_again_when_decode_ranks_come_back_with_other_weights():
    with serving(*ROLES, mishap="all:other weights when started again") as system, system.client() as client:
        before = of_prefill(client)["launch_id"]
        os.kill(pid_of_rank(client, 0), signal.SIGKILL)
        system.wait_for("theirs on role decode; ours on role prefill")
        assert eventually(lambda: of_prefill(client)["state"] == "ready", 60)
        assert of_prefill(client)["launch_id"] != before


def counted(seed: int, count: int) -> list[int]:
    """What a fake rank answers."""
    return [2 + (seed + i) % 2000 for i in range(count)]


def test_after_a_killed_rank_all_are_started_again_without_room_in_the_folder_and_calls_keep_their_tokens(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(mishap="all:slow") as system, system.client(answer_s=100) as client:
        (folder,) = tmp_path.iterdir()
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert before.keys() == {"lock", "effective.yaml"} | {each for each in before if each.startswith("front_end")}
        calls: list[httpx.Response] = []
        params = {"max_new_tokens": 60, "sampling_seed": 5}
        fields = {"input_ids": [[7]] * 10, "sampling_params": params}
        threads = [
            threading.Thread(
                target=lambda stream=stream: calls.append(client.post("/generate", json=fields | {"stream": stream}))
            )
            for stream in (False, True)
        ]
        for thread in threads:
            thread.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 20)
        other, victim = pid_of_rank(client, 0), pid_of_rank(client, 1)
        os.kill(victim, signal.SIGKILL)
        system.wait_for(r"rank 1 \(process \d+\) was killed by SIGKILL")
        system.wait_for(r"the ranks are started again \(restart 1 of 3 within 600 s\)")
        for thread in threads:
            thread.join(110)
        assert [call.status_code for call in calls] == [200, 200]
        plain, stream = sorted(calls, key=lambda call: call.text.startswith("data:"))
        outputs = [each["output_ids"] for each in plain.json()]
        last = {}
        for line in stream.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                last[event["index"]] = event["output_ids"]
        assert len(last) == 10
        assert [len(output) for output in outputs] == [60] * 10
        assert sorted(last.values()) == sorted(outputs)
        assert outputs[0] == counted(5, 60)
        system.wait_for("ready again after")
        assert client.get("/ready").status_code == 200
        assert pid_of_rank(client, 0) != other
        assert client.get("/server_info").json()["requests"]["num_failed"] == 0
        assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
        assert system.end(signal.SIGINT) == 0
        assert gone([other, victim])


def test_a_rank_that_cannot_start_ends_the_system_with_its_reason():
    with serving(mishap="1:reports why") as system:
        assert system.wait() == 2, system.output
        for word in ("rank 1", "cache.memory_gib 0.001 holds 1 block; raise it"):
            assert word in system.output
        assert gone(system.descendants())


@pytest.mark.slow  # by default tests/server/ranks/test_bridge.py holds the report, and test_restarting.py the end
def test_ranks_that_are_not_ready_in_time_are_named():
    with serving("server.attach_deadline_s=1", mishap="1:never ready") as system:
        assert system.wait() == 1
        assert "rank 1: loading weights" in system.output.partition("attach_deadline_s")[2]


def test_a_front_end_that_dies_takes_the_ranks_along():
    with serving() as system, system.client():
        pids = system.descendants()
        (front_end,) = [pid for pid in pids if b"frontend" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(front_end, signal.SIGKILL)
        assert system.wait() == 1
        assert "the front end was killed by SIGKILL" in system.output
        assert gone(pids)


def refused(setting: str, value: object) -> str:
    """Returns why a system with this setting cannot start; nothing may have been started."""
    config = load_config(overrides=["server.port=0", "server.worker_port=0", f"{setting}={value}"])
    before = _descendants(os.getpid())
    with fake_ranks(), pytest.raises(LaunchError) as caught:
        serve_on_this_machine(config, StartDisplay(1))
    assert set(_descendants(os.getpid())) <= set(before)
    return str(caught.value)


def test_a_port_in_use_is_one_message_before_anything_starts():
    setting = "server.port"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(setting, port)
    assert len(message.splitlines()) == 1
    assert str(port) in message
    assert setting in message


def test_an_address_of_another_machine_is_not_called_a_port_in_use():
    setting = "server.host"
    assert f"{setting} is '192.0.2.1', which is no address of this machine" in refused(setting, "192.0.2.1")


def test_one_of_two_front_ends_may_die_and_comes_back_while_the_other_serves():
    with serving("server.api_workers=2", mishap="all:slow") as system, system.client() as client:
        pids = system.descendants()
        assert len(pids) == 5, "two ranks, the process that they are forked from, and two front ends"
        own = {number: pid for pid in pids for number in (0, 1) if is_front_end(pid, number)}
        assert own.keys() == {0, 1}
        with httpx.Client(base_url=client.base_url, timeout=30, trust_env=False) as other:
            number = other.get("/server_info").json()["front_end"]["number"]
            answers: list[httpx.Response] = []
            params = {"max_new_tokens": 40, "sampling_seed": 10}
            fields = {"input_ids": [7], "sampling_params": params}
            call = threading.Thread(target=lambda: answers.append(other.post("/generate", json=fields)))
            call.start()
            os.kill(own[1 - number], signal.SIGKILL)
            system.wait_for(rf"the front end {1 - number} was killed by SIGKILL; it is started again \(restart 1 of 3")
            call.join(60)
            assert answers[0].json()["output_ids"] == list(range(12, 52))
        assert eventually(lambda: number_of(client.base_url) == 1 - number), "it serves again"
        assert system.end(signal.SIGTERM) == 0
        assert gone(pids)


def test_launchers_of_two_hosts_start_all_ranks_again_where_one_is_lost_and_end_together(monkeypatch):
    monkeypatch.setenv("MOE_SERVE_TOKEN", "0123456789abcdef" * 2)
    hosts = ["launcher.nnodes=2", f"launcher.dist_init_addr=127.0.0.1:{quiet_port()}"]
    hosts += [f"server.worker_port={quiet_port()}"]
    with (
        serving(*hosts, "launcher.node_rank=1", mishap="all:slow") as other,
        serving(*hosts, mishap="all:slow") as system,
        system.client() as client,
    ):
        other.wait_for("node rank 0: ready after")
        answers: list[httpx.Response] = []
        fields = {"input_ids": [[7]] * 4, "sampling_params": {"max_new_tokens": 40, "sampling_seed": 10}}
        call = threading.Thread(target=lambda: answers.append(client.post("/generate", json=fields)))
        call.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 4)
        os.kill(pid_of_rank(client, 1), signal.SIGKILL)
        for each in (system, other):
            each.wait_for(r"rank 1 \(process \d+\) was killed by SIGKILL")
            each.wait_for("ready again after")
        call.join(60)
        assert [answer["output_ids"] for answer in answers[0].json()] == [list(range(12, 52))] * 4
        pids = [*system.descendants(), *other.descendants()]
        assert len(pids) == 5, "two ranks, the front end, and on each host the process that its rank is forked from"
        other.process.send_signal(signal.SIGTERM)
        assert (system.wait(), other.wait()) == (0, 0)
        assert gone(pids)


@pytest.mark.slow  # by default tests/server/edge/test_client_limits.py holds it with three tables in one process
def test_a_client_of_two_front_ends_has_its_limit_once():
    with serving("server.api_workers=2", "server.rpm_limit=6") as system, system.client() as first:
        pids = system.descendants()
        served_by: set[int] = set()
        statuses: list[int] = []
        with contextlib.ExitStack() as stack:
            clients: dict[int, httpx.Client] = {}
            while len(clients) < 2:  # the kernel chooses who takes a new connection
                client = stack.enter_context(httpx.Client(base_url=first.base_url, timeout=30, trust_env=False))
                clients[client.get("/server_info").json()["front_end"]["number"]] = client
            for _ in range(6):
                for number, client in sorted(clients.items()):
                    response = client.post("/generate", json=FIVE)
                    statuses.append(response.status_code)
                    if response.status_code == 200:
                        served_by.add(number)
                    else:
                        assert "(server.rpm_limit" in response.text
        assert statuses == [200] * 6 + [429] * 6
        assert served_by == {0, 1}
        assert system.end(signal.SIGTERM) == 0
        assert gone(pids)


def is_front_end(pid: int, number: int) -> bool:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"--worker" in arguments and arguments[arguments.index(b"--worker") + 1] == str(number).encode()


def number_of(address: httpx.URL) -> int | None:
    """Which front end takes a new connection; None while it does not serve."""
    with httpx.Client(base_url=address, timeout=30, trust_env=False) as client:
        response = client.post("/generate", json=FIVE)
        info = client.get("/server_info").json()
    return int(info["front_end"]["number"]) if response.status_code == 200 else None
