"""The main job goes on when one of three ranks, or the planner, is killed or stopped, and when a person moves experts:
over HTTP, the demo model."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.conftest import _command
from tests.launcher.running import Running, eventually, gone, pid_of_rank

SETTINGS = (
    "engine.numerics=batch_invariant", "eplb.num_redundant_experts=32",
    "eplb.mode=dynamic", "eplb.trigger=0", "eplb.record_window_steps=8",
    "engine.heartbeat_s=0.2", "server.worker_port=0", "parallel.threads_per_rank=1",
)  # fmt: skip
LENGTH = 120
PROMPTS = [("def __init__(self", 0.0), ("import os", 0.9), ("class A:", 0.0), ("The server", 0.7), ("x = [", 0.9)]


def serve(num_ranks: int) -> Running:
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    return Running("moe_serve", ["serve", "--port", "0", "--num-ranks", str(num_ranks), *sets])


def body(number: int, max_new_tokens: int) -> dict[str, object]:
    text, temperature = PROMPTS[number % len(PROMPTS)]
    params = {"temperature": temperature, "sampling_seed": number, "ignore_eos": True}
    return {"text": text, "sampling_params": params | {"max_new_tokens": max_new_tokens}}


def plain_calls(count: int) -> list[dict[str, object]]:
    return [body(number, LENGTH) | {"routed_dp_rank": number % 3} for number in range(count)]


# Of two ranks, one of which is killed: outputs that have a form, with the log probabilities of their tokens.
FORM = {"type": "array", "items": {"enum": [1, 22, None]}, "minItems": 50, "maxItems": 50}
FORM["x-guidance"] = {"whitespace_flexible": False}
SCORED = {"return_logprob": True, "top_logprobs_num": 2}
SCORED_CALLS = [
    {"text": text, "sampling_params": params | {"temperature": 0.9, "sampling_seed": 7}, "routed_dp_rank": rank}
    | SCORED
    for rank in (1, 2)
    for text, params in [
        ("x = ", {"max_new_tokens": 400, "json_schema": json.dumps(FORM)}),
        ("name: ", {"max_new_tokens": 400, "regex": "[a-c]{80,90}-[0-9]{3}"}),
        ("return", {"max_new_tokens": LENGTH, "ignore_eos": True, "top_p": 0.9, "top_k": 50}),
    ]
]


def scores(answer: dict) -> list[object]:
    """Returns what is said of an answer's tokens: all of it must be that of an undisturbed one."""
    meta = answer["meta_info"]
    lists = [meta[name] for name in ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs")]
    assert len(lists[0]) == len(lists[1]) == len(answer["output_ids"])
    return [answer["output_ids"], answer["text"], meta["finish_reason"], *lists]


class Streams:
    """Calls that stream, and what has come of them so far."""

    def __init__(self, address: str, calls: list[dict[str, object]]):
        self.answers: list[list[dict]] = [[] for _ in calls]
        self._address = address
        self._threads = [threading.Thread(target=self._read, args=each) for each in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, call: dict[str, object]) -> None:
        with (
            httpx.Client(base_url=self._address, timeout=60, trust_env=False) as client,
            client.stream("POST", "/generate", json=call | {"stream": True}) as stream,
        ):
            for line in stream.iter_lines():
                if line and line != "data: [DONE]":
                    self.answers[number].append(json.loads(line.removeprefix("data: ")))

    def have_begun(self) -> bool:
        return all(len(answer) >= 3 for answer in self.answers)

    def tokens(self) -> list[list[int]]:
        """Returns the tokens of each stream, which has only grown."""
        for thread in self._threads:
            thread.join(60)
        found = []
        for answer in self.answers:
            for shorter, longer in pairwise(answer):
                assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
                assert len(longer["output_ids"]) > len(shorter["output_ids"])
            found.append(answer[-1]["output_ids"])
        return found


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """What one rank makes of the calls, with nothing going wrong."""
    from moe_serve import LLM, SamplingParams
    from tests.server.served import demo_tokenizer

    tokenizer = demo_tokenizer()
    with LLM("demo", num_ranks=1, numerics="batch_invariant") as llm:
        params = [
            SamplingParams(max_new_tokens=LENGTH, temperature=PROMPTS[i % 5][1], seed=i, ignore_eos=True)
            for i in range(6)
        ]
        outputs = llm.generate([tokenizer.encode(PROMPTS[i % 5][0]) for i in range(6)], params)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def system():
    with serve(3) as running:
        yield running


@pytest.fixture(scope="module")
def client(system):
    with system.client(timeout_s=120) as made:
        yield made


def test_a_stopped_rank_is_left_out_and_serves_again_when_it_goes_on(system, client, right):
    streams = Streams(str(client.base_url), plain_calls(6))
    assert eventually(streams.have_begun)
    victim = pid_of_rank(client, 1)
    os.kill(victim, signal.SIGSTOP)
    # By its silence: the deadline of a step is 60 s. The line is of the rank that noticed first, or of one it told.
    system.wait_for(r"rank 1 is masked \(.*(no sign of life|misses rank 1).*\); ranks 0, 2 serve on", timeout_s=45)
    assert client.get("/ready").status_code == 200
    os.kill(victim, signal.SIGCONT)
    assert streams.tokens() == right
    system.wait_for("rank 1 rejoined; ranks 0, 1, 2 serve")
    info = client.get("/server_info").json()
    assert info["ranks_out"] == {}
    assert info["requests"]["num_moved"] == 2
    answer = client.post("/generate", json=body(0, 5) | {"routed_dp_rank": 1}).json()
    assert answer["output_ids"] == right[0][:5]
    assert answer["meta_info"]["dp_rank"] == 1


def balance(client: httpx.Client) -> dict:
    return client.get("/eplb/status").json()


def planners(system: Running) -> list[int]:
    return [pid for pid in system.descendants() if "planner_process" in _command(pid)]


def test_experts_move_where_a_person_wants_them(client, right):
    placement = client.get("/eplb/placement").json()
    wanted = placement["physical_to_logical_map"]
    for row in wanted:  # two experts of ranks 0 and 2 swap their slots
        theirs = next(i for i in range(2 * len(row) // 3, len(row)) if row[i] not in row[: len(row) // 3])
        ours = next(i for i in range(len(row) // 3) if row[i] not in row[2 * len(row) // 3 :])
        row[ours], row[theirs] = row[theirs], row[ours]
    answer = client.post("/eplb/placement", json=placement)
    assert answer.status_code == 200, answer.text
    assert eventually(lambda: client.get("/eplb/placement").json()["physical_to_logical_map"] == wanted)
    assert eventually(lambda: balance(client)["state"] == "watching")
    assert balance(client)["placement"]["version"] > placement["version"]
    answers = [client.post("/generate", json=body(0, 5) | {"routed_dp_rank": rank}).json() for rank in range(3)]
    assert [answer["output_ids"] for answer in answers] == [right[0][:5]] * 3


def test_a_killed_planner_is_replaced_when_a_plan_is_asked_for(system, client, right):
    assert eventually(lambda: planners(system))
    killed = planners(system)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert gone(killed), "at the lowest priority it also dies late; a plan asked of a dying process fails"
    assert client.post("/generate", json=body(0, 5)).json()["output_ids"] == right[0][:5]
    num_plans = balance(client)["totals"].get("num_plans", 0)
    assert eventually(lambda: client.post("/eplb/rebalance").status_code == 200), "a load is recorded by and by"
    assert eventually(lambda: balance(client)["totals"].get("num_plans", 0) > num_plans)
    # A plan that was being made when its process was killed has failed; the one that was asked for does not.
    assert eventually(lambda: balance(client)["last_decision"]["kind"] in ("keep", "done"), 100), balance(client)
    assert eventually(lambda: balance(client)["state"] == "watching")
    assert balance(client)["alarm"] is None
    assert set(planners(system)) - set(killed)


def test_streams_of_a_killed_rank_end_with_the_right_tokens_forms_and_log_probabilities_and_it_comes_back(
    system, client, right
):
    undisturbed = [scores(client.post("/generate", json=call).json()) for call in SCORED_CALLS]
    pids = system.descendants()
    others = [pid_of_rank(client, rank) for rank in (0, 2)]
    streams = Streams(str(client.base_url), plain_calls(6) + SCORED_CALLS)
    assert eventually(streams.have_begun)
    os.kill(pid_of_rank(client, 1), signal.SIGKILL)
    assert streams.tokens()[:6] == right
    assert [scores(answer[-1]) for answer in streams.answers[6:]] == undisturbed
    assert len(json.loads(streams.answers[6][-1]["text"])) == FORM["minItems"]
    assert re.fullmatch("[a-c]{80,90}-[0-9]{3}", streams.answers[7][-1]["text"])
    served_by = [[event["meta_info"]["dp_rank"] for event in answer] for answer in streams.answers[6:9]]
    assert all(ranks[0] == 1 != ranks[-1] for ranks in served_by), "they had not ended when their rank was killed"
    system.wait_for(r"rank 1 \(process \d+\) was killed by SIGKILL; (ranks 0, 2 serve on|it was masked already)")
    assert client.get("/ready").status_code == 200
    assert eventually(lambda: client.get("/server_info").json()["ranks_out"] == {})
    assert [pid_of_rank(client, rank) for rank in (0, 2)] == others
    answer = client.post("/generate", json=body(0, 5) | {"routed_dp_rank": 1}).json()
    assert answer["output_ids"] == right[0][:5]
    assert answer["meta_info"]["dp_rank"] == 1
    info = client.get("/server_info").json()["ranks"][1]["info"]
    assert info["shared_weights"], "it maps the copy of the weights that the others serve from"
    assert not info.get("experts_from"), "so it reads none"
    pids += system.descendants()
    assert system.end(signal.SIGINT) == 0
    assert gone(pids)


def pid_of_front_end(system: Running, number: int) -> int:
    mark = f"--worker {number} "
    found = [pid for pid in system.descendants() if "launcher.frontend" in (name := _command(pid)) and mark in name]
    return found[0] if found else 0


@pytest.mark.slow
def test_a_front_end_and_a_rank_that_are_killed_one_after_the_other_come_back_and_nothing_else_is_started() -> None:
    sets = ["--set=parallel.threads_per_rank=1", "--set=eplb.num_redundant_experts=64", "--api-workers=2"]
    with (
        Running("moe_serve", ["serve", "--port=0", "--num-ranks=2", *sets]) as running,
        running.client(timeout_s=120) as client,
    ):
        before = client.post("/generate", json=body(0, 60)).json()["output_ids"]
        number = client.get("/server_info").json()["front_end"]["number"]
        for victim, front_end_first in enumerate((True, False)):
            rank, front_end = pid_of_rank(client, victim), pid_of_front_end(running, 1 - number)
            other = pid_of_rank(client, 1 - victim)
            for pid in (front_end, rank) if front_end_first else (rank, front_end):
                os.kill(pid, signal.SIGKILL)
            assert client.post("/generate", json=body(0, 60)).json()["output_ids"] == before
            running.wait_for(rf"rank {victim} is started again, alone")
            running.wait_for(rf"rank {victim} rejoined")
            assert pid_of_rank(client, 1 - victim) == other
            assert eventually(lambda killed=front_end: pid_of_front_end(running, 1 - number) not in (0, killed))
        assert "the ranks are started again" not in running.output
        assert running.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_a_rank_that_cannot_be_spared_is_named_and_waited_for() -> None:
    settings = [f"--set={setting}" for setting in ("engine.step_deadline_s=12", "engine.suspect_after_s=0.5")]
    with (
        Running("moe_serve", ["serve", "--port=0", "--num-ranks=2", *settings]) as running,
        running.client(timeout_s=120) as client,
    ):
        before = client.post("/generate", json=body(0, 5)).json()["output_ids"]
        victim = pid_of_rank(client, 1)
        os.kill(victim, signal.SIGSTOP)
        running.wait_for(r"rank 0 has been in the exchange of step \d+ for 3 s: .* rank 1, without a sign of life for")
        running.wait_for("the stacks of its threads follow")
        running.wait_for("most recent call first")
        os.kill(victim, signal.SIGCONT)
        assert client.post("/generate", json=body(0, 5)).json()["output_ids"] == before
        assert "is masked" not in running.output


@pytest.mark.slow
def test_where_the_new_process_is_killed_too_all_are_started_again() -> None:
    with (
        Running("moe_serve", ["serve", "--port=0", "--num-ranks=2"]) as running,
        running.client(timeout_s=120) as client,
    ):
        before = client.post("/generate", json=body(0, 900)).json()["output_ids"]
        answers: list[httpx.Response] = []

        def call() -> None:
            with httpx.Client(base_url=client.base_url, timeout=120, trust_env=False) as own:
                answers.append(own.post("/generate", json=body(0, 900)))

        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 1)
        old = [pid_of_rank(client, rank) for rank in (0, 1)]
        os.kill(old[0], signal.SIGKILL)
        assert eventually(lambda: pid_of_rank(client, 0) != old[0])
        os.kill(pid_of_rank(client, 0), signal.SIGKILL)
        running.wait_for("was killed by SIGKILL before it took part again")
        running.wait_for(r"the ranks are started again in 5 s \(restart 2 of 3")
        running.wait_for("ready again after")
        thread.join(120)
        assert answers[0].json()["output_ids"] == before
        assert running.end(signal.SIGINT) == 0


def can_mount() -> bool:
    """Whether this user may have a file system of its own for a process."""
    return shutil.which("unshare") is not None and not subprocess.run(["unshare", "-rm", "true"]).returncode


def took_the_last_name(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        (folder / "filler, the last").touch()
        return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
@pytest.mark.parametrize("lacks", ["bytes", "names"])
def test_a_killed_rank_comes_back_where_tmpdir_is_full_or_once_it_is_not(lacks: str, tmp_path: Path) -> None:
    """Its start needs no byte there; it needs names, of sockets, and says so until there are some."""
    script = f'mount -t tmpfs -o size=1m,nr_inodes=64 tmpfs {tmp_path} && exec env TMPDIR={tmp_path} "$@"'
    sets = [f"--set={each}" for each in ("parallel.threads_per_rank=1", "eplb.num_redundant_experts=32")]
    serve = [sys.executable, "-m", "moe_serve", "serve", "--port=0", "--num-ranks=2", *sets]
    with (
        Running.of(["unshare", "-rm", "sh", "-c", script, "sh", *serve]) as running,
        running.client(timeout_s=120) as client,
    ):
        folder = Path(f"/proc/{pid_of_rank(client, 0)}/root{tmp_path}")
        with contextlib.suppress(OSError):  # until it is full
            while lacks == "bytes":
                with (folder / "filler").open("ab") as file:
                    file.write(bytes(4096))
            for number in range(100):
                (folder / f"filler {number}").touch()
        calls = [body(number, 200) for number in range(8)]
        streams = Streams(str(client.base_url), calls)
        assert eventually(streams.have_begun)
        if lacks == "names":
            (socket,) = folder.glob("moe_serve-*/wakes-1")
            socket.unlink()  # the process still has it, until it is killed
        os.kill(pid_of_rank(client, 1), signal.SIGKILL)
        if lacks == "names":
            assert eventually(lambda: took_the_last_name(folder))
            running.wait_for("moe_serve-.* cannot be written to .No space left on device.; make room there")
            running.wait_for("before it took part again; the next start is due in 5 s")
            for path in folder.glob("filler*"):
                path.unlink()
        running.wait_for("rank 1 rejoined; ranks 0, 1 serve", timeout_s=120)
        assert "Traceback" not in running.output
        assert len(streams.tokens()) == len(calls)
        assert all(len(tokens) == 200 for tokens in streams.tokens())
        assert "the ranks are started again" not in running.output
        assert running.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_two_ranks_of_four_that_are_killed_at_once_come_back() -> None:
    sets = ["--set=parallel.threads_per_rank=1", "--set=eplb.num_redundant_experts=32"]
    with (
        Running("moe_serve", ["serve", "--port=0", "--num-ranks=4", *sets]) as running,
        running.client(timeout_s=120) as client,
    ):
        before = client.post("/generate", json=body(0, 60)).json()["output_ids"]
        others = [pid_of_rank(client, rank) for rank in (1, 3)]
        for victim in [pid_of_rank(client, rank) for rank in (0, 2)]:
            os.kill(victim, signal.SIGKILL)
        assert client.post("/generate", json=body(0, 60)).json()["output_ids"] == before
        assert eventually(lambda: client.get("/server_info").json()["ranks_out"] == {}, 60)
        assert [pid_of_rank(client, rank) for rank in (1, 3)] == others
        for rank in range(4):
            answer = client.post("/generate", json=body(0, 60) | {"routed_dp_rank": rank}).json()
            assert answer["output_ids"] == before
        assert running.end(signal.SIGINT) == 0
