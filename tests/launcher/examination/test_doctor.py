"""The doctor: what it measures on real ranks, whom its listeners answer, and the fault and the fix that it names."""

import contextlib
import json
import socket
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.examination.doctor import (
    Diagnosis,
    Finding,
    RankReport,
    judge,
    listening_addresses,
    print_diagnosis,
    run_doctor,
    to_json,
)
from moe_serve.launcher.examination.pairs import Door, Listener, Pair, measure, partners
from moe_serve.launcher.facts import Fact
from moe_serve.launcher.rank_env import RankEnv
from tests.launcher.running import quiet_port
from tests.ranks import run_ranks

SECRET = b"0123456789abcdef"


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", SECRET)
    yield made
    made.close()


def test_a_pair_is_measured(listener: Listener) -> None:
    pair = measure(0, Door(1, "127.0.0.1", listener.port), SECRET)
    assert (pair.source, pair.target, pair.error) == (0, 1, "")
    assert pair.latency_us > 0
    assert pair.mbytes_per_s > 0
    assert abs(pair.clock_s) < 5


def test_unauthenticated_peers_get_no_answer_and_ranks_still_do(listener: Listener) -> None:
    for data in (b"", b"p", b"fedcba9876543210ppp", bytes(100_000)):
        peer = socket.create_connection(("127.0.0.1", listener.port), timeout=10)
        with peer, contextlib.suppress(OSError):  # it may be closed with bytes unread
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
    assert measure(0, Door(1, "127.0.0.1", listener.port), SECRET).error == ""


def test_a_rank_that_is_not_there_is_an_error_of_the_pair() -> None:
    pair = measure(3, Door(1, "127.0.0.1", quiet_port()), SECRET)
    assert "refused" in pair.error


def test_listening_addresses_are_read_from_the_kernel() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((host, 0))
            server.listen()
            assert listening_addresses(server.getsockname()[1]) == [host]


def examine(rank: int, group: EpGroup, port: int, block_sizes: tuple[int, ...]) -> str:
    config = load_config(
        overrides=["parallel.num_ranks=3", "parallel.device=cpu", f"cache.block_size={block_sizes[rank]}"]
    )
    env = RankEnv(rank, 3, rank, 3, "127.0.0.1", port, 0, "test")
    return to_json(run_doctor(env, config, 30))


def test_all_ranks_come_to_the_same_diagnosis_of_every_pair() -> None:
    told = run_ranks(3, examine, quiet_port(), (16, 16, 16))
    assert len(set(told)) == 1
    data = json.loads(told[0])
    assert data["ok"], data["findings"]
    assert sorted((pair["source"], pair["target"]) for pair in data["pairs"]) == [
        (source, target) for source in range(3) for target in range(3) if source != target
    ]
    assert all(pair["error"] == "" for pair in data["pairs"])


def test_a_rank_with_another_setting_is_a_problem() -> None:
    data = json.loads(run_ranks(3, examine, quiet_port(), (16, 32, 16))[2])
    assert not data["ok"]
    assert "ranks differ in cache.block_size: 16 on ranks 0, 2; 32 on rank 1" in data["findings"][0]["text"]


def test_alone_it_examines_this_machine() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json", "--set", "parallel.device=cpu"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["ok"]
    assert data["pairs"] == []
    assert data["ranks"][0]["packages"]["torch"]


