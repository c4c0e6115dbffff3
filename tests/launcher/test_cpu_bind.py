"""Ranks divide over NUMA nodes, and a bound process runs and allocates where it was bound to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve import process_facts
from moe_serve.config import load_config
from moe_serve.errors import ConfigError
from moe_serve.launcher.cpu_bind import node_of
from moe_serve.process_facts import NODES, NumaNode, numa_nodes

TWO = [NumaNode(0, frozenset(range(8))), NumaNode(2, frozenset(range(8, 16)))]


def write_nodes(folder: Path, lists: dict[int, str]) -> Path:
    for number, cpus in lists.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpus + "\n")
    (folder / "possible").write_text("0-1\n")
    return folder


def test_nodes_are_those_with_cpus_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    folder = write_nodes(tmp_path, {10: "4-7,12", 2: "0-3,8", 3: "", 4: "9"})
    monkeypatch.setattr(process_facts, "NODES", folder)
    assert numa_nodes() == [NumaNode(2, frozenset({0, 1, 2, 3})), NumaNode(10, frozenset({4, 5, 6, 7}))]
    monkeypatch.setattr(process_facts, "NODES", tmp_path / "nowhere")
    assert numa_nodes() == []


@pytest.mark.parametrize(
    ("bind", "num_local", "wanted"),
    [
        ("auto", 2, [0, 2]),
        ("auto", 4, [0, 0, 2, 2]),
        ("auto", 3, [None] * 3),
        ("auto", 1, [None]),
        ("none", 2, [None, None]),
        ((2, 2, 0), 3, [2, 2, 0]),
    ],
)
def test_ranks_divide_over_the_nodes(bind: str | tuple[int, ...], num_local: int, wanted: list[int | None]) -> None:
    nodes = [node_of(bind, TWO, rank, num_local) for rank in range(num_local)]
    assert [None if node is None else node.number for node in nodes] == wanted


def test_one_node_binds_nobody_by_itself() -> None:
    assert node_of("auto", TWO[:1], 0, 1) is None


@pytest.mark.parametrize(("bind", "said"), [((0,), "for 1 ranks but a host has 2"), ((0, 1), "CPUs of 0, 2")])
def test_a_list_that_does_not_fit_is_refused_with_what_there_is(bind: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        [node_of(bind, TWO, rank, 2) for rank in range(2)]


def test_the_setting_takes_words_and_lists_and_refuses_others() -> None:
    assert load_config(overrides=["parallel.cpu_bind=[0, 0]"]).parallel.cpu_bind == (0, 0)
    assert load_config(overrides=["parallel.cpu_bind=none"]).parallel.cpu_bind == "none"
    with pytest.raises(ConfigError, match="cpu_bind"):
        load_config(overrides=["parallel.cpu_bind=socket"])


BOUND = """
import ctypes, os
from moe_serve.config import load_config
from moe_serve.launcher.cpu_bind import bind_rank
from moe_serve.process_facts import numa_nodes, own_node

first = numa_nodes()[0]
config = load_config(overrides=[f"parallel.cpu_bind=[{first.number}, {first.number}]"]).parallel
assert bind_rank(config, 1, 2) == (first, 2)
assert own_node() == first.number
mode, mask, number = ctypes.c_int(), (ctypes.c_ulong * 16)(), {"x86_64": 239, "aarch64": 236}[os.uname().machine]
if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 1025, 0, 0) == 0:  # no container forbids it
    assert (mode.value, mask[0]) == (1, 1 << first.number)
assert os.sched_getaffinity(0) == set(first.cpus)
"""


@pytest.mark.skipif(not NODES.is_dir(), reason="the kernel names no NUMA nodes")
def test_a_bound_process_has_the_cpus_and_the_memory_of_its_node() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", BOUND], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
