"""The leader's choice between the exact and the even split, on simulated machines."""

import random
import re
from collections.abc import Callable, Iterable

import pytest

from moe_serve.engine.balancing import split_choice
from moe_serve.engine.balancing.split_choice import (
    JUDGED_AT,
    TRIAL_ALLOWANCE,
    TRIAL_SHARE,
    SplitChoice,
    median_interval,
    size_class,
)
from moe_serve.engine.step.plan import PHASES, MovePlan, RankState, StepPlan, StepSettings, plan_step

PLAN = plan_step([RankState(0, 0, decode_tokens=4)], StepSettings(64))


class Machine:
    """A leader's steps: each plan follows the choice that was made one step before.

    gain: what the exact split saves of a step's time;  noise: relative deviation of a step's time
    """

    def __init__(self, gain: float, noise: float = 0.05, seed: int = 0):
        self.choice = SplitChoice("exact", has_replicas=True)
        self.gain, self.noise = gain, noise
        self.plans: list[StepPlan] = []
        self._draw = random.Random(seed)
        self._shown = 0  # what the leader's row says in the next exchange

    def run(self, steps: Iterable[tuple[str, int]], slowness: Callable[[int], float] = lambda step: 1.0) -> None:
        for phase, max_tokens in steps:
            evenly = bool(self._shown >> PHASES.index(phase) & 1)
            plan = PLAN._replace(step=len(self.plans), phase=phase, max_tokens=max_tokens, split_evenly=evenly)
            self._shown = self.choice.even_phases
            usual_s = 1e-3 * (5 + 0.1 * max_tokens) * slowness(plan.step)
            step_s = usual_s * (1 if evenly else 1 - self.gain) * self._draw.gauss(1, self.noise)
            self.plans.append(plan)
            self.choice.observe(plan, step_s * (10 if self._draw.random() < 0.02 else 1))  # a stall now and then

    def split_of(self, phase: str) -> str:
        return str(self.choice.describe()["phases"][phase]["split"])


def decode(num_steps: int) -> list[tuple[str, int]]:
    return [("decode", 16)] * num_steps


@pytest.mark.parametrize(("gain", "split"), [(-0.05, "even"), (0.05, "exact"), (0.0, "even")])
@pytest.mark.parametrize("seed", range(5))
def test_the_exact_split_serves_on_only_where_it_saves_time(gain: float, split: str, seed: int) -> None:
    machine = Machine(gain, seed=seed)
    machine.run(decode(3000))
    assert machine.split_of("decode") == split
    assert machine.plans[-1].split_evenly == (split == "even")
    told = machine.choice.describe()["phases"]["decode"]["gain"]
    assert told["low"] <= told["median"] <= told["high"]
    assert told["low"] - 0.02 < gain < told["high"] + 0.02


def test_the_steps_begin_with_the_configured_split() -> None:
    machine = Machine(-0.05)
    machine.run(decode(40))
    assert not any(plan.split_evenly for plan in machine.plans)


def test_a_machine_that_drifts_and_steps_of_many_sizes_do_not_decide() -> None:
    machine, draw = Machine(-0.06, noise=0.03), random.Random(1)
    sizes = [("prefill", draw.choice([50, 100, 200, 400, 800])) for _ in range(8000)]
    machine.run(sizes, slowness=lambda step: 1 + step / 4000)
    assert machine.split_of("prefill") == "even"
    machine = Machine(0.06, noise=0.03)
    machine.run(sizes, slowness=lambda step: 3 - step / 4000)
    assert machine.split_of("prefill") == "exact"


def test_each_phase_has_its_own_choice() -> None:
    machine = Machine(-0.05)
    machine.run(step for _ in range(1500) for step in (("decode", 8), ("mixed", 40)))
    assert machine.choice.even_phases == 0b101, "decode and mixed"
    machine.gain = 0.05
    machine.run([("prefill", 64)] * 1500)
    assert machine.split_of("prefill") == "exact"
    assert machine.choice.even_phases == 0b101


@pytest.mark.parametrize("gain", [-0.05, 0.0, 0.05])
def test_few_steps_run_the_split_that_is_not_in_use(gain: float) -> None:
    machine = Machine(gain)
    for _ in range(40):  # a placement that changes again and again
        machine.run(decode(250))
        machine.choice.placement_changed()
        told = machine.choice.describe()["phases"]["decode"]
        assert told["num_steps"] == len(machine.plans)
        assert told["num_trial_steps"] <= TRIAL_ALLOWANCE + TRIAL_SHARE * len(machine.plans)


