"""What a rebalancer does when ranks are lost, a person commands, or nothing comes of its plans."""

import numpy as np
import pytest

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import (
    GroupChanged,
    MigrationFailed,
    PlaceAt,
    PlanFailed,
    PlanNow,
    PlanReady,
    RequestPlan,
    RoundActivated,
    SwitchOff,
)
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.errors import PlacementError
from tests.eplb.test_rebalancer import (
    SKEWED,
    START,
    STEPS,
    TOPOLOGY,
    LinearPrices,
    asked,
    plan_for,
    run_rounds,
    settings,
    window,
)

ROW = [*(0, 1, 2, 3, 4, 5), *(0, 1, 2, 3, 6, 7), *(4, 5, 6, 7, -1, -1), *(4, 5, 6, 7, -1, -1)]
TWICE = Placement(np.array([ROW] * 3), 8, 4)  # without rank 1, experts 0 .. 3 are on one rank


def make(placement=START, **changes):
    return Rebalancer(placement, TOPOLOGY, settings(**changes), LinearPrices())


def kinds(rebalancer):
    return [decision.kind for decision in rebalancer.decisions]


def num_ranks_of(placement):
    """Returns on how many ranks each expert is, [L, E]."""
    table = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)
    return np.stack([(table == expert).any(axis=2).sum(axis=1) for expert in range(placement.num_logical)], axis=1)


def lose_rank_one(rebalancer):
    left, lost = rebalancer.placement.without_ranks([1])
    assert lost == []
    assert (num_ranks_of(left) == 1).any()
    return rebalancer.handle(GroupChanged(310, left))


def test_a_lost_rank_ends_plan_and_move_and_second_slots_come_back_first():
    rebalancer = make(TWICE)
    request = asked(rebalancer)
    (first,) = rebalancer.handle(PlanReady(300, request.request_id, plan_for(request)))
    assert first.version == 1
    actions = lose_rank_one(rebalancer)
    assert rebalancer.state == "moving"
    with pytest.raises(PlacementError, match="version"):
        rebalancer.handle(RoundActivated(311, 17))
    run_rounds(rebalancer, actions)
    assert (num_ranks_of(rebalancer.placement) >= 2).all()
    assert (rebalancer.placement.physical_to_logical.reshape(3, 4, -1)[:, 1] == -1).all()


def test_restoring_needs_no_load_and_no_gain():
    rebalancer = make(TWICE)
    rebalancer.cost.transfer_s = 1e9
    run_rounds(rebalancer, lose_rank_one(rebalancer))
    assert kinds(rebalancer) == ["group", "restore", "done"]
    assert (num_ranks_of(rebalancer.placement) >= 2).all()
    assert rebalancer.placement.version > 0


def test_a_restoring_round_that_fails_is_tried_again_at_once_but_not_for_ever():
    rebalancer = make(TWICE)
    actions = lose_rank_one(rebalancer)
    for step in range(400, 402):
        assert actions
        actions = rebalancer.handle(MigrationFailed(step, "rank 1 is slow"))
    assert actions
    assert rebalancer.handle(MigrationFailed(403, "rank 1 is slow")) == ()
    assert rebalancer.state == "off"
    assert "rank 1 is slow" in rebalancer.journal.alarm
    assert rebalancer.handle(GroupChanged(410, rebalancer.placement))  # other ranks, another chance
    assert rebalancer.journal.alarm == ""


def test_after_a_loss_plans_leave_the_lost_rank_empty():
    rebalancer = make(TWICE)
    left, _ = TWICE.without_ranks([3])
    run_rounds(rebalancer, rebalancer.handle(GroupChanged(10, left)))
    request = asked(rebalancer)
    assert request.request.excluded_ranks == (3,)


def test_plans_keep_experts_on_two_ranks_as_far_as_slots_go():
    rebalancer = make(TWICE, min_replicas=2)
    assert asked(rebalancer).request.min_replicas == 2
    lost, _ = TWICE.without_ranks([3])
    run_rounds(rebalancer, rebalancer.handle(GroupChanged(1000, lost)))
    assert (num_ranks_of(rebalancer.placement) >= 2).all()
    (request,) = rebalancer.handle(PlanNow(1001))
    assert request.request.min_replicas == 2  # 18 slots for 8 experts
    assert asked(make(min_replicas=2)).request.min_replicas == 1  # 12 slots for 8 experts


def test_a_person_gets_a_plan_without_a_trigger():
    rebalancer = make(trigger=0.0)
    with pytest.raises(PlacementError, match="no load"):
        rebalancer.handle(PlanNow(5))
    for index in range(3):
        assert rebalancer.handle(window(index)) == ()
    (request,) = rebalancer.handle(PlanNow(301))
    assert isinstance(request, RequestPlan)
    assert request.layer_rows == (0, 1, 2)
    with pytest.raises(PlacementError, match="plan is being made"):
        rebalancer.handle(PlanNow(302))
    actions = rebalancer.handle(PlanReady(303, request.request_id, plan_for(request)))
    with pytest.raises(PlacementError, match="move is under way"):
        rebalancer.handle(PlanNow(304))
    run_rounds(rebalancer, actions)
    assert kinds(rebalancer)[-3:] == ["plan", "move", "done"]


