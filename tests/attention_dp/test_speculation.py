"""Where drafts come from, and how many of them are worth their rows."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.speculation import FORM, MTP, OWN, SHARED, Speculator, StepCosts, TextIndex, best_lengths

MIB = 2**20


def request(name: str, prompt: list[int], output: list[int] | None = None, salt: str = "") -> Request:
    return Request(name, 0, prompt, output or [], SamplingParams(100), seed=0, salt=salt)


def last_place(text: list[int]) -> int | None:
    """What TextIndex.find returns within one text, by looking at all places."""
    run = text[-3:]
    ends = [end for end in range(3, len(text)) if text[end - 3 : end] == run]
    return ends[-1] if ends and len(run) == 3 else None


@given(st.lists(st.integers(0, 2), max_size=40), st.data())
def test_a_run_is_found_where_it_came_last(tokens, data):
    index = TextIndex(MIB)
    text = index.begin()
    at = 0
    while at < len(tokens):
        end = at + data.draw(st.integers(1, len(tokens) - at))
        index.extend(text, "", tokens[at:end], enters=data.draw(st.booleans()))
        at = end
        wanted = last_place(tokens[:at])
        assert index.find(text, "") == (None if wanted is None else (text, wanted))


def test_texts_of_other_salts_are_not_found():
    index = TextIndex(MIB)
    first, second, third = (index.begin() for _ in range(3))
    index.extend(first, "mine", [1, 2, 3, 4, 5])
    index.extend(second, "yours", [1, 2, 3])
    index.extend(third, "mine", [1, 2, 3])
    assert index.find(second, "yours") is None
    assert index.find(third, "mine") == (first, 3)


def test_memory_is_bounded_and_the_oldest_texts_are_forgotten():
    draw = random.Random(0)
    index = TextIndex(120 * 2 * 1000)  # 1,000 runs in a generation
    texts = []
    for _ in range(40):
        number = index.begin()
        texts.append((number, [draw.randrange(2**20) for _ in range(200)]))
        index.extend(number, "", texts[-1][1])
        num_entries = sum(len(each) for generation in (index._young, index._old) for each in generation.values())
        assert num_entries <= 2000 + 200
    assert len(index._texts) <= 20
    assert index.text(texts[0][0]) is None
    probe = index.begin()
    index.extend(probe, "", texts[0][1][:3])
    assert index.find(probe, "") is None
    index.extend(probe, "", texts[-1][1][:3])
    assert index.find(probe, "") == (texts[-1][0], 3)


def test_a_request_drafts_what_followed_in_its_own_text_and_in_others():
    speculator = Speculator(4, MIB, shares_text=True, always=True)
    mine = request("a", [7, 8, 9, 10, 11, 12, 13], [7, 8, 9])
    assert speculator.draft([mine], 99) == [(10, 11, 12, 13)]
    speculator.verified(mine, 4, 4)
    mine.output_ids += [10, 11, 12, 13, 50]
    assert speculator.draft([mine], 99) == [()], "what follows 12, 13, 50 is not known"
    other = request("b", [5, 13, 7, 8], [9])
    assert speculator.draft([other], 99) == [(10, 11, 12, 13)]
    speculator.verified(other, 4, 1)
    other.output_ids += [10, 40]
    assert speculator.draft([other], 99) == [()]
    stranger = request("c", [5, 13, 7, 8], [9], salt="other")
    assert speculator.draft([stranger], 99) == [()]
    assert speculator.counters.num_drafts == {OWN: 4, SHARED: 4, FORM: 0, MTP: 0}
    assert speculator.counters.num_accepted == {OWN: 4, SHARED: 1, FORM: 0, MTP: 0}
    assert speculator.counters.totals()["num_speculative_steps"] == 2


def test_what_a_form_forces_is_drafted_before_what_text_suggests():
    forms = {"a": (20, 21, 22, 23, 24), "b": (30,), "c": ()}
    speculator = Speculator(4, MIB, shares_text=False, always=True, forced=lambda each: forms[each.request_id])
    params = SamplingParams(100, constraint=Constraint("regex", "x"))
    mine, plain, free = (Request(name, 0, [7, 8, 9, 10, 7, 8], [9], params, seed=0) for name in "abc")
    plain.params = SamplingParams(100)
    assert speculator.draft([mine, plain, free], 99) == [(20, 21, 22, 23), (10, 7, 8, 9), (10, 7, 8, 9)]
    speculator.verified(mine, 4, 3)
    assert speculator.counters.num_accepted == {OWN: 0, SHARED: 0, FORM: 3, MTP: 0}


def test_without_a_prefix_cache_requests_see_no_other_text():
    speculator = Speculator(4, MIB, shares_text=False, always=True)
    assert speculator.draft([request("a", [7, 8, 9, 10, 11, 12, 13], [7, 8, 9])], 99) == [(10, 11, 12, 13)]
    assert speculator.draft([request("b", [5, 13, 7, 8], [9])], 99) == [()]


def test_a_text_that_is_being_repeated_is_followed_past_runs_that_came_elsewhere_later():
    speculator = Speculator(3, MIB, shares_text=True, always=True)
    prompt = [1, 2, 3, 4, 5, 6, 90, 91, 3, 4, 5, 77, 78, 1, 2]
    mine = request("a", prompt, [3])
    assert speculator.draft([mine], 99) == [(4, 5, 6)]
    mine.output_ids += [4, 5]
    assert speculator.draft([mine], 99) == [(6, 90, 91)], "not 77, which came after the last 3, 4, 5"


def test_a_long_prompt_is_indexed_over_several_steps():
    speculator = Speculator(2, 64 * MIB, shares_text=True, always=True)
    long = request("a", [*range(9000), 5, 6], [7])
    assert speculator.draft([long], 99) == [()]
    assert speculator.draft([long], 99) == [(8, 9)]


def test_drafts_of_all_requests_have_no_more_rows_than_there_are():
    speculator = Speculator(8, MIB, shares_text=False, always=True)
    both = [request(name, [1, 2, 3, 4, 5, 6, 7, 1, 2], [3]) for name in "ab"]
    assert [len(each) for each in speculator.draft(both, 9)] == [7, 2]
    assert speculator.draft(both, 0) == [(), ()]


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


def steps(speculator: Speculator, mine: Request, row_s: float, num_tokens: int, is_right: bool) -> list[int]:
    """Returns how many drafts each step of one request verified, until it has so many tokens.

    Its text repeats the run 1, 2, 3 or counts up, so that drafts are always wrong, or right.
    """
    verified: list[int] = []
    while len(mine.output_ids) < num_tokens:
        drafts: tuple[int, ...] = ()
        if speculator.is_due(mine):
            (drafts,) = speculator.draft([mine], 99)
        speculator.costs.add(1, len(drafts), 1 + row_s * len(drafts))
        verified.append(len(drafts))
        if drafts:
            speculator.verified(mine, len(drafts), len(drafts) if is_right else 0)
        if is_right:
            mine.output_ids += [mine.output_ids[-1] + 1 + i for i in range(1 + len(drafts))]
        else:
            mine.output_ids += [900 + len(verified), 1, 2, 3]
    return verified


def test_drafts_that_are_always_wrong_are_given_up():
    mine = request("a", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    speculator = Speculator(4, MIB, shares_text=False)
    verified = steps(speculator, mine, 0.3, 8000, is_right=False)
    assert sum(map(bool, verified)) < 20
    assert not any(verified[100:])
    follower = speculator._followers[mine]
    assert follower.right[OWN] < 0.01 < 1 < follower.tried[OWN]


def test_drafts_that_are_right_are_verified_as_long_as_rows_cost_little():
    for row_s, is_worth_it in ((0.05, True), (1.5, False)):
        mine = request("a", [*range(1, 600), *range(1, 4)], [4])
        verified = steps(Speculator(4, MIB, shares_text=False), mine, row_s, 500, is_right=True)
        assert (len(verified) < 200) == is_worth_it
        assert sum(map(bool, verified)) < 12 or is_worth_it, "they are tried rarely"


def test_steps_between_looks_do_nothing_and_a_look_sees_what_would_have_been_right():
    speculator = Speculator(4, MIB, shares_text=False)
    mine = request("a", [*range(1, 600), *range(1, 4)], [4])
    steps(speculator, mine, 1.5, 400, is_right=True)
    follower = speculator._followers[mine]
    assert follower.right[OWN] / follower.tried[OWN] > 0.9, "most were never verified"
    num_drafts = speculator.counters.num_drafts[OWN]
    looks = 0
    while speculator.is_due(mine):
        speculator.draft([mine], 99)
        looks += 1
    assert looks <= 2, "each look at drafts that do not pay is followed by steps without"
    assert speculator.counters.num_drafts[OWN] == num_drafts


def test_rows_that_become_cheap_are_noticed():
    speculator = Speculator(4, 64 * MIB, shares_text=False)
    mine = request("a", [*range(1, 30_000), *range(1, 4)], [4])
    assert not any(steps(speculator, mine, 1.2, 2000, is_right=True)[-32:])
    verified = steps(speculator, mine, 0.05, 29_000, is_right=True)
    assert sum(map(bool, verified[-100:])) > 90


def test_a_request_that_has_left_is_forgotten():
    speculator = Speculator(4, MIB, shares_text=True)
    mine = request("a", [1, 2, 3, 4], [5])
    speculator.draft([mine], 99)
    speculator.end(mine)
    speculator.end(mine)
    assert not speculator._followers
