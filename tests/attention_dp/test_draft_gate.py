"""How many drafts are worth their rows, when to look for some, and when the model's layer runs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.draft_gate import (
    DecodeStep,
    DraftGate,
    StepCosts,
    best_lengths,
    expected_right,
)


def test_costs_are_multiples_of_steps_nearby_without_drafts_and_lines_between_them():
    costs = StepCosts()
    assert costs.of(4, 2) == [1.0, 1.0625, 1.125], "nothing was seen: a draft is cheap, so that it is tried"
    costs.add(4, 3, 9.0)
    assert costs.of(4, 2) == [1.0, 1.0625, 1.125], "nothing to compare with was seen"
    for seconds in (1.0, 100.0):  # on a machine that is slower later, for example
        for _ in range(60):
            costs.add(4, 0, seconds)
            costs.add(4, 2, 1.5 * seconds)
            costs.add(4, 6, 3.5 * seconds)
        assert costs.of(4, 8) == pytest.approx(
            [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 1 + 2.5 * 7 / 6, 1 + 2.5 * 8 / 6], rel=0.05
        )
    costs.add(4, 2, 10_000.0)
    assert costs.of(4, 2)[2] == pytest.approx(1.65, rel=0.05), "a step that waited for something else counts little"
    assert costs.of(9, 2) == pytest.approx([1, 1 + 0.25 / 9, 1 + 0.5 / 9]), "many more decodes have other costs"


def test_the_time_of_a_step_without_drafts_is_measured_anew_now_and_then():
    costs = StepCosts()
    assert not costs.is_fresh(1)
    costs.add(1, 0, 1.0)
    for _ in range(15):
        assert costs.is_fresh(1)
        costs.add(1, 2, 1.0)
    costs.add(1, 2, 1.0)
    assert not costs.is_fresh(1)


@settings(max_examples=60, deadline=None)
@given(
    chances=st.lists(st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=3),
    most=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    extra=st.integers(0, 2),
    row_s=st.sampled_from([0.0, 0.1, 0.4, 2.0]),
    num_rows=st.integers(0, 9),
)
def test_the_chosen_lengths_give_the_most_tokens_per_second(chances, most, extra, row_s, num_rows):
    num_decodes, most = len(chances) + extra, most[: len(chances)]
    multiples = [1 + row_s * drafts for drafts in range(num_rows + 1)]

    def rate(lengths) -> float:
        gained = sum(chance**i for chance, each in zip(chances, lengths, strict=True) for i in range(1, each + 1))
        return (num_decodes + gained) / multiples[sum(lengths)]

    chosen = best_lengths(num_decodes, chances, most, multiples)
    assert all(0 <= length <= limit for length, limit in zip(chosen, most, strict=True))
    assert sum(chosen) <= num_rows
    every = itertools.product(*(range(limit + 1) for limit in most))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= num_rows)
    assert rate(chosen) >= best / 1.1, "but for what is taken to be noise"
    assert any(chosen) or best < 1.1001 * num_decodes


def test_of_drafts_the_first_wrong_one_ends_those_that_count():
    for chance, num in itertools.product((0.0, 0.3, 0.9, 1.0), (0, 1, 4)):
        assert expected_right(chance, num) == pytest.approx(sum(chance**i for i in range(1, num + 1)))


class World:
    """Decode steps of a machine on which a plain step takes 1 s, a look look_s, and each draft row_s.

    Every look finds 4 drafts of each request, each right where those before it are, by `right` in turn.
    """

    def __init__(self, gate: DraftGate, look_s: float, row_s: float, right: list[bool], chance: float, num: int = 4):
        self.gate, self.look_s, self.row_s, self.right, self.chance = gate, look_s, row_s, right, chance
        self.num = num
        self.seconds = self.tokens = 0.0
        self.verified: list[int] = []

    def run(self, num_steps: int, has_new_every: int = 10**9) -> None:
        gate, num = self.gate, self.num
        for number in range(num_steps):
            seconds, lengths, tokens = 1.0, [0] * num, num
            looked = gate.is_due(number % has_new_every == 0)
            if looked:
                seconds += self.look_s
                lengths = gate.lengths(num, [self.chance] * num, [4] * num, 4 * num)
            for length in lengths:
                for _ in range(length):
                    self.right.append(self.right.pop(0))
                    if not self.right[-1]:
                        break
                    tokens += 1
            seconds += self.row_s * sum(lengths)
            if gate.measures:
                gate.ended(DecodeStep(num, sum(lengths), tokens, seconds, self.look_s if looked else 0.0))
            self.seconds += seconds
            self.tokens += tokens / num
            self.verified.append(sum(lengths))


@pytest.mark.parametrize("look_s", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("row_s", [0.02, 0.1, 0.6])
@pytest.mark.parametrize(
    ("right", "chance"), [([True], 0.98), ([True, True, False], 0.67), ([True, False], 0.5), ([False], 0.05)], ids=str
)
def test_drafts_never_cost_much_whatever_rows_and_looks_take_and_however_often_they_are_right(
    right, chance, row_s, look_s
):
    world = World(DraftGate(), look_s, row_s, list(right), chance)
    world.run(4000, has_new_every=100)
    assert world.tokens / world.seconds > 0.97


def test_looks_that_take_more_than_drafts_save_are_left_out():
    """A tenth more tokens are promised, but each look takes a fifth of a step."""
    world = World(DraftGate(), look_s=0.2, row_s=0.1, right=[True, False, False, False], chance=0.5)
    world.run(2000)
    assert sum(map(bool, world.verified[-500:])) < 50


def test_drafts_that_pay_are_verified_in_nearly_every_step():
    world = World(DraftGate(), look_s=0.05, row_s=0.02, right=[True], chance=0.98)
    world.run(500)
    assert world.tokens / world.seconds > 2.5
    assert world.gate.saved_s == pytest.approx(world.tokens - world.seconds, rel=0.02)


def test_steps_that_have_no_room_for_drafts_save_nothing():
    gate = DraftGate()
    for number in range(50):
        assert gate.is_due(number == 0), "nobody has looked yet"
        gate.ended(DecodeStep(16, 0, 16, 1.0 + 0.3 * (number % 3)))
    assert gate.saved_s == 0


def test_requests_behind_others_without_luck_are_looked_at_later():
    """So that many short ones do not each pay for the reading of their prompt."""
    gate = DraftGate()
    world = World(gate, look_s=0.0, row_s=3.0, right=[False], chance=0.1)
    world.run(400, has_new_every=400)
    looks = []
    for number in range(64):
        looks.append(gate.is_due(number % 8 == 0))
        if looks[-1]:
            assert not any(gate.lengths(4, [0.1] * 4, [4] * 4, 16))
    assert sum(looks) <= 4


def test_a_decision_can_be_made_again_from_its_numbers():
    world = World(DraftGate(), look_s=0.05, row_s=0.1, right=[True, True, False], chance=0.7)
    decided = 0
    for _ in range(200):
        world.gate.decision = None
        world.run(1)
        if (decision := world.gate.decision) is not None:
            *inputs, lengths = decision
            assert best_lengths(*inputs) == lengths
            decided += any(lengths)
    assert decided > 50


def layer_steps(gate: DraftGate, num_steps: int, layer_s: float, is_right: bool) -> list[bool]:
    """Returns in which steps of one request the layer ran, that guesses one token. A row more takes a tenth."""
    ran = []
    for number in range(num_steps):
        runs, due = gate.wants_layer(has_prompt=number % 50 == 0), gate.is_due(number % 50 == 0)
        has_draft = bool(ran) and ran[-1]
        lengths = gate.lengths(1, [0.9 if is_right else 0.1], [int(has_draft)], 9) if due else [0]
        right = int(is_right) * lengths[0]
        seconds = 1.0 + 0.1 * lengths[0] + layer_s * runs
        if gate.measures:
            gate.ended(DecodeStep(1, lengths[0], 1 + right, seconds, 0.0, layer_s * runs, lengths[0], 1, right))
        ran.append(runs)
    return ran


def test_a_layer_that_saves_more_than_its_runs_take_goes_on():
    assert all(layer_steps(DraftGate(has_layer=True), 500, layer_s=0.2, is_right=True))


@pytest.mark.parametrize(("layer_s", "is_right"), [(0.2, False), (1.2, True)])
def test_a_layer_that_saves_less_rests_and_is_tried_again_rarely(layer_s, is_right):
    ran = layer_steps(DraftGate(has_layer=True), 10_000, layer_s, is_right)
    assert any(ran[:16])
    assert any(ran[100:])
    assert sum(ran) < 150
    assert not any(layer_steps(DraftGate(), 100, layer_s, is_right)), "a model without one runs none"
