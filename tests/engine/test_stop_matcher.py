"""StopMatcher: the same text however a stream is cut, whole characters only, and nothing beyond a stop."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import ModelConfig, model_dir
from moe_serve.engine.output.stop_matcher import FinishReason, StopMatcher
from moe_serve.models.tokenizer import Tokenizer
from tests.engine.small_tokenizers import KINDS, byte_fallback

LONG = 10_000
DEMO = Tokenizer.from_folder(model_dir(ModelConfig()))
EOS = 1

ids_lists = st.lists(st.integers(0, 2047), max_size=60)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=60)


class Letters:
    """A tokenizer whose token i is the i-th piece; 99 is its end of sequence."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return "".join("" if i == 99 and skip_special_tokens else "<eos>" if i == 99 else self.pieces[i] for i in ids)

    def has_text(self, token_id, skip_special_tokens=True):
        return not (token_id == 99 and skip_special_tokens)


def pieces_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cuts ids into pieces of the given sizes, repeated as often as needed."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        pieces.append(ids[at : at + sizes[turn % len(sizes)]])
        at += len(pieces[-1])
        turn += 1
    return pieces


def run(tokenizer, params: SamplingParams, pieces: list[list[int]]) -> tuple[str, list[int], FinishReason | None]:
    matcher = StopMatcher(tokenizer, params, eos_token_ids=(99,) if isinstance(tokenizer, Letters) else (EOS,))
    released = "".join(matcher.push(piece)[0] for piece in pieces)
    assert released == matcher.text, "what was released piece by piece is the whole text"
    return matcher.text, matcher.output_ids, matcher.finish_reason


def test_an_unfinished_character_is_never_released():
    matcher = StopMatcher(DEMO, SamplingParams(max_new_tokens=LONG), (EOS,))
    ids = DEMO.encode("a😀b")
    texts = [matcher.push([i])[0] for i in ids]
    assert len(ids) > 3
    assert all("\ufffd" not in text for text in texts)
    assert "".join(texts) == "a😀b"


def test_a_request_that_ends_inside_a_character_still_shows_its_bytes():
    ids = DEMO.encode("😀")
    text, _, reason = run(DEMO, SamplingParams(max_new_tokens=len(ids) - 1), [ids])
    assert text == DEMO.decode(ids[:-1])
    assert reason == FinishReason("length")


@settings(deadline=None, max_examples=200)
@given(
    ids=ids_lists,
    first=cuts,
    second=cuts,
    stops=st.lists(st.text("aeit \n", min_size=1, max_size=4), max_size=3),
    low=st.integers(0, 20),
    high=st.integers(20, 60),
)
def test_any_cut_of_the_stream_gives_the_same_output(ids, first, second, stops, low, high):
    params = SamplingParams(stop=tuple(stops), min_new_tokens=low, max_new_tokens=high)
    assert run(DEMO, params, pieces_of(ids, first)) == run(DEMO, params, pieces_of(ids, second))


@settings(deadline=None, max_examples=200)
@given(
    letters=st.lists(st.integers(0, 2), max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
)
def test_the_text_ends_before_the_first_stop_string_to_be_complete(letters, stops):
    text, ids, reason = run(Letters("a", "b", "c"), SamplingParams(stop=tuple(stops), max_new_tokens=LONG), [letters])
    whole = "".join("abc"[i] for i in letters)
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(whole) + 1) if whole[:end].endswith(stop)]
    if ends:
        end, length, stop = min(ends)
        assert text == whole[: end + length]
        assert ids == letters[:end]
        assert reason == FinishReason("stop", matched=stop)
    else:
        assert whole.startswith(text)
        assert reason is None


@settings(deadline=None, max_examples=100)
@given(letters=st.lists(st.integers(0, 2), max_size=20), stop=st.text("abc", min_size=1, max_size=4))
def test_released_text_never_has_to_be_taken_back(letters, stop):
    matcher = StopMatcher(Letters("a", "b", "c"), SamplingParams(stop=(stop,), max_new_tokens=LONG), ())
    for letter in letters:
        matcher.push([letter])
        assert stop not in matcher.text
    # everything but a possible beginning of the stop string is out
    if matcher.finish_reason is None:
        whole = "".join("abc"[i] for i in letters)
        assert stop.startswith(whole[len(matcher.text) :])


def test_a_stop_string_may_cross_token_borders_and_end_inside_a_token():
    text, ids, reason = run(Letters("he", "ll", "o wo", "rld"), SamplingParams(stop=("lo w",)), [[0, 1, 2, 3]])
    assert (text, ids) == ("hel", [0, 1, 2])
    assert reason == FinishReason("stop", matched="lo w")


def test_a_stop_string_of_several_characters_with_many_bytes():
    ids = DEMO.encode("x 漢字😀 y")
    text, kept, reason = run(DEMO, SamplingParams(stop=("字😀",)), [ids])
    assert text == "x 漢"
    assert len(kept) < len(ids)
    assert reason == FinishReason("stop", matched="字😀")


def test_stop_strings_and_stop_ids_are_ignored_below_min_new_tokens():
    letters = Letters("a", "b")
    assert run(letters, SamplingParams(stop=("b",), min_new_tokens=3), [[1, 0, 1, 0]])[0] == "ba"
    assert run(letters, SamplingParams(stop=("b",), min_new_tokens=1), [[1, 0]]) == ("", [1], FinishReason("stop", "b"))
    text, ids, reason = run(letters, SamplingParams(stop_token_ids=(1,), min_new_tokens=2), [[1, 0, 1, 0]])
    assert (text, ids, reason) == ("ba", [1, 0, 1], FinishReason("stop", 1))


