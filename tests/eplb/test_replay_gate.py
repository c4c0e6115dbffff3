"""Gated replays: the Rebalancer decides, rounds activate in time, and nothing moves that does not pay."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, recorded_latency
from moe_serve.eplb.load import LoadRecord, LoadTrace, rank_load
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

TOPOLOGY = Topology(2, 2)
STEADY = SyntheticLoad("zipf", 12, 3, 12, 2, skew=1.0, tokens_per_step=20_000, steps_per_window=10)


@dataclass(frozen=True)
class Prices(GateCost):
    """A layer takes as long as its busiest rank; a transfer takes `per_expert` seconds."""

    per_expert: float

    def layer_seconds(self, tokens: np.ndarray, placement: Placement) -> np.ndarray:
        return np.asarray(rank_load(tokens, placement).max(axis=1) * 1e-6)

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        return self.per_expert * sum(len(moves.moves) for moves in plan.rounds)


def settings(per_expert: float, latency_steps: int = 0) -> ReplaySettings:
    gate = RebalanceSettings(max_regret=0.9)
    return ReplaySettings(TOPOLOGY, 16, gate=gate, gate_cost=Prices(per_expert), latency_steps=latency_steps)


def test_a_cheap_move_is_made_once_on_steady_load() -> None:
    report = replay(synthetic_trace(STEADY), ["gate:greedy"], settings(1e-7))
    run = report.policies[0]
    assert run.name == "gate:greedy"
    assert run.moves.sum() == run.received.sum() > 0
    assert run.num_rounds.sum() > 0
    assert run.served[-1].mean() > report.floor.served[-1].mean() + 0.05
    assert run.moves[len(run.moves) // 2 :].sum() == 0
    assert 0 < run.stall_s.sum() < 1e-3
    assert {"plan", "move", "done"} <= {each.kind for each in run.decisions}


@pytest.mark.parametrize("latency, before", [(0, 0.3), (3, 0.6)])
def test_a_window_in_which_experts_move_is_scored_on_both_placements_by_their_steps(
    latency: int, before: float
) -> None:
    records = [LoadRecord(10 * i, 10, "decode", np.array([[900, 900, *[100] * 6]])) for i in range(4)]
    run = replay(LoadTrace.of(records), ["gate:greedy"], settings(1e-7, latency)).policies[0]
    assert run.num_rounds.tolist() == [0, 3, 0]  # the last one is active 3 steps after the plan
    assert run.served[:, 0].tolist() == pytest.approx([0.6, before * 0.6 + (1 - before) * 1.0, 1.0])


def test_a_dear_move_is_never_made() -> None:
    report = replay(synthetic_trace(STEADY), ["gate:greedy"], settings(1e3))
    run = report.policies[0]
    assert run.moves.sum() == 0
    assert run.stall_s.sum() == 0
    np.testing.assert_array_equal(run.served, report.floor.served)


def test_a_slow_planner_delays_the_gain() -> None:
    first = {}
    for latency in (0, 35):
        run = replay(synthetic_trace(STEADY), ["gate:greedy"], settings(1e-7, latency)).policies[0]
        first[latency] = int(np.flatnonzero(run.moves)[0])
    assert first[35] >= first[0] + 3


def test_gated_replays_repeat_bit_for_bit_and_beside_each_other() -> None:
    load = replace(STEADY, family="bursts", period=3)
    one = replay(synthetic_trace(load), ["gate:greedy", "greedy"], settings(1e-7))
    two = replay(synthetic_trace(load), ["gate:greedy", "greedy"], settings(1e-7), jobs=2)
    for a, b in zip(one.results, two.results, strict=True):
        assert a.decisions == b.decisions
        for name, array in a.arrays().items():
            if name != "plan_s":
                np.testing.assert_array_equal(array, b.arrays()[name], err_msg=f"{a.name} {name}")


def test_the_recorded_latency_of_plans_is_their_median(tmp_path: Path) -> None:
    record = LoadRecord(0, 1, "mixed", np.ones((1, 2), dtype=np.int64))
    writer = JsonlWriter(tmp_path / "t.jsonl", TraceMeta.of(LoadTrace.of([record])))
    for step, wait in ((10, 3), (100, 50), (200, 7)):
        writer.event("plan_requested", step)
        writer.event("plan_ready", step + wait)
    writer.close()
    assert recorded_latency(tmp_path / "t.jsonl") == 7
    JsonlWriter(tmp_path / "u.jsonl", TraceMeta.of(LoadTrace.of([record]))).close()
    assert recorded_latency(tmp_path / "u.jsonl") is None