def test_a_person_places_experts_at_any_cost_and_the_gate_keeps_that_placement():
    rebalancer = make(trigger=0.0)
    rebalancer.cost.transfer_s = 1e9
    table = np.roll(START.physical_to_logical, 3, axis=1).tolist()
    run_rounds(rebalancer, rebalancer.handle(PlaceAt(7, table)))
    assert rebalancer.placement.physical_to_logical.tolist() == table
    assert kinds(rebalancer) == ["manual", "done"]
    for index in range(1, 30):
        assert rebalancer.handle(window(index)) == ()  # however it serves: nothing reverts it
    assert rebalancer.handle(PlaceAt(5000, table)) == ()  # it is there already


def test_a_placement_that_does_not_fit_is_refused_with_the_reason():
    rebalancer = make()
    table = START.physical_to_logical.tolist()
    with pytest.raises(PlacementError, match="2 layers of"):
        rebalancer.handle(PlaceAt(1, table[:2]))
    with pytest.raises(PlacementError, match=r"layers of \[11, 12\] slots"):
        rebalancer.handle(PlaceAt(1, [table[0][:-1], *table[1:]]))
    with pytest.raises(PlacementError, match="expert 7 of row 1"):
        rebalancer.handle(PlaceAt(1, [table[0], [0 if e == 7 else e for e in table[1]], table[2]]))
    with pytest.raises(PlacementError, match="holds expert 8"):
        rebalancer.handle(PlaceAt(1, [[8] * 12, *table[1:]]))
    left, _ = TWICE.without_ranks([3])
    rebalancer = make(TWICE)
    rebalancer.handle(GroupChanged(10, left))
    with pytest.raises(PlacementError, match=r"ranks \[3\] take no part"):
        rebalancer.handle(PlaceAt(11, TWICE.physical_to_logical.tolist()))
    rebalancer.handle(SwitchOff(10, "for this test"))
    without_seven = np.where(left.physical_to_logical == 7, 6, left.physical_to_logical)
    with pytest.raises(PlacementError, match="expert 7 of row 0"):
        rebalancer.handle(PlaceAt(11, without_seven.tolist()))
    assert rebalancer.state == "off", "a refused command changes nothing"


def test_three_failures_in_a_row_switch_it_off_until_a_person_comes():
    rebalancer = make()
    step = 0
    for _ in range(3):
        actions = ()
        while not actions:
            actions = rebalancer.handle(window(step))
            step += 1
        rebalancer.handle(PlanFailed(step * STEPS, actions[0].request_id, "killed by SIGKILL"))
    assert rebalancer.state == "off"
    assert "3 plans or moves" in rebalancer.journal.alarm
    assert "SIGKILL" in rebalancer.journal.alarm
    for _ in range(300):
        assert rebalancer.handle(window(step)) == ()
        step += 1
    (request,) = rebalancer.handle(PlanNow(step * STEPS))
    assert rebalancer.state == "planning"
    assert rebalancer.journal.alarm == ""
    assert rebalancer.handle(
        PlanReady(step * STEPS, request.request_id, plan_for(request))
    )  # its layers are free again


def test_a_success_between_failures_keeps_it_on():
    rebalancer = make(cooldown_windows=1)
    step = 0
    for turn in range(6):
        actions = ()
        load = SKEWED if turn % 2 else SKEWED[:, ::-1]
        while not actions:
            actions = rebalancer.handle(window(step, load))
            step += 1
            assert step < 500
            if actions and not isinstance(actions[0], RequestPlan):
                run_rounds(rebalancer, actions)
                actions = ()
        if turn % 2:
            run_rounds(
                rebalancer, rebalancer.handle(PlanReady(step * STEPS, actions[0].request_id, plan_for(actions[0])))
            )
        else:
            rebalancer.handle(PlanFailed(step * STEPS, actions[0].request_id, "killed"))
    assert rebalancer.journal.alarm == ""
    assert kinds(rebalancer).count("failed") == 3


def test_switched_off_in_a_move_it_ends_with_the_running_round():
    rebalancer = make()
    request = asked(rebalancer)
    (first,) = rebalancer.handle(PlanReady(300, request.request_id, plan_for(request)))
    assert rebalancer.handle(SwitchOff(301, "no progress")) == ()
    assert rebalancer.state == "moving"  # the ranks may still activate it
    assert rebalancer.handle(RoundActivated(302, first.version)) == ()
    assert rebalancer.state == "off"
    assert rebalancer.placement.version == first.version
    assert kinds(rebalancer)[-2:] == ["off", "failed"]


def test_switched_off_while_planning_a_late_plan_is_dropped():
    rebalancer = make()
    request = asked(rebalancer)
    rebalancer.handle(SwitchOff(301, "no progress"))
    assert rebalancer.handle(PlanReady(302, request.request_id, plan_for(request))) == ()
    assert rebalancer.state == "off"


def test_decisions_since_a_number_are_those_after_it():
    rebalancer = make()
    asked(rebalancer)
    new, number = rebalancer.journal.since(0)
    assert [decision.kind for decision in new] == ["plan"]
    assert rebalancer.journal.since(number) == ([], number)
    rebalancer.handle(SwitchOff(301, "no progress"))
    assert [decision.kind for decision in rebalancer.journal.since(number)[0]] == ["off"]
