"""Ranks that meet through the store of the launch: who differs and who is missing is named on every rank."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from moe_serve.dispatch.base import EpGroup
from moe_serve.errors import ConfigError, LaunchError, ModelError, MoeServeError
from moe_serve.launcher.facts import Fact
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.launcher.rendezvous import agree_on_launch, check_facts, count_nodes, gather, leave, open_store
from tests.launcher.running import quiet_port
from tests.launcher.test_refused import place_of, run_worker_in_fork
from tests.ranks import run_ranks


def env_of(rank: int, num_ranks: int, port: int) -> RankEnv:
    return RankEnv(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, 0, "test")


def meet(rank: int, group: EpGroup, port: int, values: Sequence[str]) -> str:
    env = env_of(rank, len(values), port)
    store = open_store(env, 20)
    try:
        check_facts(store, env, lambda: [Fact("equal", "1"), Fact("cache.block_size", values[rank])], 20)
    except ConfigError as error:
        return str(error)
    leave(store, env, "facts")  # rank 0 holds the store, and a real one holds it for as long as it lives
    return "agreed"


def test_every_rank_hears_of_the_difference_though_rank_0_holds_the_store() -> None:
    told = run_ranks(3, meet, quiet_port(), ("16", "16", "32"))
    assert len(set(told)) == 1
    assert told[0].startswith("ranks differ in cache.block_size: 16 on ranks 0, 1; 32 on rank 2")


def test_equal_ranks_agree() -> None:
    assert run_ranks(3, meet, quiet_port(), ("16", "16", "16")) == ["agreed"] * 3


def agree(store: HashStore, num_ranks: int) -> list[int]:
    """Returns the launch id of every rank; the ranks are threads, and arrive in the reverse of their order."""
    with ThreadPoolExecutor(num_ranks) as pool:
        jobs = [
            pool.submit(agree_on_launch, store, env_of(rank, num_ranks, 0), 20) for rank in reversed(range(num_ranks))
        ]
        return [job.result() for job in jobs]


def test_ranks_agree_on_a_launch_whatever_earlier_ones_have_left_in_the_store() -> None:
    store = HashStore()
    launches = [agree(store, 4) for _ in range(5)]
    assert all(len(set(launch)) == 1 for launch in launches)
    assert len({launch[0] for launch in launches}) == 5
    assert all(0 < launch[0] <= 2**62 for launch in launches)


def test_what_an_earlier_launch_has_left_does_not_stand_for_a_rank_that_is_missing() -> None:
    store = HashStore()
    agree(store, 3)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(agree_on_launch, store, env_of(rank, 3, 0), 0.3) for rank in (0, 1)]
        said = [str(job.exception()) for job in jobs]
    assert said[0].startswith("rank 2 of 3 had not joined after 0.3 s")
    assert said[1].startswith("rank 0 of 3 had not joined after 0.3 s")


def test_a_launcher_that_has_drawn_the_launch_is_believed() -> None:
    env = replace(env_of(0, 4, 0), launch_id=5)
    assert agree_on_launch(HashStore(), env, 0.1) == 5


def wait_alone(rank: int, group: EpGroup, port: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(LaunchError) as caught:
        gather(open_store(env_of(0, 4, port), 5), env_of(0, 4, port), "facts", "", 0.3)
    return str(caught.value)


def test_ranks_that_do_not_come_are_named() -> None:
    said = run_ranks(2, wait_alone, quiet_port())[0]
    assert said.startswith("ranks 1, 2, 3 of 4 had not joined after 0.3 s")
    assert "server.attach_deadline_s" in said


def find_nothing() -> list[Fact]:
    raise ModelError("/models/a: cannot be read")


def fail_on_rank_1(rank: int, group: EpGroup, port: int) -> str:
    env = env_of(rank, 3, port)
    with pytest.raises(MoeServeError) as caught:
        check_facts(open_store(env, 20), env, find_nothing if rank == 1 else list, 60)
    return str(caught.value)


def test_no_rank_waits_for_one_that_cannot_come() -> None:
    said = run_ranks(3, fail_on_rank_1, quiet_port(), timeout_s=30)
    assert said[1] == "/models/a: cannot be read"
    assert said[0] == said[2] == "rank 1 ended: /models/a: cannot be read"


def read_garbage(rank: int, group: EpGroup, port: int) -> str:
    env = env_of(rank, 2, port)
    store = open_store(env, 5)
    if rank == 1:
        gather(store, env, "facts", '[["half', 5)
        return ""
    with pytest.raises(LaunchError) as caught:
        check_facts(store, env, list, 5)
    return str(caught.value)


def test_what_is_no_list_of_facts_is_one_error() -> None:
    assert "cannot be read" in run_ranks(2, read_garbage, quiet_port())[0]


def run_worker_that_differs(rank: int, group: EpGroup, port: int) -> tuple[int, list[str]]:
    exchange, token = (("gloo", "a" * 32), ("shm", "b" * 32))[rank]
    settings = [
        "parallel.num_ranks=2", "parallel.device=cpu", "engine.cpu_kernels=torch", f"engine.exchange={exchange}",
        f"server.worker_port={port + 1}",
    ]  # fmt: skip
    return run_worker_in_fork(place_of(rank, port) | {"MOE_SERVE_TOKEN": token}, settings)


def test_processes_that_would_hang_in_different_exchanges_end_with_the_setting() -> None:
    for code, lines in run_ranks(2, run_worker_that_differs, quiet_port()):
        assert code == 2, lines
        assert "ranks differ in engine.exchange: gloo on rank 0; shm on rank 1" in "\n".join(lines)
        assert "they also differ in the token" in "\n".join(lines)


def test_the_facts_of_a_rank_need_no_torch() -> None:
    code = (
        "import sys; from moe_serve.launcher.facts import facts_of; from moe_serve.config import load_config; "
        "facts_of(load_config(), 'cpu'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ)


@pytest.mark.parametrize(
    ("hosts", "num_nodes"),
    [("a", 1), ("aaaa", 1), ("aabb", 2), ("abcd", 4), ("abab", 4), ("aaab", 4), ("aabbb", 5)],
)
def test_nodes_are_equal_runs_of_ranks_else_each_rank_is_one(hosts: str, num_nodes: int) -> None:
    assert count_nodes([host.encode() for host in hosts]) == num_nodes
