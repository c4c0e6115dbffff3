"""The same worker under torchrun and mpirun, with `moe-serve frontend` beside it; two torchruns joined on one host."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.launcher.listening import listening, takes_connections
from tests.launcher.running import Running, eventually, gone, pid_of_rank, quiet_port

WORKER = "moe_serve.launcher.serve"
FIVE = {"text": "def ", "sampling_params": {"temperature": 0, "max_new_tokens": 5}}


@pytest.fixture
def settings() -> list[str]:
    """The settings of both front end and ranks: the demo model on two ranks, and ports of their own."""
    values = {
        "parallel.num_ranks": 2,
        "parallel.device": "cpu",
        "server.port": quiet_port(),
        "server.worker_port": quiet_port(),
        "server.worker_deadline_s": 5,
    }
    return [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]


@contextlib.contextmanager
def front_end(settings: Sequence[str]) -> Iterator[tuple[Running, httpx.Client]]:
    with Running("moe_serve", ["frontend", *settings]) as running:
        address = running.wait_for(r"HTTP on (\S+),")[1]
        with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client:
            yield running, client


def becomes_ready(client: httpx.Client) -> bool:
    return eventually(lambda: client.get("/ready").status_code == 200, timeout_s=90)


def torchrun(*arguments: str) -> Running:
    return Running("torch.distributed.run", [*arguments])


@pytest.mark.slow  # by default one torchrun starts all ranks, twice
def test_two_torchruns_joined_on_one_host(settings):
    port = str(quiet_port())
    join = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    with (
        front_end(settings) as (server, client),
        torchrun(*join, "--node-rank", "0", "-m", WORKER, *settings) as first,
        torchrun(*join, "--node-rank", "1", "-m", WORKER, *settings) as second,
    ):
        assert client.get("/ready").status_code == 503
        assert becomes_ready(client), first.output + second.output
        assert len(client.post("/generate", json=FIVE).json()["output_ids"]) == 5
        info = client.get("/server_info").json()
        assert {rank["info"]["launched_by"] for rank in info["ranks"]} == {"torchrun"}
        assert server.end(signal.SIGINT) == 0  # ends the ranks, and so torchrun
        assert (first.wait(), second.wait()) == (0, 0)


def serves_through_a_kill(client: httpx.Client, running: Sequence[Running]) -> None:
    """A request whose rank is killed, so that all ranks are started again, has the tokens of an undisturbed one."""
    assert becomes_ready(client), "".join(each.output for each in running)
    params = {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 1000, "ignore_eos": True}  # a second
    call = {"text": "def ", "sampling_params": params}
    launch_id, victim = client.get("/server_info").json()["launch_id"], pid_of_rank(client, 1)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json=call, timeout=120)))
    thread.start()
    assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 1)
    os.kill(victim, signal.SIGKILL)
    thread.join(120)
    assert [answer.status_code for answer in answers] == [200], answers[0].text if answers else "no answer"
    undisturbed = client.post("/generate", json=call, timeout=120).json()
    assert answers[0].json()["output_ids"] == undisturbed["output_ids"]
    info = client.get("/server_info").json()
    assert info["launch_id"] != launch_id
    assert info["requests"]["num_resubmitted"] == 1


def test_requests_go_on_when_torchrun_has_started_its_ranks_again(settings):
    restarts = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2")
    with front_end(settings) as (server, client), torchrun(*restarts, "-m", WORKER, *settings) as ranks:
        serves_through_a_kill(client, [ranks])
        assert server.end(signal.SIGINT) == 0
        assert ranks.wait() == 0


@pytest.mark.slow
def test_requests_go_on_when_two_torchruns_have_started_their_ranks_again(settings):
    """As between two hosts: the ranks share no memory, and lose each other in a call of gloo."""
    settings += ["--set", "dispatch.backend=collective", "--set", "engine.exchange=gloo"]
    join = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2")
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{quiet_port()}", "--rdzv-id", "serve")
    with (
        front_end(settings) as (server, client),
        torchrun(*join, *meet, "-m", WORKER, *settings) as first,
        torchrun(*join, *meet, "-m", WORKER, *settings) as second,
    ):
        serves_through_a_kill(client, [first, second])
        said = [line for line in server.lines if "is lost" in line or "went away" in line]
        assert len(said) == len(set(said))
        assert "waited for rank 1 on " in server.output, "gloo does not say whom it misses; the reports of all ranks do"
        assert ".cc:" not in server.output
        assert server.output.isascii()
        assert server.end(signal.SIGINT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "one rank of torchrun", "mpirun", "one rank of mpirun"])
def test_sigterm_to_a_launcher_or_a_rank_finishes_what_runs(settings, whom):
    if whom.endswith("mpirun"):
        ranks = Running.of([mpirun(), "-n", "2", sys.executable, "-m", WORKER, *settings])
    else:
        ranks = torchrun("--standalone", "--nproc-per-node", "2", "-m", WORKER, *settings)
    with front_end(settings) as (server, client), ranks:
        assert becomes_ready(client), ranks.output
        params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        answers: list[httpx.Response] = []
        call = {"text": ["def ", "class ", "import ", "if "], "sampling_params": params}
        thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json=call, timeout=120)))
        thread.start()
        assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 4)
        pids = [pid_of_rank(client, rank) for rank in range(2)]
        os.kill(pids[1] if whom.startswith("one rank") else ranks.process.pid, signal.SIGTERM)
        assert eventually(lambda: "was asked to end" in client.get("/ready").text)
        refused = client.post("/generate", json=FIVE)
        assert (refused.status_code, "was asked to end" in refused.text) == (503, True)
        thread.join(120)
        assert [len(output["output_ids"]) for output in answers[0].json()] == [400] * 4
        code = ranks.wait()
        if whom != "torchrun":  # torchrun itself ends with an error when it was signalled, however its ranks end
            assert code == 0, ranks.output
        assert gone(pids)
        assert client.get("/health").status_code == 200
        assert server.end(signal.SIGINT) == 0


def mpirun() -> str:
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("needs the mpich wheel: pip install 'moe-serve[mpi]'")
    return found


def test_mpirun_with_a_front_end_beside_it(settings):
    with (
        front_end(settings) as (server, client),
        Running.of([mpirun(), "-n", "2", sys.executable, "-m", WORKER, *settings]) as ranks,
    ):
        assert becomes_ready(client), ranks.output
        assert len(client.post("/generate", json=FIVE).json()["output_ids"]) == 5
        info = client.get("/server_info").json()
        assert {rank["info"]["launched_by"] for rank in info["ranks"]} == {"mpirun"}
        assert {rank["info"]["num_nodes"] for rank in info["ranks"]} == {1}
        for rank in info["ranks"]:
            ports = listening(rank["pid"])  # of gloo, MPI, for wakes, and rank 0's store
            assert sum(takes_connections(port) for port in ports) == 1, (
                "only the port for wakes, which asks for a token"
            )
        assert len(client.post("/generate", json=FIVE).json()["output_ids"]) == 5
        assert server.end(signal.SIGINT) == 0
        assert ranks.wait() == 0


@pytest.mark.slow
def test_a_front_end_that_is_gone_ends_the_ranks(settings):
    with (
        front_end(settings) as (server, client),
        torchrun("--standalone", "--nproc-per-node", "2", "-m", WORKER, *settings) as ranks,
    ):
        assert becomes_ready(client), ranks.output
        pids = ranks.descendants()
        server.process.kill()
        assert ranks.wait() != 0, "the ranks were not asked to end"
        assert gone(pids)
        assert "Start `moe-serve frontend`" in ranks.output


@pytest.mark.slow  # by default tests/launcher/test_rank_env.py holds the message
def test_a_wrong_number_of_ranks_is_one_message_that_says_what_to_do(settings):
    with torchrun("--standalone", "--nproc-per-node", "3", "-m", WORKER, *settings) as ranks:
        assert ranks.wait() != 0
        assert "torchrun started 3 ranks but parallel.num_ranks is 2" in ranks.output
        assert "--set parallel.num_ranks=3" in ranks.output


def test_a_worker_that_is_started_alone_says_how_to_start_it(settings):
    with Running(WORKER, settings) as alone:
        assert alone.wait() == 2
        assert len(alone.lines) == 1
        assert "moe-serve serve" in alone.output
        assert "torchrun --nproc-per-node 2" in alone.output


def test_a_front_end_on_a_taken_port_says_what_to_do(settings):
    with front_end(settings), Running("moe_serve", ["frontend", *settings]) as second:
        assert second.wait() == 2
        assert len(second.lines) == 1
        assert "server.port" in second.output
