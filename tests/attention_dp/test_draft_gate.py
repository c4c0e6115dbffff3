"""How many drafts are worth their rows, when to look for some, and when the model's layer runs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.draft_gate import Budget, DecodeStep, DraftGate, StepCosts, best_lengths


def chances_of(chances, most) -> list[list[float]]:
    """Returns what a gate is told of requests with so many drafts, each right with the chance of its request."""
    return [[chance**i for i in range(1, number + 1)] for chance, number in zip(chances, most, strict=True)]


NO_LAYER = 0.0, 0, 0, 0  # of DecodeStep: the model's layer did not run


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
        assert costs.of(4, 8) == pytest.approx([1, 1.25, 1.5, 2, 2.5, 3, 3.5, 3.5 + 1.25 / 6, 3.5 + 2.5 / 6], rel=0.05)
    costs.add(4, 2, 10_000.0)
    assert costs.of(4, 2)[2] == pytest.approx(1.65, rel=0.05), "a step that waited for something else counts little"
    assert costs.of(9, 2) == pytest.approx([1, 1 + 0.25 / 9, 1 + 0.5 / 9]), "many more decodes have other costs"


def test_the_time_of_a_step_without_drafts_is_measured_anew_now_and_then():
    costs = StepCosts()
    assert not costs.is_fresh(1)
    costs.add(1, 0, 1.0)
    for _ in range(31):
        assert costs.is_fresh(1)
        costs.add(1, 2, 1.0)
    costs.add(1, 2, 1.0)
    assert not costs.is_fresh(1)


@settings(max_examples=60, deadline=None)
@given(
    chances=st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=3),
    most=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    extra=st.integers(0, 2),
    row_s=st.sampled_from([0.0, 0.1, 0.4, 2.0]),
    num_rows=st.integers(0, 9),
)
def test_the_chosen_lengths_give_the_most_tokens_per_second(chances, most, extra, row_s, num_rows):
    num_decodes, most = len(chances) + extra, most[: len(chances)]
    multiples = [1 + row_s * number for number in range(num_rows + 1)]

    def rate(lengths) -> float:
        gained = sum(chance**i for chance, each in zip(chances, lengths, strict=True) for i in range(1, each + 1))
        return (num_decodes + gained) / multiples[sum(lengths)]

    chosen = best_lengths(num_decodes, chances_of(chances, most), multiples)
    assert all(0 <= length <= limit for length, limit in zip(chosen, most, strict=True))
    assert sum(chosen) <= num_rows
    every = itertools.product(*(range(limit + 1) for limit in most))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= num_rows)
    assert rate(chosen) >= best / 1.1001, "but for what is taken to be noise"
    assert any(chosen) or best < 1.1001 * num_decodes


def test_a_budget_is_a_share_of_the_time_of_which_little_is_kept():
    budget = Budget(share=0.01, lent=3, most=4)
    budget.spend(5)
    assert budget.left_s <= 0, "nothing is lent before a step was seen"
    budget.passed(1.0, plain_s=2.0)
    assert budget.left_s == 6
    budget.spend(7)
    assert budget.left_s <= 0
    for _ in range(150):
        budget.passed(1.0, plain_s=2.0)
    assert budget.left_s == pytest.approx(0.5)
    budget.spend(-9)
    budget.passed(1.0, plain_s=2.0)
    assert budget.left_s == 8, "gains are kept, too"


class World:
    """Decode steps of a machine on which a plain step takes 1 s, a look look_s, and each draft row_s.

    A look finds `most` drafts of each request, each right where those before it are, by `right` in turn.
    noise: factors of the times of steps, in turn;  gap: steps in which looks find none, behind each in which they do
    """

    def __init__(
        self,
        gate: DraftGate,
        look_s: float,
        row_s: float,
        right: list[bool],
        chance: float,
        noise=(1.0,),
        most: int = 4,
        gap: int = 0,
    ):
        self.gate, self.look_s, self.row_s, self.right, self.chance = gate, look_s, row_s, right, chance
        self.num, self.most, self.gap = 4, most, gap
        self.seconds = self.tokens = 0.0
        self.verified: list[int] = []
        self.num_looks = 0
        self._noise = itertools.cycle(noise)

    def run(self, num_steps: int) -> None:
        gate, num = self.gate, self.num
        for number in range(num_steps):
            seconds, lengths, tokens, factor = 1.0, [0] * num, num, next(self._noise)
            looked = gate.is_due
            if looked:
                self.num_looks += 1
                seconds += self.look_s
                if number % (self.gap + 1):
                    gate.found_none()
                else:
                    lengths = gate.lengths(num, chances_of([self.chance] * num, [self.most] * num), self.most * num)
                gate.looked(self.look_s * factor)
            for length in lengths:
                for _ in range(length):
                    self.right.append(self.right.pop(0))
                    if not self.right[-1]:
                        break
                    tokens += 1
            seconds += self.row_s * sum(lengths)
            look_s = self.look_s * factor if looked else 0.0
            gate.ended(DecodeStep(num, sum(lengths), tokens, seconds * factor, look_s, *NO_LAYER))
            self.seconds += seconds
            self.tokens += tokens / num
            self.verified.append(sum(lengths))


@pytest.mark.parametrize("noise", [(1.0,), (0.7, 1.0, 1.6, 0.9, 1.1, 0.8, 3.0)], ids=["quiet", "loud"])
@pytest.mark.parametrize("look_s", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("row_s", [0.02, 0.1, 0.6])
@pytest.mark.parametrize(
    ("right", "chance"),
    [([True], 0.98), ([True, True, False], 0.67), ([True, False], 0.5), ([False], 0.05), ([False], 0.98)],
    ids=str,
)  # fmt: skip
def test_drafts_never_cost_much_whatever_is_promised_and_whatever_rows_and_looks_take(
    right, chance, row_s, look_s, noise
):
    world = World(DraftGate(), look_s, row_s, list(right), chance, noise)
    world.run(2000)
    assert world.tokens / world.seconds > 0.98


@pytest.mark.parametrize("look_s", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("gap", [1, 3, 6, 7])
@pytest.mark.parametrize("row_s", [0.08, 0.12, 0.15])
def test_looks_between_drafts_that_pay_cost_no_more_than_these_save(row_s, gap, look_s):
    """Drafts are right as often as was promised, but come rarely."""
    world = World(DraftGate(), look_s, row_s, [True] * 9 + [False], 0.9, most=1, gap=gap)
    world.run(4000)
    assert world.tokens / world.seconds > 0.98


def test_a_look_takes_what_it_took_out_of_its_budget_but_waits_of_a_second_are_not_its_own():
    for look_s, num_steps in ((3.5, 84), (1000.0, 167)):  # of three steps that were lent: 0.5 / 0.006 and 1 / 0.006
        gate = DraftGate()
        plain = DecodeStep(1, 0, 1, 1.0, 0.0, *NO_LAYER)
        for _ in range(3):
            gate.ended(plain)
        gate.looked(look_s)
        for _ in range(num_steps - 2):
            gate.ended(plain)
        assert not gate.is_due
        for _ in range(4):
            gate.ended(plain)
        assert gate.is_due


def test_of_steps_of_which_one_is_measured_only_that_one_has_waited():
    gate = DraftGate()
    for _ in range(3):
        gate.ended(DecodeStep(1, 0, 1, 1.0, 0.0, *NO_LAYER))
    gate.looked(3.3)
    gate.ended(DecodeStep(1, 0, 1, 2.0, 0.0, *NO_LAYER), num_like=32)
    assert not gate.is_due, "33 s give 0.2 s, and 64 s would give 0.38 s"


@pytest.mark.parametrize("seconds", [0.3, 0.0, -1.0])
def test_a_step_that_took_no_longer_than_its_look_and_the_layer_says_nothing(seconds):
    gate = DraftGate(has_layer=True)
    for number in range(3000):
        gate.ended(DecodeStep(1, 0, 1, 1.2, 0.1, 0.2, 0, 1, 0))
        if number % 3:
            gate.ended(DecodeStep(1, number % 2, 1, seconds, 0.1, 0.2, 0, 1, 0))
    assert gate.costs.plain_s(1) == pytest.approx(0.9)
    assert gate.saved_s == pytest.approx(-0.3 * 3000, rel=0.01)


def test_looks_that_take_more_than_drafts_save_are_left_out():
    """A tenth more tokens are promised, but each look takes a fifth of a step."""
    world = World(DraftGate(), look_s=0.2, row_s=0.1, right=[True, False, False, False], chance=0.5)
    world.run(2000)
    assert sum(map(bool, world.verified[-500:])) < 50


def test_looks_have_their_share_of_the_time_while_no_drafts_pay():
    for look_s, most in ((0.001, 165), (0.02, 137), (1.0, 15)):
        world = World(DraftGate(), look_s, row_s=3.0, right=[False], chance=0.05)
        world.run(2000)
        assert 0.9 * most < world.num_looks <= most


def test_looks_that_find_nothing_to_verify_are_rare_but_never_far_apart():
    world = World(DraftGate(), look_s=0.001, row_s=3.0, right=[False], chance=0.05)
    world.run(100)
    assert world.num_looks <= 40, "what is lent is spent"
    for _ in range(20):
        before = world.num_looks
        world.run(16)
        assert 0 < world.num_looks - before <= 2


def test_one_step_that_waits_ends_no_drafts_that_pay_but_several_in_a_row_do():
    for num_waits, is_rare in ((1, False), (4, True)):
        noise = [1.0] * 10 + [40.0] * num_waits
        world = World(DraftGate(), look_s=0.01, row_s=0.1, right=[True], chance=0.98, noise=noise)
        world.run(1400)
        assert (sum(map(bool, world.verified)) < 700) == is_rare


def test_steps_with_drafts_that_stand_alone_are_counted_for_what_drafts_cost():
    gate = DraftGate()
    for _ in range(20):
        gate.ended(DecodeStep(1, 0, 1, 1.0, 0.0, *NO_LAYER))
        gate.ended(DecodeStep(1, 2, 3, 5.0, 0.1, *NO_LAYER))
    assert gate.costs.of(1, 2)[2] > 4


def test_drafts_and_looks_beside_prompts_have_the_prices_of_other_steps():
    def gate_that_pays() -> DraftGate:
        world = World(DraftGate(), look_s=0.01, row_s=0.1, right=[True], chance=0.98)
        world.run(50)
        assert world.gate.pays
        return world.gate

    for num_drafts, num_right, look_s in ((16, 0, 0.01), (0, 0, 0.5)):
        gate = gate_that_pays()
        for _ in range(40):
            gate.ran_beside(4, num_drafts, num_right, look_s)
        gate.ended(DecodeStep(4, 0, 4, 1.0, 0.01, *NO_LAYER))
        assert not gate.pays, "they have lost what others had saved"
    gate = gate_that_pays()
    for _ in range(40):
        gate.ran_beside(4, 16, 16, 0.01)
    gate.ended(DecodeStep(4, 0, 4, 1.0, 0.01, *NO_LAYER))
    assert gate.pays


def test_drafts_that_pay_are_verified_in_nearly_every_step():
    world = World(DraftGate(), look_s=0.05, row_s=0.02, right=[True], chance=0.98)
    world.run(500)
    assert world.tokens / world.seconds > 2.7
    assert world.gate.saved_s == pytest.approx(world.tokens - world.seconds, rel=0.02)


def test_drafts_that_are_worse_than_promised_end_at_once_and_are_tried_rarely():
    """Rows are cheap, and the text seems to repeat itself, but no draft is right."""
    world = World(DraftGate(), look_s=0.01, row_s=0.1, right=[False], chance=0.9)
    world.run(1000)
    assert 0 < sum(map(bool, world.verified[:20])) < 8
    assert sum(map(bool, world.verified[20:])) <= 4


def test_rows_that_become_cheap_are_noticed():
    world = World(DraftGate(), look_s=0.01, row_s=0.3, right=[True], chance=0.98)
    world.run(2000)
    assert not any(world.verified[-32:])
    world.row_s = 0.02
    world.run(3000)
    assert sum(map(bool, world.verified[-100:])) > 90


def test_steps_that_have_no_room_for_drafts_save_nothing():
    gate = DraftGate()
    for number in range(50):
        gate.ended(DecodeStep(16, 0, 16, 1.0 + 0.3 * (number % 3), 0.0, *NO_LAYER))
    assert gate.saved_s == 0


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
        runs, due = gate.wants_layer(has_prompt=number % 50 == 0), gate.is_due
        has_draft = bool(ran) and ran[-1]
        lengths = gate.lengths(1, chances_of([0.9 if is_right else 0.1], [int(has_draft)]), 9) if due else [0]
        right = int(is_right) * lengths[0]
        seconds = 1.0 + 0.1 * lengths[0] + layer_s * runs
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
    lost_s = layer_s + 0.1 - 1 if is_right else layer_s
    assert sum(ran) * lost_s < 8 + 0.006 * 10_000
    assert not any(layer_steps(DraftGate(), 100, layer_s, is_right)), "a model without one runs none"


def test_what_the_layer_takes_in_steps_with_prompts_counts():
    gate = DraftGate(has_layer=True)
    for _ in range(3):
        gate.ended(DecodeStep(1, 0, 1, 1.0, 0.0, *NO_LAYER))
    for number in range(20):
        assert gate.wants_layer(has_prompt=True) == (number < 16), "eight steps are lent"
        gate.layer_ran(0.5)


def test_what_the_layer_takes_in_steps_with_prompts_is_borne_by_what_its_drafts_save():
    gate = DraftGate(has_layer=True)
    layer_steps(gate, 100, layer_s=0.2, is_right=True)
    for _ in range(50):
        gate.layer_ran(7.0)
        assert all(layer_steps(gate, 64, layer_s=0.2, is_right=True))
