"""The doctor on real ranks: what it measures, and whom its listeners answer."""

import contextlib
import json
import socket

import pytest
from typer.testing import CliRunner

from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.examination.machine import listening_addresses
from moe_serve.launcher.examination.pairs import Door, Listener, measure
from moe_serve.launcher.examination.ranks import run_doctor
from moe_serve.launcher.examination.show import to_json
from moe_serve.launcher.rank_env import RankEnv, free_port
from tests.launcher.cli.test_app import moe_serve
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


def test_strangers_get_no_answer_and_ranks_still_do(listener: Listener) -> None:
    for data in (b"", b"p", b"fedcba9876543210ppp", bytes(100_000)):
        stranger = socket.create_connection(("127.0.0.1", listener.port), timeout=10)
        with stranger, contextlib.suppress(OSError):  # it may be closed with bytes unread
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert measure(0, Door(1, "127.0.0.1", listener.port), SECRET).error == ""


def test_a_rank_that_is_not_there_is_an_error_of_the_pair() -> None:
    pair = measure(3, Door(1, "127.0.0.1", free_port()), SECRET)
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
    told = run_ranks(3, examine, free_port(), (16, 16, 16))
    assert len(set(told)) == 1
    data = json.loads(told[0])
    assert data["ok"], data["findings"]
    assert sorted((pair["source"], pair["target"]) for pair in data["pairs"]) == [
        (source, target) for source in range(3) for target in range(3) if source != target
    ]
    assert all(pair["error"] == "" for pair in data["pairs"])


def test_a_rank_with_another_setting_is_a_problem() -> None:
    data = json.loads(run_ranks(3, examine, free_port(), (16, 32, 16))[2])
    assert not data["ok"]
    assert "ranks differ in cache.block_size: 16 on ranks 0, 2; 32 on rank 1" in data["findings"][0]["text"]


def test_alone_it_examines_this_machine() -> None:
    result = moe_serve("doctor", "--json", "--set", "parallel.device=cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads(result.stdout)
    assert data["ok"]
    assert data["pairs"] == []
    assert data["ranks"][0]["packages"]["torch"]


def test_a_model_that_cannot_be_read_is_a_problem_with_exit_code_1() -> None:
    arguments = ["doctor", "--set", "model.path=/nowhere", "--set", "parallel.device=cpu"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "problem: rank 0: model.path is '/nowhere' but there is no such folder" in result.stdout
