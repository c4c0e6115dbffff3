"""A trace that a live balancer has written, replayed with the same settings, makes the same decisions."""

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, events_between_records, read_jsonl
from moe_serve.eplb.rebalance.settings import BalancerSettings
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings, ServerReplay
from moe_serve.topology import Topology
from tests.engine.balancer_scene import FACTS, SKEWED, START, Engine, PlannerHere

CHOICES = {"policy": "greedy", "horizon_windows": 30}


class RecordedEngine(Engine):
    """An engine that writes its trace as a server does: a record, then what follows from it."""

    def __init__(self, path, step_zero=0, append=False, **more):
        self.writer = JsonlWriter(path, TraceMeta(8, (0, 1, 2)), append=append, step_zero=step_zero)
        super().__init__(on_event=self.writer.event, **(CHOICES | more))

    def window(self, load=SKEWED):
        record = self.record(load)
        for _ in range(20):
            self.turn()
        self.writer.add(record)
        self.balancer.window_closed(record, self.step)

    def settle(self):
        """Turns until nothing is under way."""
        while self.balancer.rebalancer.state != "watching":
            self.turn()

    def said(self):
        return said_by(self.balancer.rebalancer.decisions)


def said_by(decisions):
    return [(d.step, d.kind, d.reason, d.layer_rows) for d in decisions]


def loads(number, seed=3):
    """Loads that jump now and then, with noise."""
    rng = np.random.default_rng(seed)
    for index in range(number):
        base = SKEWED if (index // 12) % 2 == 0 else SKEWED[:, ::-1]
        yield rng.poisson(base * rng.uniform(0.5, 1.5)) + 1


def replayed(path, topology=Topology(1, 4), **changes):
    """Returns the result of a replay of the trace with the server's settings, or with changes."""
    trace = read_jsonl(path)
    settings = BalancerSettings(**(CHOICES | changes))
    server = ServerReplay.of(settings, replace(FACTS, token_s=1.0), events_between_records(path))
    report = replay(trace, ["live"], ReplaySettings(topology, START.num_slots, start=START, server=server))
    return report.policies[0]


def same_decisions(result, engine):
    assert said_by(result.decisions) == engine.said()
    assert result.final.physical_to_logical.tolist() == engine.balancer.placement.physical_to_logical.tolist()
    assert result.final.version == engine.balancer.placement.version


@pytest.mark.parametrize(("delay", "split"), [(0, "even"), (5, "exact"), (90, "time")])
def test_the_same_decisions_in_the_same_windows_and_the_same_placements(tmp_path, delay, split):
    path = tmp_path / "t.jsonl"
    engine = RecordedEngine(path, planner=PlannerHere(delay=delay), facts=replace(FACTS, split=split))
    for load in loads(50):
        engine.window(load)
    assert {"plan", "move", "done", "watch"} <= {kind for _, kind, _, _ in engine.said()}
    assert engine.balancer.placement.version > 2
    same_decisions(replayed(path), engine)


def test_a_trace_of_two_hosts_is_replayed_at_the_prices_of_its_measured_network(tmp_path):
    moves = {}
    for rate in (1e9, 333.3):  # bytes a second; an expert has 1,000 bytes
        path = tmp_path / f"{rate}.jsonl"
        facts = replace(FACTS, num_nodes=2, link_bytes_per_s=rate, link_delay_s=1e-4)
        engine = RecordedEngine(path, facts=facts)
        for load in loads(50):
            engine.window(load)
        same_decisions(replayed(path, Topology(2, 2)), engine)
        moves[rate] = [words for step, kind, *words in engine.said() if kind == "move"]
    assert moves[1e9] != moves[333.3], "what crosses the network is dear"


def test_failures_commands_and_lost_ranks_are_repeated(tmp_path):
    path = tmp_path / "t.jsonl"
    engine = RecordedEngine(path)
    balancer = engine.balancer
    for number, load in enumerate(loads(60)):
        engine.planner.failure = "killed" if number in (2, 3, 4) else ""
        if number == 9:
            engine.settle()
            balancer.rebalance_now(engine.step)
        if number == 20:
            engine.settle()
            balancer.set_placement(engine.step, np.roll(START.physical_to_logical, 3, axis=1).tolist())
        if number == 30:
            left, _ = START.without_ranks([3])
            table = left.physical_to_logical.copy()
            table[:, :3] = [0, 6, 7]
            table[:, 3:6] = [1, 2, 3]
            table[:, 6:9] = [4, 5, 6]
            engine.running = None
            balancer.group_changed(engine.step, replace(left, physical_to_logical=table, version=40, allow_lost=False))
        if number == 25:
            engine.settle()
            balancer.set_placement(engine.step, START.physical_to_logical.tolist())
            engine.turn()
            engine.turn()
            assert engine.running is not None
            engine.running = None
            balancer.cancelled(engine.step, "rank 1 gives up")
        engine.window(load)
    kinds = {kind for _, kind, _, _ in engine.said()}
    assert {"failed", "manual", "group", "move", "done"} <= kinds
    same_decisions(replayed(path), engine)


def test_an_alarm_falls_into_the_same_window(tmp_path):
    path = tmp_path / "t.jsonl"
    engine = RecordedEngine(path, planner=PlannerHere(failure="killed by SIGKILL"))
    for load in loads(40):
        engine.window(load)
    assert engine.balancer.alarm
    same_decisions(replayed(path), engine)


def test_a_restarted_server_goes_on_in_the_same_trace(tmp_path):
    path = tmp_path / "t.jsonl"
    first = RecordedEngine(path)
    for load in loads(20):
        first.window(load)
    first.writer.close()
    second = RecordedEngine(path, step_zero=400, append=True)
    for load in loads(20, seed=9):
        second.window(load)
    result = replayed(path)
    said = [*first.said(), *((step + 400, *rest) for step, *rest in second.said())]
    assert said_by(result.decisions) == said
    same = second.balancer.placement.physical_to_logical.tolist()
    assert result.final.physical_to_logical.tolist() == same


@pytest.mark.parametrize(
    "change", [{"trigger": 0.2}, {"policy": "deepseek"}, {"horizon_windows": 2}, {"staging_slots": 3}], ids=str
)
def test_other_settings_part_from_the_trace_where_they_decide_otherwise_and_go_on(tmp_path, change):
    path = tmp_path / "t.jsonl"
    engine = RecordedEngine(path, planner=PlannerHere(delay=5))
    for load in loads(50):
        engine.window(load)
    result = replayed(path, **change)
    parted = [each.reason for each in result.decisions if each.kind == "replay"]
    assert len(parted) == 1
    assert "not those of the trace" in parted[0]
    kinds = [each.kind for each in result.decisions]
    assert kinds.count("plan") - sum(kinds.count(kind) for kind in ("move", "keep", "failed")) in (0, 1)


def test_a_trace_without_events_shows_what_the_settings_would_do(tmp_path):
    path = tmp_path / "t.jsonl"
    engine = RecordedEngine(path)
    for load in loads(40):
        engine.window(load)
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"event"' not in line]
    path.write_bytes(b"".join(lines))
    result = replayed(path)
    assert {"plan", "replay"} <= {each.kind for each in result.decisions}
