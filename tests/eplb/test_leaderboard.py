"""The leaderboard of benchmarks/leaderboard: every planner gets a row, whatever it does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.balancer_instances import Shape
from benchmarks.leaderboard import child, page, score
from benchmarks.leaderboard.entries import Entry, find_entries, plan_function
from benchmarks.leaderboard.instances import INSTANCES, Instance
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.topology import Topology

SMALL = Instance("small", Shape("demo", 4, 32, 40, Topology(2, 4)), "demo", "decode", num_groups=1, plans=2)
BAD = {
    "raises": ("def plan(*args):\n    raise KeyError('load')\n", "KeyError"),
    "shape": ("def plan(*args):\n    return [[0]]\n", "not integers"),
    "nothing": ("x = 1\n", "no function plan"),
    "broken": ("def plan(:\n", "SyntaxError"),
    "leaves_out": ("def plan(tokens, n, *args):\n    return args[-1] * 0\n", "has no slot"),
    "too_large": ("def plan(tokens, n, *args):\n    return args[-1] + 10**6\n", "give ids below 32"),
    "wraps": ("def plan(*args):\n    return args[-1].astype('int64') + 2**32\n", "give ids below 32"),
    "hangs": ("import time\ndef plan(*args):\n    time.sleep(60)\n", "not ready after"),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """A small instance, priced with a model of its own size."""
    model = load_model_profile("demo")
    model = replace(model, num_moe_layers=4, num_logical=32, topk=8)
    costs = ProfileCosts(CostModel(load_hardware("H800"), model, SMALL.shape.topology))
    monkeypatch.setattr(Instance, "costs", lambda self: costs)
    return SMALL


def in_process(entry: Entry, instance: Instance) -> score.Row:
    placements, cpu_s = child.plans(entry, instance)
    return score.score(entry.name, instance, np.stack(placements), np.array(cpu_s))


def test_our_planners_are_ranked_and_drawn(small: Instance, tmp_path: Path) -> None:
    rows = [in_process(entry, small) for entry in find_entries(None, None, None, tmp_path)]
    assert [row.entry for row in rows] == [
        f"moe_serve {name}" for name in ("greedy", "refined", "incremental", "static")
    ]
    assert all(0 < row.worst <= row.served <= 1 and row.step_ms > 0 for row in rows)
    by_name = {row.entry: row for row in rows}
    assert by_name["moe_serve incremental"].moves < by_name["moe_serve refined"].moves
    failed = score.Row("small", "bad <b>", failed="KeyError: <script>")
    html = page.to_html([*rows, failed], [small], "here")
    assert "bad &lt;b&gt;" in html
    assert "<script>" not in html
    assert html.count("<circle") == 2 * len(rows)
    lines = page.overall([*rows, failed])
    assert float(lines[0]["step over best"]) == 1
    assert lines[-1] == {**dict.fromkeys(lines[0], ""), "planner": "bad <b>", "step over best": "0 of 1 ended"}


@pytest.mark.parametrize("name", [name for name in BAD if name != "hangs"])
def test_a_bad_planner_is_refused_with_the_reason(name: str, small: Instance, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(BAD[name][0])
    entry = find_entries(None, None, None, tmp_path)[-1]
    with pytest.raises((KeyError, ValueError, SyntaxError)) as error:
        in_process(entry, small)
    assert BAD[name][1] in f"{type(error.value).__name__}: {error.value}"


def test_the_time_of_a_plan_is_that_of_all_its_processes_by_a_clock_of_ours(small: Instance, tmp_path: Path) -> None:
    (tmp_path / "hides.py").write_text(
        "import os, time\ntime.process_time = lambda: 0.0\ndef plan(*args):\n    child = os.fork()\n    if not child:\n"
        "        end = time.monotonic() + 0.1\n        while time.monotonic() < end: pass\n        os._exit(0)\n"
        "    os.waitpid(child, 0)\n    return args[-1]\n"
    )
    clock = time.process_time
    try:
        _, cpu_s = child.plans(find_entries(None, None, None, tmp_path)[-1], replace(small, plans=1))
    finally:
        time.process_time = clock
    assert cpu_s[0] > 0.01


def test_what_a_hanging_planner_started_ends_with_it() -> None:
    """The second process has the pipes, too: they close when it has ended."""
    command = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(60)"]
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        score._run(command, 0.3, dict(os.environ))
    assert time.monotonic() - begin < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raises", "hangs", "leaves_out"])
def test_a_bad_planner_in_its_process_is_a_row(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(BAD[name][0])
    entry = find_entries(None, None, None, tmp_path)[-1]
    row = score.measure(entry, replace(INSTANCES[0], plans=1), limit_s=15)
    assert BAD[name][1] in row.failed


def test_an_expert_travels_to_a_node_once() -> None:
    """Expert 2 reaches both ranks of node 0, expert 0 both of node 1; expert 1 moves inside node 0."""
    before = Placement(np.array([[0, 1, 2, 3], [0, 1, 2, 3]], dtype=np.int32), 4, 4, allow_lost=True)
    after = Placement(np.array([[2, 2, 0, 0], [1, 0, 2, 3]], dtype=np.int32), 4, 4, allow_lost=True)
    assert score.count_new_experts(before, after, Topology(2, 2)).tolist() == [2, 0]


def test_other_projects_planners_are_called_as_their_engines_do(tmp_path: Path) -> None:
    """Stand-ins with the signatures of EPLB, vLLM and SGLang that record how they are called."""
    tensor = "import torch\nCALLS = []\ndef {}({}):\n    CALLS.append(({}))\n    return {}\n"
    rows = "torch.zeros(1, num_replicas, dtype=torch.int64)"
    (tmp_path / "eplb.py").write_text(
        tensor.format("rebalance_experts", "weight, num_replicas, num_groups, num_nodes, num_gpus",
                      "num_groups, num_nodes, num_gpus", f"({rows},)")
    )  # fmt: skip
    (tmp_path / "abstract.py").write_text("class AbstractEplbPolicy: pass\n")
    (tmp_path / "default.py").write_text(
        "import torch\nfrom .abstract import AbstractEplbPolicy\nclass DefaultEplbPolicy(AbstractEplbPolicy):\n"
        "    @classmethod\n    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, "
        f"old_global_expert_indices=None):\n        assert old_global_expert_indices.shape[1] == num_replicas\n"
        f"        return {rows}\n"
    )
    (tmp_path / "deepseek.py").write_text(
        tensor.format("rebalance_experts", "weight, num_replicas, num_groups, num_nodes, num_gpus, enable_hierarchical",
                      "num_groups, num_nodes, enable_hierarchical", f"({rows}, None, None)")
    )  # fmt: skip
    (tmp_path / "deepseek_vec.py").write_text(
        tensor.format("rebalance_experts", "tokens_per_expert, num_replicas, num_local, num_groups, num_nodes, "
                      "enable_hierarchical", "tokens_per_expert.dim(), num_local, enable_hierarchical",
                      f"({rows}, None, None)")
    )  # fmt: skip
    entries = find_entries(tmp_path / "eplb.py", tmp_path, tmp_path, tmp_path / "none")
    tokens, current = np.ones((1, 8), dtype=np.int64), np.arange(8, dtype=np.int32)[None]
    names = []
    for entry in entries:
        if entry.kind != "moe_serve":
            assert plan_function(entry)(tokens, 8, 4, 2, 8, current).shape == (1, 8)
            names.append(entry.name)
    calls = {name: sys.modules[name].CALLS for name in ("sglang_deepseek", "sglang_deepseek_vec", "deepseek_eplb")}
    assert calls == {
        "deepseek_eplb": [(8, 2, 4)],  # the module of the last entry: by node
        "sglang_deepseek": [(8, 2, True)],
        "sglang_deepseek_vec": [(3, 2, True)],
    }
    assert names == [
        "DeepSeek EPLB, global",
        "DeepSeek EPLB, by node",
        "vLLM default",
        "SGLang deepseek",
        "SGLang deepseek_vec",
    ]
