"""The leader's part in balancing: what it tells the engine, the front end and the trace."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.config import load_config
from moe_serve.engine.balancing.balancer import MAX_TRAFFIC_RANKS, window_report
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import PlannerProcess
from moe_serve.eplb.policies.names import POLICIES, SERVED
from moe_serve.eplb.rebalance.settings import BalancerSettings
from moe_serve.errors import PlacementError
from tests.engine.balancer_scene import FACTS, SKEWED, START, STEPS, Engine, PlannerHere


def test_every_policy_of_the_configuration_exists_and_settings_follow_it():
    moves = "staging_slots: 2, pair_moves: 1, node_moves: 3"
    chosen = f"eplb={{mode: dynamic, trigger: 0.8, {moves}, policy: refined}}"
    settings = msgspec.convert(load_config(overrides=[chosen]).eplb, BalancerSettings, from_attributes=True)
    assert settings == BalancerSettings("refined", 0.8, staging_slots=2, pair_moves=1, node_moves=3)
    of_the_file = msgspec.convert(load_config().eplb, BalancerSettings, from_attributes=True)
    assert of_the_file == BalancerSettings(), "one default, not two"
    for name in SERVED:
        assert name in POLICIES
        assert load_config(overrides=[f"eplb.policy={name}"]).eplb.policy == name


def test_a_skewed_load_is_balanced_within_a_few_windows_and_reported():
    engine = Engine(horizon_windows=100)  # so that the regret bound covers the first move of these short windows
    for _ in range(12):
        engine.window()
    engine.turn()
    before, after = (rank_load(SKEWED, p).max(axis=1) for p in (START, engine.balancer.placement))
    assert (after[[0, 2]] < 0.7 * before[[0, 2]]).all()
    assert engine.balancer.placement.version == len(engine.rounds) > 0
    assert {"plan", "move", "done"} <= set(engine.decisions())
    first, last = engine.reports[0], engine.reports[-1]
    assert (first.rank, first.launch_id, first.mode, first.state) == (2, 5, "dynamic", "watching")
    assert first.placement == START.physical_to_logical.tolist()
    placements = [report.placement for report in engine.reports if report.placement is not None]
    assert placements[-1] == engine.balancer.placement.physical_to_logical.tolist()
    assert len(placements) == 1 + len(engine.rounds)
    windows = [report.window for report in engine.reports if report.window is not None]
    assert len(windows) == 12
    assert windows[0].balancedness[0] == pytest.approx(rank_load(SKEWED, START)[0].mean() / before[0])
    assert windows[0].tokens == (SKEWED * STEPS).tolist()
    totals = last.totals
    assert totals["num_windows"] == 12
    assert totals["num_rounds"] == len(engine.rounds)
    assert totals["num_experts_moved"] >= len(engine.rounds)
    assert totals["num_bytes_moved"] == sum(1000 * start.round.num_transfers for start in engine.rounds)
    assert totals["longest_pause_seconds"] == 0.001
    assert totals["move_seconds"] == pytest.approx(0.03 * len(engine.rounds))
    assert totals["realised_gain_seconds"] > 0
    assert engine.planner.started == 1


def test_nothing_is_reported_when_nothing_changes():
    engine = Engine()
    for _ in range(30):
        engine.turn()
    assert len(engine.reports) == 1


def test_a_round_is_told_once_and_stays_until_then():
    engine = Engine()
    while not engine.balancer.has_work:
        record = engine.record(SKEWED)
        engine.step += STEPS
        engine.balancer.window_closed(record, engine.step)
        engine.balancer.poll(engine.step)
    start = engine.balancer.next_round()
    assert engine.balancer.next_round() is start
    engine.balancer.round_sent(start.version)
    assert engine.balancer.next_round() is None
    assert not engine.balancer.has_work
    engine.balancer.cancelled(engine.step, "rank 1 is late")
    assert engine.balancer.next_round() is None
    assert engine.balancer.placement.version == 0


def test_events_carry_what_a_replay_needs_in_order():
    engine = Engine(PlannerHere(delay=7), horizon_windows=100)
    for _ in range(6):
        engine.window()
    names = engine.names()
    assert names[0] == "balancer_started"
    assert engine.events[0][2]["token_s"] == FACTS.token_s
    asked, ready = names.index("plan_requested"), names.index("plan_ready")
    assert ready == asked + 1
    assert engine.events[ready][1] - engine.events[asked][1] == 8
    activated = [(step, fields) for name, step, fields in engine.events if name == "round_activated"]
    assert [fields["version"] for _, fields in activated] == [start.version for start in engine.rounds]
    assert activated[0][1]["pause_s"] == 0.001


def test_a_failing_planner_raises_an_alarm_and_a_person_switches_it_on_again():
    engine = Engine(PlannerHere(failure="the planner process was killed by SIGKILL"))
    for _ in range(60):
        engine.window()
    assert engine.balancer.alarm
    assert engine.reports[-1].alarm == engine.balancer.alarm
    assert engine.reports[-1].state == "off"
    assert engine.reports[-1].totals["num_failures"] == 3
    assert engine.decisions().count("plan") == 3
    engine.planner.failure = ""
    assert "plan of all layers" in engine.balancer.rebalance_now(engine.step)
    engine.window()
    assert engine.balancer.alarm == ""
    assert "done" in engine.decisions()


def test_a_plan_that_never_comes_raises_an_alarm():
    engine = Engine(PlannerHere(delay=10**9), plan_deadline_s=3.0)
    for _ in range(120):
        engine.window()
    assert "neither a plan nor a refusal" in engine.balancer.alarm
    assert "switched_off" in engine.names()


def test_a_round_that_the_ranks_are_never_told_raises_an_alarm_and_blocks_nothing():
    engine = Engine(move_deadline_s=3.0)
    while not engine.balancer.has_work:
        record = engine.record(SKEWED)
        engine.step += STEPS
        engine.balancer.window_closed(record, engine.step)
        engine.balancer.poll(engine.step)
    for _ in range(2000):
        engine.clock += 0.01
        engine.balancer.poll(engine.step)
    assert "neither live nor given up" in engine.balancer.alarm
    assert not engine.balancer.has_work
    assert engine.balancer.rebalance_now(engine.step)


def test_a_pause_of_all_ranks_is_no_reason_for_an_alarm():
    engine = Engine(PlannerHere(delay=30), plan_deadline_s=3.0)
    for _ in range(3):
        engine.window()
        engine.clock += 1000.0
    for _ in range(10):
        engine.clock += 0.5
        engine.balancer.poll(engine.step)
    assert engine.balancer.alarm == ""


def test_a_person_places_experts_and_hears_why_not():
    engine = Engine()
    table = np.roll(START.physical_to_logical, 3, axis=1).tolist()
    assert "rounds" in engine.balancer.set_placement(0, table)
    with pytest.raises(PlacementError, match="move is under way"):
        engine.balancer.set_placement(0, table)
    for _ in range(200):
        engine.turn()
    assert engine.balancer.placement.physical_to_logical.tolist() == table
    assert engine.names().count("place_at") == 1  # a refused command is no event
    with pytest.raises(PlacementError, match="no load"):
        Engine().balancer.rebalance_now(0)


def test_a_lost_rank_ends_what_runs_and_the_next_plan_leaves_it_out():
    engine = Engine(PlannerHere(delay=10**9))
    for _ in range(3):
        engine.window()
    assert engine.planner.asked
    lost = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -1, -1], (3, 1)), 8, 4, version=1)
    engine.balancer.group_changed(engine.step, lost)
    engine.planner.delay = 0
    engine.balancer.poll(engine.step)  # the plan of the old group comes, and is dropped
    assert engine.names()[-1] == "group_changed"
    for _ in range(8):
        engine.window()
    assert (engine.balancer.placement.physical_to_logical[:, 9:] == -1).all()
    assert engine.decisions()[-1] in {"done", "watch", "keep", "plan", "group"}


def test_it_plans_in_a_process_of_its_own_and_leaves_none():
    planner = PlannerProcess("incremental", 60.0)
    engine = Engine(planner)
    try:
        for _ in range(3):
            engine.window()
        pid = planner.pid
        assert pid is not None
        while "plan_ready" not in engine.names():
            assert "plan_failed" not in engine.names()
            engine.balancer.poll(engine.step)
            time.sleep(0.002)
        for _ in range(20):
            engine.turn()
        assert "done" in engine.decisions()
    finally:
        engine.balancer.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_request_that_one_turn_could_not_carry_keeps_an_idle_engine_turning():
    engine = Engine()
    assert not engine.balancer.has_work
    engine.planner.has_more_to_send = True
    assert engine.balancer.has_work


@pytest.mark.parametrize("num_ranks", [MAX_TRAFFIC_RANKS, 2 * MAX_TRAFFIC_RANKS])
def test_a_window_reports_the_traffic_of_so_many_ranks_as_cost_no_serving_time(num_ranks: int) -> None:
    by_source = np.ones((1, num_ranks, 2 * num_ranks), dtype=np.int64)
    record = LoadRecord(0, 1, "decode", by_source.sum(axis=1), by_source=by_source)
    report = window_report(record, Placement.trivial(1, 2 * num_ranks, num_ranks))
    assert report.traffic == ([[2.0] * num_ranks] * num_ranks if num_ranks <= MAX_TRAFFIC_RANKS else [])
