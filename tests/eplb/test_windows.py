"""Prefill and decode of one trace: the windows of one of them, and a placement that is good in each."""

import json

import numpy as np
import pytest

from moe_serve.eplb.files.windows import folded, load_by_phase, of_phase, phase_weights
from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace, plan_to_json, plan_to_table
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology

# Prefill likes experts 0 and 1, decode 2 and 3: on APART their sum is even, and neither of them is.
PREFILL, DECODE = np.array([[6, 6, 1, 1]]), np.array([[1, 1, 6, 6]])
IDLE = np.zeros((1, 4), dtype=np.int64)
APART = Placement(np.array([[0, 1, 2, 3]]), 4, 2)


def a_trace(*records):
    """records: (phase, tokens) or (phase, tokens, step_time_s), of ten steps each"""
    return LoadTrace.of(
        [LoadRecord(10 * i, 10, phase, tokens, step_time_s=time[0] if time else None)
         for i, (phase, tokens, *time) in enumerate(records)],
        source="t.npz",
    )  # fmt: skip


TRACE = a_trace(("prefill", PREFILL), ("decode", DECODE), ("decode", IDLE), ("prefill", PREFILL), ("decode", DECODE))


def test_one_phase_of_a_trace_can_be_read_again_and_folded():
    decode = of_phase(TRACE, "decode")
    for _ in range(2):
        assert [(record.first_step, record.phase) for record in decode] == [(10, "decode"), (40, "decode")]
    (window,) = folded(decode, 20)
    assert (window.num_steps, window.tokens.tolist()) == (20, (2 * DECODE).tolist())
    assert decode.source == "t.npz, decode windows"


@pytest.mark.parametrize(
    "trace, phase, says",
    [
        (TRACE, "mixed", "t.npz has no mixed windows with tokens, but 2 prefill windows and 2 decode windows"),
        (a_trace(("mixed", IDLE)), "mixed", "but no windows"),
    ],
)
def test_a_phase_that_the_trace_has_not_is_refused_with_those_it_has(trace, phase, says):
    with pytest.raises(TraceError, match=says):
        list(of_phase(trace, phase))


def test_an_unknown_phase_is_refused_at_once():
    with pytest.raises(ConfigError, match="phase is 'warm-up'; give one of prefill, decode, mixed"):
        of_phase(TRACE, "warm-up")


def test_a_plan_of_one_phase_is_a_plan_of_its_windows():
    settings = TracePlanSettings(Topology(1, 2), 4, "greedy")
    only = [LoadRecord(0, 1, "decode", 2 * DECODE)]
    made = [plan_from_trace(trace, settings) for trace in (of_phase(TRACE, "decode"), LoadTrace.of(only))]
    assert made[0].num_windows == 2
    assert made[0].tokens.tolist() == made[1].tokens.tolist()
    assert np.array_equal(*(each.plan.placement.physical_to_logical for each in made))


def worse(placement):
    return min(float(balancedness(rank_load(load, placement))[0]) for load in (PREFILL, DECODE))


def test_a_plan_by_phase_is_good_in_each_where_one_for_the_sum_is_good_in_neither():
    settings = TracePlanSettings(Topology(1, 2), 4, "series", current=APART, by_phase=True)
    made = plan_from_trace(TRACE, settings)
    summed = plan_from_trace(TRACE, TracePlanSettings(Topology(1, 2), 4, "incremental", current=APART))
    assert worse(summed.plan.placement) == pytest.approx(7 / 12)
    assert worse(made.plan.placement) == 1.0
    content = plan_to_json(made)
    assert content["windows"] == 4
    assert content["phases"]["decode"] == {
        "windows": 2, "steps": 20, "before": pytest.approx(7 / 12), "balancedness": 1.0
    }  # fmt: skip
    assert json.loads(json.dumps(content)) == content
    assert "decode, plan" in plan_to_table(made)
    assert "prefill, in use" in plan_to_table(made)
    assert plan_to_json(summed)["phases"] == {}


def test_phases_weigh_by_their_time_or_where_it_is_not_known_by_their_steps():
    timed = (("prefill", PREFILL, 0.3), ("decode", DECODE, 0.05), ("decode", DECODE, 0.05))
    assert phase_weights(load_by_phase(a_trace(*timed))) == pytest.approx((0.75, 0.25))
    assert phase_weights(load_by_phase(a_trace(*timed, ("decode", DECODE)))) == pytest.approx((1 / 4, 3 / 4))
    assert [(load.phase, load.num_windows) for load in load_by_phase(TRACE, last=3)] == [("prefill", 1), ("decode", 2)]
    no_steps = LoadTrace.of([LoadRecord(0, 0, "prefill", PREFILL), LoadRecord(0, 0, "mixed", DECODE)])
    assert phase_weights(load_by_phase(no_steps)) == (0.5, 0.5)


def test_one_phase_alone_or_another_policy_is_refused_by_phase():
    settings = TracePlanSettings(Topology(1, 2), 4, "series", by_phase=True)
    with pytest.raises(TraceError, match="has 2 decode windows, and a plan by phase needs windows of two phases"):
        plan_from_trace(of_phase(TRACE, "decode"), settings)
    with pytest.raises(ConfigError, match="policy refined plans for one load; use --by-phase with --policy series"):
        plan_from_trace(TRACE, TracePlanSettings(Topology(1, 2), 4, by_phase=True))


def test_a_first_plan_by_phase_needs_no_placement():
    made = plan_from_trace(TRACE, TracePlanSettings(Topology(1, 2), 4, "series", by_phase=True))
    assert worse(made.plan.placement) == 1.0
