"""Where runs of tokens came last, in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.attention_dp.text_index import TextIndex

MIB = 2**20


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


def num_bytes(index: TextIndex) -> int:
    """What texts and entries take, as measured where there are many of them."""
    entries = sum(len(each) for generation in (index._young, index._old) for each in generation.values())
    return 120 * entries + sum(each.__sizeof__() for each in index._texts.values())


@pytest.mark.parametrize("num_shared", [1000, 950, 0], ids=["equal", "a shared prefix", "nothing shared"])
@pytest.mark.parametrize("enters", [True, False])
def test_texts_count_as_memory_whether_or_not_they_bring_new_runs(num_shared, enters):
    draw = random.Random(0)
    prefix = list(range(num_shared))
    index = TextIndex(MIB)
    for _ in range(1000):
        index.extend(index.begin(), "", prefix + [draw.randrange(2**20) for _ in range(1000 - num_shared)], enters)
        assert num_bytes(index) <= MIB + 120 * 1000
    assert index.text(index._num_texts) is not None


def test_texts_that_grow_all_the_time_are_forgotten_too():
    index = TextIndex(MIB)
    numbers = [index.begin() for _ in range(100)]
    for _ in range(1000):
        for number in numbers:
            index.extend(number, "", [1, 2, 3, 4, 5, 6, 7, 8], enters=False)
        assert num_bytes(index) <= MIB + 1000


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
