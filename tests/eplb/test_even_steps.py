"""Steps that a server split evenly by its own choice, as the events of its trace tell."""

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.even_steps import SPLIT_CHANGED, EvenSteps
from moe_serve.eplb.replay.score import Scorer
from moe_serve.errors import TraceError
from moe_serve.topology import Topology


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