def test_a_stop_string_may_begin_before_min_new_tokens():
    assert run(Letters("a", "b"), SamplingParams(stop=("ab",), min_new_tokens=2), [[0, 1, 0]])[1] == [0, 1]


def test_the_end_of_sequence_token_counts_but_has_no_text():
    letters = Letters("a")
    assert run(letters, SamplingParams(), [[0, 99, 0]]) == ("a", [0, 99], FinishReason("stop", 99))
    assert run(letters, SamplingParams(skip_special_tokens=False), [[0, 99]])[0] == "a"
    assert run(letters, SamplingParams(ignore_eos=True, skip_special_tokens=False), [[0, 99, 0]])[0] == "a<eos>a"


@pytest.mark.parametrize("size", [1, 2, 9])
def test_no_stop_trim_keeps_the_stop_string_and_nothing_after_it(size):
    tokenizer = Letters("a", "bE", "NDx", "y")
    params = SamplingParams(max_new_tokens=LONG, stop=("END",), no_stop_trim=True)
    text, ids, reason = run(tokenizer, params, pieces_of([0, 1, 2, 3], [size]))
    assert (text, ids, reason) == ("abEND", [0, 1, 2], FinishReason("stop", "END"))


def test_no_stop_trim_keeps_the_text_of_the_token_that_ends_a_request():
    tokenizer = Letters("a", "b", "E")
    params = SamplingParams(max_new_tokens=LONG, stop=("END",), stop_token_ids=(1,), no_stop_trim=True)
    assert run(tokenizer, params, [[0, 2, 1]]) == ("aEb", [0, 2, 1], FinishReason("stop", 1))
    assert run(tokenizer, params, [[0, 99]])[0] == "a", "a special token has no text"
    assert run(tokenizer, replace(params, skip_special_tokens=False), [[0, 99]])[0] == "a<eos>"


def test_length_ends_a_request_and_releases_what_was_held_back():
    text, ids, reason = run(Letters("a", "b"), SamplingParams(stop=("abb",), max_new_tokens=2), [[0, 1, 1, 1]])
    assert (text, ids, reason) == ("ab", [0, 1], FinishReason("length"))


def test_a_stop_string_complete_with_the_last_token_wins_over_length():
    assert run(Letters("a", "b"), SamplingParams(stop=("b",), max_new_tokens=2), [[0, 1]])[2] == FinishReason(
        "stop", "b"
    )


def test_closing_from_elsewhere_releases_held_text_and_later_tokens_are_ignored():
    matcher = StopMatcher(Letters("a", "b"), SamplingParams(stop=("ab",)), eos_token_ids=())
    assert matcher.push([0]) == ("", None)
    assert matcher.close(FinishReason("length")) == "a"
    assert matcher.push([1, 1])[0] == ""
    assert matcher.output_ids == [0]


def test_without_a_tokenizer_only_ids_come_out():
    matcher = StopMatcher(None, SamplingParams(max_new_tokens=3), eos_token_ids=(7,))
    assert matcher.push([1, 2]) == ("", None)
    assert matcher.push([7, 1]) == ("", FinishReason("stop", 7))
    assert matcher.output_ids == [1, 2, 7]


@pytest.mark.parametrize("tokenizer", [make() for make in KINDS], ids=[make.__name__ for make in KINDS])
@settings(deadline=None, max_examples=150)
@given(
    text=st.text(st.sampled_from("你好😀é\ufffd abc."), max_size=40),
    stops=st.lists(st.text(st.sampled_from("你好😀\ufffd ab"), min_size=1, max_size=3), max_size=2),
    sizes=cuts,
)
def test_a_completion_ends_before_its_stop_string_with_every_kind_of_tokenizer(tokenizer, text, stops, sizes):
    prompt_ids, output_ids = tokenizer.encode("the"), tokenizer.encode(text)
    whole = tokenizer.decode([*prompt_ids, *output_ids])[len("the") :]
    params = SamplingParams(stop=tuple(stops), max_new_tokens=LONG)
    matcher = StopMatcher(tokenizer, params, (), prompt_ids)
    for piece in pieces_of(output_ids, sizes):
        matcher.push(piece)
    matcher.close(FinishReason("length"))
    found = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    # U+FFFD at the very end waits for more bytes, so what it completes comes too late to stop anything.
    settled = [one for one in found if one[0] <= len(whole.rstrip("\ufffd"))]
    if settled:
        _, start, stop = min(settled)
        assert matcher.text == whole[:start]
        assert matcher.finish_reason == FinishReason("stop", matched=stop)
    elif not found:
        assert matcher.text == whole


@pytest.mark.parametrize(
    "text, stop, wanted", [("你好", "好", "你"), ("😀😃 there", "😃", "😀"), ("a漢字。b", "。", "a漢字")]
)
def test_a_stop_string_behind_characters_in_byte_tokens_is_found(text, stop, wanted):
    tokenizer = byte_fallback()
    found, _, reason = run(tokenizer, SamplingParams(stop=(stop,)), [tokenizer.encode(text)])
    assert found == wanted
    assert reason == FinishReason("stop", matched=stop)
