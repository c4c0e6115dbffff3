"""Replays: hand-worked windows, floor and ceiling, the same report each time, nothing estimated.

Behind the gate the Rebalancer decides, rounds activate in time, and nothing moves that does not pay.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, recorded_latency
from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import Plan, PlanRequest, PlanRules
from moe_serve.eplb.replay.costs import arrivals
from moe_serve.eplb.replay.replay import Scorer, redundancy_curve, replay
from moe_serve.eplb.replay.result import CEILING, FLOOR, ReplayReport
from moe_serve.eplb.replay.settings import SPLIT_CHANGED, EvenSteps, ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.errors import ConfigError, PlacementError, TraceError
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal, same_slots

TOPOLOGY = Topology(2, 2)
SMALL = SyntheticLoad(num_windows=5, num_layers=3, num_logical=12, topk=2, tokens_per_step=500, steps_per_window=4,
                      num_sources=4, rho=0.9)  # fmt: skip
SETTINGS = ReplaySettings(TOPOLOGY, 16)


class Swapped:
    """Plans the placement that it is given for, so that a test knows what must be served."""

    name = "swapped"

    def __init__(self, *tables: list[int]):
        self.tables = list(tables)
        self.seen: list[list[int]] = []

    def plan(self, request: PlanRequest) -> Plan:
        self.seen.append(request.tokens[0].tolist())
        placement = Placement(np.array([self.tables.pop(0)]), request.tokens.shape[1], request.topology.num_ranks)
        ones = np.ones(1)
        return Plan(placement, ones * 0.5, ones, ones * 0.5, False, 0, 0.0)


def test_a_plan_serves_the_window_that_comes_next() -> None:
    trace_windows = 4
    policy = Swapped([0, 2, 1, 3], [0, 3, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3])
    windows = [[8, 4, 2, 2], [4, 4, 4, 4], [8, 8, 0, 0], [1, 1, 1, 13]]
    records = [LoadRecord(10 * i, 10, "mixed", np.array([tokens])) for i, tokens in enumerate(windows)]
    report = replay(LoadTrace.of(records, topk=1), [policy], ReplaySettings(Topology(1, 2), 4))
    assert policy.seen == windows[:trace_windows]
    floor, run, ceiling = report.results
    # Window 1 is even everywhere; window 2 on {0,3} {1,2} is 8 | 8; window 3 on {0,1} {2,3} is 2 | 14: mean 8 / 14.
    np.testing.assert_allclose(run.served[:, 0], [1.0, 1.0, 8 / 14])
    np.testing.assert_allclose(floor.served[:, 0], [1.0, 0.5, 8 / 14])
    np.testing.assert_allclose(ceiling.served, 1.0)
    assert run.rank_load.tolist() == [[8, 8], [8, 8], [2, 14]]
    # {0,1}{2,3} -> {0,2}{1,3}: each rank receives one; -> {0,3}{1,2}: one each; -> {0,1}{2,3}: one each.
    assert run.moves.tolist() == [2, 2, 2]
    assert run.num_plans == 3
    assert report.tokens.tolist() == [16, 16, 16]
    assert report.first_steps.tolist() == [10, 20, 30]
    assert [r.name for r in report.results] == [FLOOR, "swapped", CEILING]


def test_interval_and_history_count_windows() -> None:
    policy = Swapped(*[[0, 1, 2, 3]] * 9)
    records = [LoadRecord(i, 1, "mixed", np.array([[2**i, 0, 0, 0]])) for i in range(7)]
    replay(LoadTrace.of(records), [policy], ReplaySettings(Topology(1, 2), 4, history=2, intervals=(2,)))
    assert [seen[0] for seen in policy.seen] == [1 + 2, 4 + 8, 16 + 32]


QUICK = make_policy("refined", rounds=2)
THREE = ["greedy", QUICK, "deepseek"]


@cache
def report_of_three() -> ReplayReport:
    return replay(synthetic_trace(SMALL), THREE, SETTINGS)


def test_the_same_trace_gives_the_same_report_also_in_processes_side_by_side() -> None:
    ticks: list[int] = []
    alone = report_of_three()
    beside = replay(synthetic_trace(SMALL), THREE, SETTINGS, progress=ticks.append, jobs=2)
    assert ticks == list(range(1, 4 * 5 + 1))
    for a, b in zip(alone.results, beside.results, strict=True):
        assert a.name == b.name
        for name, array in a.arrays().items():
            if name != "plan_s":
                np.testing.assert_array_equal(array, b.arrays()[name], err_msg=f"{a.name} {name}")
        assert (a.final is None) == (b.final is None)
        if a.final is not None and b.final is not None:
            assert same_slots(a.final, b.final)


class Failing:
    name = "failing"

    def plan(self, request: PlanRequest) -> Plan:
        raise ConfigError("this policy cannot; use another")


def test_an_error_in_a_process_beside_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="this policy cannot; use another"):
        replay(synthetic_trace(SMALL), [Failing(), "greedy"], SETTINGS, jobs=2)


def test_policies_stay_between_floor_and_ceiling_on_steady_load() -> None:
    load = replace(SMALL, family="zipf", tokens_per_step=50_000, num_layers=4)
    report = replay(synthetic_trace(load), ["greedy", QUICK], SETTINGS)
    served = {r.name: float(r.served.mean()) for r in report.results}
    assert served[FLOOR] < served["greedy"] <= 1
    assert served[FLOOR] < served["refined"] <= served[CEILING] == 1


def test_off_node_share_and_traffic_follow_the_sources() -> None:
    # One expert per rank, two nodes of two ranks: rank 0 sends to its own expert, rank 3 to expert 0 and to expert 2.
    source = np.zeros((1, 4, 4), dtype=np.int64)
    source[0, 0, 0], source[0, 3, 0], source[0, 3, 2] = 6, 2, 2
    record = LoadRecord(0, 1, "mixed", source.sum(axis=1), by_source=source)
    score = Scorer(TOPOLOGY, 1).score(record, Placement(np.array([[0, 1, 2, 3]]), 4, 4))
    assert score.traffic is not None
    assert score.traffic.tolist() == [[6, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 2, 0]]
    assert score.off_node == pytest.approx(0.2)
    # A second replica of expert 0 on node 1 takes half of everybody's tokens: an even split does not know the nodes.
    two = Placement(np.array([[0, 1, 2, 3, 0, -1, 1, 3]]), 4, 4)
    other = Scorer(TOPOLOGY, 1).score(record, two).traffic
    assert other is not None
    assert other.sum() == pytest.approx(10)


def test_the_trace_of_another_cluster_is_refused() -> None:
    with pytest.raises(TraceError, match="by_source has 4 source ranks but the topology has 2"):
        replay(synthetic_trace(SMALL), ["greedy"], ReplaySettings(Topology(1, 2), 16))


def test_active_experts_count_replicas_with_their_expert() -> None:
    record = LoadRecord(0, 4, "decode", np.array([[9, 4, 1, 0]]), activations=np.array([[4, 2, 1, 0]]))
    placement = Placement(np.array([[0, 1, 0, 2, 3, -1]]), 4, 2)  # rank 0: 0 1 0, rank 1: 2 3 -
    assert Scorer(Topology(1, 2), 1).score(record, placement).activated == pytest.approx((4 + 2 + 4) / 4)


def test_an_exact_split_balances_single_steps_and_needs_them() -> None:
    steps = np.array([[[8, 2, 2]], [[2, 8, 2]]])
    record = LoadRecord(0, 2, "mixed", steps.sum(axis=0), per_step=steps)
    placement = Placement(np.array([[0, 1, 0, 2]]), 3, 2)  # expert 0 on both ranks
    scorer = Scorer(Topology(1, 2), 1, split="exact")
    # Step 0: 2 + x = 2 + (8 - x) -> 6 | 6; step 1: rank 0 has 8 of expert 1 alone: 8 | 4.
    assert scorer.score(record, placement).balancedness.tolist() == pytest.approx([(1 + 6 / 8) / 2])
    with pytest.raises(TraceError, match="sums 2 steps, and a split per batch works on single ones"):
        scorer.score(LoadRecord(0, 2, "mixed", record.tokens), placement)


def test_arrivals_ignore_slots_of_a_rank_and_know_the_nodes() -> None:
    old = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), 8, 4)
    new = Placement(np.array([[1, 0, 4, 3, 2, 5, 6, 7]]), 8, 4)  # rank 1 receives 4 from node 1, rank 2 receives 2
    moved = arrivals(old, new, TOPOLOGY)
    assert (moved.from_node.tolist(), moved.off_node.tolist()) == ([0, 0, 0, 0], [0, 1, 1, 0])
    assert moved.by_expert.tolist() == [[0, 0, 1, 0, 1, 0, 0, 0]]
    near = Placement(np.array([[2, 1, 0, 3, 4, 5, 6, 7]]), 8, 4)
    assert arrivals(old, near, TOPOLOGY).from_node.tolist() == [1, 1, 0, 0]


def test_what_the_trace_lacks_is_said_not_estimated() -> None:
    records = [LoadRecord(i * 5, 5, "mixed", np.arange(1, 13).reshape(1, 12)) for i in range(3)]
    report = replay(LoadTrace.of(records), ["greedy"], SETTINGS)
    assert report.missing["off-node"] == "tokens by source rank (by_source) in the trace"
    assert "active experts" in report.missing
    assert report.missing["step time"] == "--model and --hardware"
    row = report.summary(report.results[1])
    assert row["off_node"] is None
    assert row["activated"] is None
    assert row["step_s"] is None
    assert row["bytes"] is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_slots": 18}, "18 slots do not divide over 4 ranks; use 16 or 20"),
        ({"num_slots": 8}, "8 slots are fewer than the 12 experts; use at least 12"),
        ({"history": 0}, "history is 0 windows"),
        ({"start": Placement.trivial(3, 12, 4)}, "the current placement has"),
    ],
)
def test_a_replay_that_cannot_be_says_why(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replay(synthetic_trace(SMALL), ["greedy"], replace(SETTINGS, **changes))  # type: ignore[arg-type]


def test_too_short_a_trace_says_what_to_change() -> None:
    with pytest.raises(TraceError, match="has 5 windows and plans are made from 5, so none is left"):
        replay(synthetic_trace(SMALL), ["greedy"], replace(SETTINGS, history=5))


def test_an_unknown_policy_is_refused_before_the_trace_is_read() -> None:
    def open_records():  # type: ignore[no-untyped-def]
        raise AssertionError("the trace was read")

    trace = LoadTrace(open_records, 12, (0, 1, 2))
    with pytest.raises(ConfigError, match="policy 'other' is unknown"):
        replay(trace, ["other"], SETTINGS)
    with pytest.raises(ConfigError, match="weighs gains against costs"):
        replay(trace, ["gate:greedy"], SETTINGS)


def test_idle_steps_of_a_window_change_no_score() -> None:
    tokens = np.random.default_rng(0).integers(0, 900, (2, 8))
    busy = LoadRecord(0, 20, "decode", tokens, activations=np.minimum(tokens, 20))
    idle = replace(busy, num_steps=300, num_forwards=20)
    scorer, placement = Scorer(Topology(1, 4), topk=2), Placement.trivial(2, 8, 4, 0)
    assert scorer.tokens_per_step(idle) == scorer.tokens_per_step(busy)
    assert scorer.score(idle, placement).activated == scorer.score(busy, placement).activated
    reports = [replay(LoadTrace.of([record] * 3, topk=2), ["greedy"], SETTINGS) for record in (busy, idle)]
    assert reports[0].tokens.tolist() == reports[1].tokens.tolist()
    assert reports[0].num_steps.tolist() == reports[1].num_steps.tolist() == [20, 20]


def test_the_redundancy_curve_is_of_the_window_after_the_plan():
    now, later = (LoadRecord(step, 1, "decode", lognormal(2, 30, 1.0, seed)) for step, seed in ((0, 1), (1, 2)))
    topology, slots = Topology(2, 5), range(30, 71, 20)
    rows = redundancy_curve([[now, later]], topology, slots, PlanRules())
    assert [number for number, _, _ in rows] == [30, 50, 70]
    for number, mean, worst in rows:
        plan = make_policy("refined", rounds=0).plan(PlanRequest(now.tokens, topology, number))
        served = balancedness(rank_load(later.tokens, plan.placement))
        assert (mean, worst) == pytest.approx((served.mean(), served.min()))
        assert mean < plan.balancedness.mean()


def test_slots_that_do_not_divide_over_the_ranks_are_refused():
    records = [LoadRecord(step, 1, "decode", lognormal(1, 4, 1.0)) for step in range(2)]
    with pytest.raises(PlacementError, match="num_slots"):
        redundancy_curve([records], Topology(1, 2), [5], PlanRules())


def changed(step: object, *phases: object) -> dict[str, object]:
    return {"event": SPLIT_CHANGED, "step": step, "phases": list(phases)}


def test_a_choice_holds_until_the_next_one() -> None:
    other = {"event": "round_activated", "step": 4, "version": 2}
    steps = EvenSteps.of([changed(0), changed(3, "decode"), other, changed(7, "decode", "mixed"), changed(9)])
    even = {phase: [step for step in range(12) if (step, phase) in steps] for phase in ("decode", "mixed", "prefill")}
    assert even == {"decode": [3, 4, 5, 6, 7, 8], "mixed": [7, 8], "prefill": []}
    assert (5, "decode") not in EvenSteps.of([other])
    assert (2, "decode") not in EvenSteps.of([changed(3, "decode")])


@pytest.mark.parametrize("event", [changed(None), changed(1, "idle"), {"event": SPLIT_CHANGED, "step": 1}], ids=str)
def test_a_change_without_step_or_phases_is_named(event: dict[str, object]) -> None:
    with pytest.raises(TraceError, match="split_changed"):
        EvenSteps.of([event])


def test_only_the_exact_split_of_a_replay_follows_the_choice() -> None:
    placement = Placement(np.array([[0, 1, 2, 0]]), 3, 2)
    per_step = np.tile(np.array([4, 4, 0]), (3, 1, 1))  # even leaves rank 0 with 6 of 8
    record = LoadRecord(10, 3, "decode", per_step.sum(axis=0), per_step=per_step)
    even_steps = EvenSteps.of([changed(11, "decode")])

    def balance(split: str, *chosen: EvenSteps) -> float:
        return float(Scorer(Topology(1, 2), 1, None, split, *chosen).score(record, placement).balancedness[0])

    exact, even = balance("exact"), balance("even")
    assert (exact, even) == (1.0, pytest.approx(2 / 3))
    assert balance("exact", even_steps) == pytest.approx((exact + 2 * even) / 3)
    assert balance("even", even_steps) == even


STEADY = SyntheticLoad("zipf", 12, 3, 12, 2, skew=1.0, tokens_per_step=20_000, steps_per_window=10)


@dataclass(frozen=True)
class Prices(GateCost):
    """A layer takes as long as its busiest rank, the rest of a step so long that no regret of a move counts; a transfer
    takes `per_expert` seconds."""

    per_expert: float

    def layer_seconds(self, tokens: np.ndarray, activations: np.ndarray | None, placement: Placement) -> np.ndarray:
        return np.asarray(rank_load(tokens, placement).max(axis=1) * 1e-6)

    def other_seconds(self, tokens: np.ndarray, activations: np.ndarray | None, placement: Placement) -> float:
        return 1.0

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        return self.per_expert * sum(len(moves.moves) for moves in plan.rounds)


def settings(per_expert: float, latency_steps: int = 0) -> ReplaySettings:
    return ReplaySettings(TOPOLOGY, 16, gate_cost=Prices(per_expert), latency_steps=latency_steps)


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
