"""`moe-serve replay --like-server`: a server's own file says how its load is balanced."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.config import load_config, model_dir
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, read_jsonl
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import placement_fields
from moe_serve.eplb.replay.report import NUM_SHOWN, as_seconds, decision_cells
from moe_serve.eplb.replay.run import LiveRun
from moe_serve.kernels.forms import PER_TENSOR
from moe_serve.launcher.cli.replay import facts_of, server_replay
from moe_serve.models.families.registry import read_spec
from tests.engine.balancer_scene import FACTS, START
from tests.engine.test_replay_equals_live import RecordedEngine, loads
from tests.launcher.cli.test_balancer import call
from tests.models.fp8_checkpoint import BLOCKS, write_fp8_checkpoint
from tests.models.mxfp4_checkpoint import write_mxfp4_config

SERVER = """
model: {path: demo}
parallel: {num_ranks: 4, device: cpu}
eplb: {mode: dynamic, policy: greedy, horizon_windows: 30}
"""


def write_server(folder: Path) -> Path:
    path = folder / "server.yaml"
    path.write_text(SERVER)
    return path


def test_a_live_trace_is_replayed_with_the_servers_decisions(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path / "load.jsonl")
    for load in loads(30):
        engine.window(load)
    code, out, err = call(
        "replay", tmp_path / "load.jsonl", "--like-server", write_server(tmp_path), "--json", "--no-curve"
    )
    assert code == 0, err
    report = json.loads(out)
    decisions = [
        (one["step"], one["kind"], one["reason"], tuple(one["layer_rows"])) for one in report["decisions"]["live"]
    ]
    assert decisions == engine.said()


def test_the_decisions_are_a_table_for_people(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path / "load.jsonl")
    for load in loads(60):
        engine.window(load)
    code, out, err = call("replay", tmp_path / "load.jsonl", "--like-server", write_server(tmp_path), "--no-curve")
    assert code == 0, err
    said = engine.balancer.rebalancer.decisions
    assert len(said) > NUM_SHOWN
    title = f"decisions of live; {len(said) - NUM_SHOWN} earlier ones are in --json"
    table = out[out.index(title) :]
    for cells, each in zip(decision_cells(said[-NUM_SHOWN:]), said[-NUM_SHOWN:], strict=True):
        assert (cells[0], cells[1], cells[5]) == (str(each.step), each.kind, each.reason)
        row = next(line for line in table.splitlines() if line.split()[:2] == cells[:2])
        assert cells[3] in row
        assert each.reason[:30] in row
    watch = next(each for each in said if each.kind == "watch")
    assert decision_cells([watch])[0][3] == f"{as_seconds(watch.realised_s)} of {as_seconds(watch.gain_s)}"


def test_a_trace_without_a_balancer_shows_what_one_would_do(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "load.jsonl", TraceMeta(8, (0, 1, 2)))
    for index, load in enumerate(loads(20)):
        writer.add(LoadRecord(20 * index, 20, "decode", load * 20, step_time_s=0.01 + 1e-4 * index, placement=START))
    writer.close()
    code, out, err = call(
        "replay",
        tmp_path / "load.jsonl",
        "--like-server",
        write_server(tmp_path),
        "-p",
        "greedy",
        "--json",
        "--no-curve",
    )
    assert code == 0, err
    report = json.loads(out)
    assert "plan" in {one["kind"] for one in report["decisions"]["live"]}
    assert {"live", "greedy"} <= {policy["policy"] for policy in report["policies"]}


@pytest.mark.parametrize("expert_weights", ["auto", "dense"])
@pytest.mark.parametrize("kind", ["demo", "fp8", "fp8 by tensor", "mxfp4"])
def test_experts_have_the_size_that_the_servers_ranks_give_them(kind: str, expert_weights: str, tmp_path: Path) -> None:
    path: Path | str = "demo"
    if kind != "demo":
        block = PER_TENSOR if kind == "fp8 by tensor" else BLOCKS
        path = write_mxfp4_config(tmp_path) if kind == "mxfp4" else write_fp8_checkpoint(tmp_path, block)
    config = load_config(
        overrides=[f"model.path={path}", f"model.expert_weights={expert_weights}", "parallel.device=cpu"]
    )
    served = ModelPlan.of(config, read_spec(model_dir(config.model)), torch.device("cpu"))
    assert served.numerics.compiled
    assert served.expert_form == ("dense" if expert_weights == "dense" or kind == "demo" else kind.split()[0])
    facts = facts_of(config, 1, served.placement)
    assert (facts.bytes_per_expert, facts.split) == (served.slot_form.num_bytes, served.split)


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "time"), ("cuda", "even")])
def test_a_trace_that_tells_no_split_is_of_the_one_that_the_file_chooses(
    device: str, chosen: str, tmp_path: Path
) -> None:
    path, server = tmp_path / "load.jsonl", tmp_path / "server.yaml"
    write_served(path, {name: value for name, value in FACTS.to_event().items() if name != "split"}, num_starts=2)
    server.write_text(SERVER.replace("device: cpu", f"device: {device}"))
    replayed, start = server_replay(server, path, read_jsonl(path), 1)
    run = LiveRun(start, replayed, 0)
    for record in read_jsonl(path):
        run.before(record.first_step, record.num_steps)
        run.after(record)
    run.end()
    assert replayed.facts == replace(FACTS, split=chosen)


@pytest.mark.parametrize("split", ["auto", "fewest_activated", 7, None])
def test_a_trace_of_an_unknown_split_is_refused(split: object, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_served(path, FACTS.to_event() | {"split": split})
    code, _, err = call("replay", path, "--like-server", write_server(tmp_path))
    assert code == 2
    assert f"event balancer_started has split {split!r}; expected one of even, nearest, exact, time" in err


def write_served(path: Path, facts: dict[str, Any], num_starts: int = 1) -> None:
    """Writes three windows of load; the server's balancer starts behind the last, and again in its place."""
    writer = JsonlWriter(path, TraceMeta(8, (0, 1, 2)))
    for index, load in enumerate(loads(3)):
        writer.add(LoadRecord(20 * index, 20, "decode", load, placement=START))
    for _ in range(num_starts):
        writer.event("balancer_started", 60, num_ranks=4, **placement_fields(START), **facts)
    writer.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--like-server", "server.yaml", "--ranks", "4", "--window", "40"), "leave --ranks, --window out"),
        (("-p", "live"), "name its file with --like-server"),
        (("--like-server", "missing.yaml"), "missing.yaml"),
    ],
)
def test_what_contradicts_is_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_server(tmp_path)
    writer = JsonlWriter(tmp_path / "load.jsonl", TraceMeta(8, (0, 1, 2)))
    for load in loads(3):
        writer.add(LoadRecord(0, 20, "decode", load, placement=Placement.trivial(3, 8, 4, 4)))
    writer.event("balancer_started", 0, **FACTS.to_event())
    writer.close()
    code, _, err = call("replay", "load.jsonl", *arguments)
    assert code == 2
    assert says in err