def test_a_model_that_cannot_be_read_is_a_problem_with_exit_code_1() -> None:
    arguments = ["doctor", "--set", "model.path=/nowhere", "--set", "parallel.device=cpu"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "problem: rank 0: model.path is '/nowhere' but there is no such folder" in result.stdout


HEALTHY = RankReport(
    rank=0, host="one", host_mark="a", num_local_ranks=1, address="10.0.0.1", interface="eth0", master="10.0.0.1",
    device="cpu", packages={"python": "3.11.7", "zmq curve": "yes"}, environ={"NCCL_DEBUG": "INFO"}, cores=8,
    memory_bytes=1 << 34, shm_bytes=1 << 34, files=65536, files_hard=65536, memlock=-1, store=["10.0.0.1"],
    facts=[Fact("cache.block_size", "16")], kernels="compiled for this CPU (avx512), bits 12ab", problems=[],
)  # fmt: skip


def reports(**changes: Any) -> list[RankReport]:
    """Four healthy ranks on two hosts, of which rank 2 differs in something."""
    ranks = [
        msgspec.structs.replace(HEALTHY, rank=rank, host_mark="ab"[rank // 2], address=f"10.0.0.{rank // 2 + 1}")
        for rank in range(4)
    ]
    ranks[2] = msgspec.structs.replace(ranks[2], **changes)
    return ranks


def pairs(**changes: Any) -> list[Pair]:
    """Equal links in both directions, of which that from rank 1 to rank 2 differs."""
    found = [Pair(a, b, 20.0, 1000.0, 0.0) for a in range(4) for b in range(4) if a != b]
    return [msgspec.structs.replace(p, **changes) if (p.source, p.target) == (1, 2) else p for p in found]


def judged(links: list[Pair] | None = None, **changes: Any) -> list[Finding]:
    return judge(load_config(overrides=["parallel.num_ranks=4"]), reports(**changes), links or pairs())


def test_healthy_ranks_have_no_findings() -> None:
    assert judged() == []


@pytest.mark.parametrize(("cores", "ranks", "threads", "warned"), [
    (2, 2, 1, False), (2, 2, 2, False), (2, 2, 3, True), (2, 4, 2, True), (4, 2, 2, False), (4, 2, 3, True),
    (1, 1, 2, True),
])  # fmt: skip
def test_only_ranks_of_one_core_each_may_have_more_threads(cores: int, ranks: int, threads: int, warned: bool) -> None:
    config = load_config(overrides=["parallel.num_ranks=4", f"parallel.threads_per_rank={threads}"])
    found = judge(config, reports(cores=cores, num_local_ranks=ranks), pairs())
    assert [finding.text for finding in found if "threads on" in finding.text] == (
        [f"rank 2: {ranks} ranks of {threads} threads on {cores} cores"] if warned else []
    )


@pytest.mark.parametrize(
    ("changes", "level", "words", "fix"),
    [
        ({"facts": [Fact("cache.block_size", "32")]}, "problem", "ranks differ in cache.block_size", "same config"),
        ({"packages": {"python": "3.12.1", "zmq curve": "yes"}}, "warning", "python differs: 3.11.7", "same versions"),
        ({"packages": {"python": "3.11.7", "zmq curve": "no"}}, "problem", "rank 2: this libzmq has no CURVE", "pyzmq"),
        ({"kernels": "plain torch"}, "problem", "ranks compute differently: compiled for", "engine.cpu_kernels=torch"),
        ({"problems": ["no such model"]}, "problem", "rank 2: no such model", ""),
        ({"files": 1024}, "warning", "rank 2: at most 1024 open files", "ulimit -n"),
        ({"num_local_ranks": 2, "shm_bytes": 64 << 20}, "warning", "rank 2: 64 MiB of /dev/shm", "--shm-size"),
        ({"device": "cuda", "memlock": 8 << 20}, "warning", "rank 2: only 8 MiB may be locked", "ulimit -l"),
        ({"num_local_ranks": 16}, "warning", "16 ranks of 1 threads on 8 cores", "parallel.threads_per_rank"),
        ({"address": "", "interface": "eth7"}, "problem", "rank 2: there is no interface eth7", "GLOO_SOCKET_IFNAME"),
        ({"address": "127.0.0.1"}, "problem", "rank 2: would listen on 127.0.0.1", "MASTER_ADDR"),
        ({"address": "8.8.8.8"}, "warning", "8.8.8.8 (eth0) is a public address", "GLOO_SOCKET_IFNAME"),
        ({"environ": {"NCCL_DEBUG": "WARN"}}, "warning", "NCCL_DEBUG differs: INFO on ranks", "export NCCL"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_fault_of_a_rank_is_named_with_its_fix(changes: dict[str, Any], level: str, words: str, fix: str) -> None:
    found = judged(**changes)
    match = [finding for finding in found if words in finding.text]
    assert match, found
    assert match[0].level == level
    assert fix in match[0].fix


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"error": "timed out"}, "problem", "rank 1 cannot reach rank 2 at 10.0.0.2 (timed out)"),
        ({"clock_s": -7.5}, "warning", "the clocks of ranks 1 and 2 differ by 7.5 s"),
        ({"latency_us": 5000.0}, "warning", "rank 1 to rank 2: 5000 µs, others 20 µs"),
        ({"mbytes_per_s": 90.0}, "warning", "rank 1 to rank 2: 90 MB/s, others 1000 MB/s"),
    ],
    ids=str,
)
def test_a_fault_of_a_link_is_named(changes: dict[str, Any], level: str, words: str) -> None:
    (finding,) = judged(pairs(**changes))
    assert (finding.level, words) == (level, words if words in finding.text else finding.text)


def test_kernels_of_another_width_with_the_same_bits_are_equal() -> None:
    assert judged(kernels="compiled for this CPU (avx2), bits 12ab") == []


def test_an_open_store_is_named() -> None:
    ranks = reports()
    ranks[0] = msgspec.structs.replace(ranks[0], store=["::"])
    (finding,) = judge(load_config(overrides=["parallel.num_ranks=4"]), ranks, pairs())
    assert "listens on all interfaces" in finding.text


def test_the_report_is_tables_for_people_and_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = Diagnosis(reports(), pairs(error="no route to host"), judged(pairs(error="no route to host")))
    print_diagnosis(diagnosis)
    text = capsys.readouterr().out
    assert text.startswith("problem: rank 1 cannot reach rank 2"), "tables of many ranks are longer than a screen"
    assert "    fix: nc -vz 10.0.0.2" in text
    assert "can serve together" not in text
    data = json.loads(to_json(diagnosis))
    assert data["ok"] is False
    assert data["findings"][0]["level"] == "problem"
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 145])
def test_at_each_turn_ranks_form_disjoint_pairs_and_meet_all_others(num_ranks: int) -> None:
    order = [list(partners(rank, num_ranks)) for rank in range(num_ranks)]
    for rank, others in enumerate(order):
        assert sorted(others) == [other for other in range(num_ranks) if other != rank]
    if num_ranks % 2 == 0:
        for turn in range(num_ranks - 1):
            assert all(order[order[rank][turn]][turn] == rank for rank in range(num_ranks))
