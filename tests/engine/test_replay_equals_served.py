"""Real engines whose experts move, and a replay of what they recorded: same decisions, placements and splits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import SetPlacement
from moe_serve.eplb import read_trace
from moe_serve.eplb.files.trace_jsonl import read_events, read_jsonl
from moe_serve.eplb.rebalance.events import Event, RoundActivated
from moe_serve.eplb.replay.replay import StepSplitter
from moe_serve.eplb.replay.report import NUM_SHOWN
from moe_serve.eplb.replay.run import LiveRun
from moe_serve.eplb.replay.settings import EvenSteps
from moe_serve.launcher.cli.replay import server_replay
from moe_serve.topology import Topology
from tests.engine.offline import ScriptedMailbox, prompts_with_shared_beginnings, serve, submits_of, tiny_model
from tests.engine.test_recordings import send_commands
from tests.engine.watching import RestlessSplit, Watched, watch
from tests.launcher.cli.test_balancer import call

REDUNDANT = 4  # of 8 experts
COMMANDS = ((6, "start"), (95, "dump"))  # polls; experts move in between, and the last steps have one placement


class WatchedReplay(LiveRun):
    """A replay that notes the placement after each round."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.activated: list[tuple[int, int, list[list[int]]]] = []

    def _handle(self, event: Event) -> None:
        super()._handle(event)
        if isinstance(event, RoundActivated):
            placement = self._rebalancer.placement
            self.activated.append((event.step, placement.version, placement.physical_to_logical.tolist()))


def watch_and_command(folder: Path, split: str, engine: Engine) -> None:
    watch(folder, engine)
    send_commands(COMMANDS, engine)
    mailbox, table = engine.mailbox, engine.served.placement.physical_to_logical
    assert isinstance(mailbox, ScriptedMailbox)
    # Refused while a plan or a move is under way, so one of them comes at a good time.
    by_hand = [(poll, SetPlacement(poll, np.roll(table, poll, axis=1).tolist())) for poll in range(40, 70, 3)]
    mailbox.script = sorted([*mailbox.script, *by_hand], key=lambda item: item[0])
    if split == "exact":
        engine.balancing.split_choice = RestlessSplit()


def run_live(folder: Path, num_ranks: int, split: str) -> tuple[Watched, Path]:
    """Returns what real engines did, and the configuration file of such a server."""
    eplb = {
        "mode": "dynamic", "split": split, "num_redundant_experts": REDUNDANT, "trigger": 1.0, "horizon_windows": 500,
        "record_window_steps": 8, "record_path": str(folder / "load.jsonl"), "recorder_mode": "per_pass",
        "recorder_dir": str(folder / "dumps"),
    }  # fmt: skip
    model = {"path": str(tiny_model(folder, "qwen3_moe")), "load_format": "dummy"}
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump({"model": model, "parallel": {"num_ranks": num_ranks}, "eplb": eplb}))
    overrides = [f"eplb.{name}={value}" for name, value in eplb.items()]
    overrides += [f"model.{name}={value}" for name, value in model.items()]
    overrides += ["engine.max_running_requests=4", "engine.max_batch_tokens=24"]
    params = SamplingParams(max_new_tokens=55, temperature=0, ignore_eos=True)
    submits = submits_of(prompts_with_shared_beginnings(8 * num_ranks, 64, 4), params)
    serve(num_ranks, submits, overrides, stagger=1, prepare=partial(watch_and_command, folder, split))
    first = next(iter(read_jsonl(folder / "load.jsonl"))).placement
    assert first is not None
    return Watched.read(folder, first), config


@pytest.mark.parametrize(("num_ranks", "split"), [(2, "exact"), (3, "even"), (2, "nearest")])
def test_a_replay_decides_and_splits_as_the_server_did(tmp_path: Path, num_ranks: int, split: str) -> None:
    seen, config = run_live(tmp_path, num_ranks, split)
    assert seen.final.version >= 2
    assert {"plan", "manual", "done"} <= {each.kind for each in seen.decisions}
    same_decisions(seen, config, split, tmp_path / "load.jsonl")
    same_splits(seen, tmp_path, split)
    shown_to_a_person(seen, config, tmp_path / "load.jsonl")


def same_decisions(seen: Watched, config: Path, split: str, path: Path) -> None:
    """The replay of `moe-serve replay --like-server`, record by record."""
    load = read_jsonl(path)
    server, start = server_replay(config, path, load, nodes=1)
    assert server.facts.split == split, "as the trace tells it"
    run, num_compared = WatchedReplay(start, server, 0), 0
    for record in load:
        assert record.placement is not None
        placement = run.before(record.first_step, record.num_steps).placement
        if record.first_step in seen.rows:  # a record that begins idle names the placement of its first forward
            assert placement.physical_to_logical.tolist() == record.placement.physical_to_logical.tolist()
            assert placement.version == record.placement_version
            num_compared += 1
        run.after(record)
    assert num_compared > 5
    final = run.end()
    assert run.decisions == seen.decisions
    assert final.physical_to_logical.tolist() == seen.final.physical_to_logical.tolist()
    assert final.version == seen.final.version == len(run.activated)
    for step, version, table in run.activated:
        served = [each for at, each in seen.placements.items() if at >= step and each.version == version]
        assert all(each.physical_to_logical.tolist() == table for each in served)
    assert {version for _, version, _ in run.activated} >= {each.version for each in seen.placements.values()} - {0}


def same_splits(seen: Watched, folder: Path, split: str) -> None:
    """The passes of the dump, split again with the placement of their step: the rows that each slot received."""
    dump = folder / "dumps"
    contents = [torch.load(file, weights_only=True) for file in dump.iterdir()]
    steps = sorted({each["forward_pass_id"] for content in contents for each in content["records"]})
    even_steps = EvenSteps.of(read_events(folder / "load.jsonl"))
    last = np.maximum(seen.placements[steps[-1]].physical_to_logical, 0)
    assert (contents[0]["last_physical_to_logical_map"].numpy() == last).all()
    versions = set()
    for step, record in zip(steps, read_trace(dump), strict=True):
        placement = seen.placements[step]
        splitter = StepSplitter(split, placement, Topology(1, placement.num_ranks), even_steps)
        replayed = splitter.slot_rows(replace(record, first_step=step))[0]
        assert (replayed.sum(axis=1) == seen.rows[step]).all()
        assert ((step, record.phase) in even_steps) == (step in seen.even_steps)
        written = sum(
            each["global_physical_count"].numpy()
            for content in contents
            for each in content["records"]
            if each["forward_pass_id"] == step
        )
        if (placement.physical_to_logical == seen.placements[steps[-1]].physical_to_logical).all():
            assert (written == seen.rows[step]).all()
        else:  # from before a change: each expert's rows are at its first slot of the last placement
            firsts = seen.placements[steps[-1]].logical_to_physical[:, :, 0]
            assert (np.take_along_axis(written, firsts, axis=1) == record.tokens).all()
            assert written.sum() == record.tokens.sum()
        versions.add(placement.version)
    assert len(versions) > 1, "experts moved during the recording"
    if split == "exact":
        assert 0 < len(seen.even_steps & set(steps)) < len(steps)


def shown_to_a_person(seen: Watched, config: Path, path: Path) -> None:
    code, out, err = call("replay", path, "--like-server", config, "--no-curve", "--jobs", 1)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("decisions of live")) :]
    for each in seen.decisions[-NUM_SHOWN:]:
        assert any(line.split()[:2] == [str(each.step), each.kind] for line in table), each
