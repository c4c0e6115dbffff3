"""Where the last tokens of a text came before, against looking at all places, and in bounded memory."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.text_index import CHUNK, TextIndex

MIB = 2**20
MOST = 6


@dataclass
class Plain:
    """What TextIndex finds, by looking at all places. source: (text, place of what may come next)"""

    scopes: list[str]
    texts: list[list[int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # of tokens with others behind, the newest last
    source: list[tuple[int, int] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts, self.source = [[] for _ in self.scopes], [None for _ in self.scopes]

    def read(self, text: int, token: int) -> None:
        tokens = self.texts[text]
        if tokens:
            self.places.append((text, len(tokens) - 1))
        tokens.append(token)
        if self.source[text] is not None:
            other, at = self.source[text]
            goes_on = self.texts[other][at] == token and at + 1 < len(self.texts[other])
            self.source[text] = (other, at + 1) if goes_on else None

    def drafts(self, text: int) -> list[int]:
        tokens = self.texts[text]
        if self.source[text] is None:
            places = [place for place in reversed(self.places) if self.scopes[place[0]] == self.scopes[text]]
            of_run = [
                (other, at) for other, at in places if at >= 2 and self.texts[other][at - 2 : at + 1] == tokens[-3:]
            ]
            found = [(self.equal(text, *place), place) for place in of_run[:8]]
            if found:
                _, (other, at) = max(found, key=lambda each: each[0])  # of equals the first
                self.source[text] = other, at + 1
        if self.source[text] is None:
            return []
        other, at = self.source[text]
        found, more = self.texts[other][at : at + MOST], MOST
        period = len(found)
        while other == text and len(found) < more:
            found.append(found[-period])
        return found

    def equal(self, text: int, other: int, at: int) -> int:
        pairs = zip(reversed(self.texts[text]), reversed(self.texts[other][: at + 1]), strict=False)
        least = min(len(self.texts[text]), at + 1)
        return next((i for i, (here, there) in enumerate(pairs) if here != there or i == 32), least)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=14),
)
def test_drafts_are_what_followed_where_most_tokens_before_were_equal(reads):
    scopes = ["mine", "mine", "yours", "mine"]
    index, plain = TextIndex(MIB, MOST), Plain(scopes)
    numbers = [index.begin(scope) for scope in scopes]
    for text, tokens in reads:
        for token in tokens:
            plain.read(text, token)
        found = index.look([numbers[text]], [len(tokens)], tokens)
        wanted = plain.drafts(text)
        assert found.drafts[0, : found.num_drafts[0]].tolist() == wanted
        assert np.count_nonzero(found.chances[0]) == len(wanted)
        assert (np.diff(found.chances[0]) <= 0).all()
        source = plain.source[text]
        assert bool(found.are_own[0]) == (source is not None and source[0] == text)


def test_texts_longer_than_a_chunk_are_found_across_their_chunks():
    draw = random.Random(0)
    tokens = [draw.randrange(2**20) for _ in range(3 * CHUNK + 7)]
    index = TextIndex(MIB, MOST)
    first, between, second = (index.begin("") for _ in range(3))
    for at in range(0, len(tokens), 50):
        index.read(first, tokens[at : at + 50])
        index.read(between, [1, 2, 3] * 30)
    for end in range(3, len(tokens) - MOST):
        found = index.look([second], [1 if end > 3 else 3], tokens[end - 1 : end] if end > 3 else tokens[:3])
        assert found.drafts[0].tolist() == tokens[end : end + MOST]
        assert not found.are_own[0]


def test_several_texts_are_looked_at_together():
    index = TextIndex(MIB, 3)
    numbers = [index.begin(str(number)) for number in range(20)]
    index.look(numbers, [7] * 20, [each + 10 * number for number in range(20) for each in (1, 2, 3, 4, 5, 6, 1)])
    found = index.look(numbers, [2] * 20, [each + 10 * number for number in range(20) for each in (2, 3)])
    assert found.drafts.tolist() == [[4 + 10 * number, 5 + 10 * number, 6 + 10 * number] for number in range(20)]


@pytest.mark.parametrize("is_right", [True, False])
def test_chances_follow_what_came(is_right):
    index = TextIndex(MIB, 4)
    source, text = index.begin(""), index.begin("")
    index.read(source, list(range(2000)))
    index.look([text], [3], [0, 1, 2])
    for number in range(3, 900):
        found = index.look([text], [1 if is_right else 4], [number] if is_right else [5000 + number, 0, 1, 2])
    assert (found.chances[0] > 0.9).all() if is_right else (found.chances[0] < 0.1).all()


@pytest.mark.parametrize("max_bytes", [1, 50_000, 64 * MIB])
def test_memory_is_bounded_and_the_oldest_tokens_are_forgotten(max_bytes):
    index = TextIndex(max_bytes, MOST)
    arrays = [index._chunks, index._tokens, index._earlier, index._heads]
    assert sum(each.nbytes for each in arrays) == index.num_bytes <= max(max_bytes, 1 << 14)
    assert index.num_bytes > max_bytes * 0.9
    if max_bytes > 50_000:
        return
    texts = []
    for number in range(3 * index.num_tokens // 200):
        texts.append(([1000 * number + each for each in range(200)], index.begin("")))
        index.read(texts[-1][1], texts[-1][0])
        index.end(texts[-1][1])
    for tokens, is_there in ((texts[0][0], False), (texts[-2][0], True)):
        found = index.look([index.begin("")], [3], tokens[:3])
        assert found.num_drafts[0] == (MOST if is_there else 0)


def test_a_text_longer_than_the_memory_goes_on():
    index = TextIndex(1, MOST)
    text, other = index.begin(""), index.begin("")
    index.read(other, [1, 2, 3])
    for number in range(4 * index.num_tokens):
        found = index.look([text], [1], [number % 50])
        assert number < 60 or found.drafts[0].tolist() == [(number + 1 + each) % 50 for each in range(MOST)]
    assert index.look([other], [1], [7]).num_drafts[0] == 0, "it was written over, and begins anew"


@pytest.mark.parametrize("is_looked_at", [True, False], ids=["then looks", "then reads"])
def test_no_token_of_another_scope_is_offered_where_the_ring_came_round_twice(is_looked_at):
    index = TextIndex(1, MOST)
    num_chunks = index.num_tokens // CHUNK
    text, followed = index.begin("mine"), index.begin("mine")
    index.read(followed, [*range(1, 20), *range(500, 600)])  # chunk 0
    assert index.look([text], [10], list(range(1, 11))).drafts[0, 0] == 11  # chunk 1
    index.read(index.begin("other"), [7] * (num_chunks - 2) * CHUNK)
    index.read(index.begin("other"), [888] * CHUNK)  # chunk 0
    index.read(index.begin("other"), [7] * (num_chunks - 1) * CHUNK)
    index.read(index.begin("mine"), [1, 2, 3])  # chunk 0, of which the rest is still the other scope's
    if is_looked_at:
        assert index.look([text], [0], []).num_drafts[0] == 0
    else:
        rights = index._index["right"].copy()
        index.read(text, [888])
        assert (index._index["right"] == rights).all(), "it was told that the other scope's token came"
