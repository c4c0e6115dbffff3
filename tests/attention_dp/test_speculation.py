"""Where drafts come from, and how many of them are worth their rows."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.speculation import OWN, SHARED, Speculator, StepCosts, TextIndex, best_lengths

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
        index.extend(text, "", tokens[at:end])
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
    assert speculator.counters.num_drafts == {OWN: 4, SHARED: 4}
    assert speculator.counters.num_accepted == {OWN: 4, SHARED: 1}
    assert speculator.counters.totals()["num_speculative_steps"] == 2


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


def test_costs_are_averages_and_lines_between_them():
    costs = StepCosts()
    assert costs.of(3) == 1.0, "nothing was seen"
    for rows, seconds in ((4, 1.0), (8, 3.0)):
        costs.add(rows, seconds)
    assert (costs.of(2), costs.of(4), costs.of(6), costs.of(8)) == (1.0, 1.0, 2.0, 3.0)
    assert 3.0 < costs.of(9) < 3.3, "a row more is tried"
    costs.add(4, 100.0)
    assert costs.of(4) == pytest.approx(1.1), "a step that waited for something else counts little"


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

    def step_s(rows: int) -> float:
        return 1 + row_s * (rows - num_decodes)

    def rate(lengths) -> float:
        gained = sum(chance**i for chance, each in zip(chances, lengths, strict=True) for i in range(1, each + 1))
        return (num_decodes + gained) / step_s(num_decodes + sum(lengths))

    chosen = best_lengths(num_decodes, chances, most, step_s, num_rows)
    assert all(0 <= length <= limit for length, limit in zip(chosen, most, strict=True))
    assert sum(chosen) <= num_rows
    every = itertools.product(*(range(limit + 1) for limit in most))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= num_rows)
    assert rate(chosen) >= best / 1.03, "but for what is taken to be noise"
    assert any(chosen) or best < 1.03 * num_decodes


def test_drafts_that_are_always_wrong_are_given_up_and_tried_again_rarely():
    speculator = Speculator(4, MIB, shares_text=False)
    mine = request("a", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    num_tried = 0
    for _ in range(2000):
        ((*drafts,),) = speculator.draft([mine], 99)
        speculator.costs.add(1 + len(drafts), 1 + 0.3 * len(drafts))
        if drafts:
            num_tried += 1
            speculator.verified(mine, len(drafts), 0)
        mine.output_ids += [900, 1, 2, 3]  # the same run again, and never what followed it
    assert 2 < num_tried < 40


def test_drafts_that_are_mostly_right_are_verified_as_long_as_rows_cost_little():
    for row_s, is_worth_it in ((0.05, True), (1.5, False)):
        speculator = Speculator(4, MIB, shares_text=False)
        mine = request("a", [*range(1, 60), *range(1, 4)])
        mine.output_ids = [4]
        num_steps = 0
        while len(mine.output_ids) < 50:
            ((*drafts,),) = speculator.draft([mine], 99)
            speculator.costs.add(1 + len(drafts), 1 + row_s * len(drafts))
            if drafts:
                speculator.verified(mine, len(drafts), len(drafts))
            mine.output_ids += [mine.output_ids[-1] + 1 + i for i in range(1 + len(drafts))]
            num_steps += 1
        assert (num_steps < 20) == is_worth_it


def test_a_request_that_has_left_is_forgotten():
    speculator = Speculator(4, MIB, shares_text=True)
    mine = request("a", [1, 2, 3, 4], [5])
    speculator.draft([mine], 99)
    speculator.end(mine)
    speculator.end(mine)
    assert not speculator._followers