def test_it_measures_again_after_the_placement_changed() -> None:
    machine = Machine(-0.05)
    machine.run(decode(2000))
    assert machine.split_of("decode") == "even"
    machine.gain = 0.05
    machine.run(decode(20_000))
    assert machine.split_of("decode") == "even", "nothing says that it has changed"
    machine.choice.placement_changed()
    machine.run(decode(2000))
    assert machine.split_of("decode") == "exact"


def test_it_measures_again_after_a_long_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_choice, "RETRY_STEPS", 3000)
    machine = Machine(0.05)
    machine.run(decode(2000))
    machine.gain = -0.05
    machine.run(decode(5000))
    assert machine.split_of("decode") == "even"


def test_a_change_of_the_placement_drops_what_a_trial_has_measured() -> None:
    machine = Machine(-0.2, noise=0.01)
    machine.run(decode(64 + 16 * JUDGED_AT[0] - 16))
    machine.choice.placement_changed()
    machine.gain = 0.2
    machine.run(decode(1000))
    assert machine.split_of("decode") == "exact"
    assert machine.choice.describe()["phases"]["decode"]["gain"]["num_pairs"] == JUDGED_AT[0]


def test_steps_that_do_more_than_others_do_not_count() -> None:
    choice = SplitChoice("exact", has_replicas=True)
    draw = random.Random(0)
    for step in range(4000):
        evenly = bool(choice.even_phases & 1)
        plan = PLAN._replace(step=step, phase="decode", max_tokens=16, split_evenly=evenly)
        step_s = 0.01 * (1 if evenly else 0.95) * draw.gauss(1, 0.02)
        if evenly and step % 2:  # it seems as if the even split were quick
            plan, step_s = plan._replace(moves=MovePlan(activate=step)), step_s / 10
        choice.observe(plan, step_s)
    assert choice.describe()["phases"]["decode"]["split"] == "exact"


def test_it_says_once_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(split_choice.log, "info", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(split_choice, "RETRY_STEPS", 3000)
    machine = Machine(-0.1, noise=0.01)
    machine.run(decode(10_000))  # three trials with one result
    (line,) = lines
    assert re.fullmatch(
        r"decode: the exact split makes a step (9|10)\.\d% longer "
        r"\(gain -1\d\.\d% to -(9|10)\.\d%, 16 pairs of 8 steps\): batches are split evenly from now on",
        line,
    )
    assert machine.choice.describe()["phases"]["decode"]["num_trial_steps"] >= 3 * JUDGED_AT[0] * 8
    machine.gain = 0.1
    machine.run(decode(20_000))
    assert len(lines) == 2
    assert lines[1].endswith("the exact split serves from now on")


@pytest.mark.parametrize(("split", "has_replicas"), [("even", True), ("nearest", True), ("exact", False)])
def test_without_an_alternative_there_is_nothing_to_choose(split: str, has_replicas: bool) -> None:
    choice = SplitChoice(split, has_replicas)
    for step in range(500):
        choice.observe(PLAN._replace(step=step), 0.01)
        assert choice.even_phases == 0
    choice.placement_changed()
    assert choice.describe() == {"split": split, "phases": {}}


def test_a_rank_whose_choice_does_not_reach_the_ranks_waits() -> None:
    choice = SplitChoice("exact", has_replicas=True)
    for step in range(3000):  # another rank leads: its plan never splits evenly
        choice.observe(PLAN._replace(step=step, phase="decode"), 0.01)
    assert choice.describe()["phases"]["decode"] == {
        "split": "exact", "gain": None, "num_steps": 3000, "num_trial_steps": 0,
    }  # fmt: skip


def test_the_median_lies_in_its_interval_as_often_as_promised() -> None:
    draw = random.Random(0)
    for n, confidence in ((16, 0.99), (32, 0.99), (16, 0.9)):
        held = 0
        for _ in range(3000):
            low, high = median_interval([draw.expovariate(1.0) for _ in range(n)], confidence)
            held += low <= 0.6931 <= high
        assert confidence - 0.01 < held / 3000 < confidence + 0.08
    assert median_interval([3.0, 1.0, 2.0], 0.99) == (1.0, 3.0)
    assert median_interval([5.0], 0.99) == (5.0, 5.0)


def test_steps_of_like_size_are_compared() -> None:
    assert [size_class(size) for size in range(1, 10)] == list(range(1, 10))
    assert all(size_class(size) <= size_class(size + 1) for size in range(1, 5000))
    assert size_class(512) - size_class(256) == 4
