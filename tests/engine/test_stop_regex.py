"""Expressions that end a request: the matches of Python's `re`, found while text grows, whatever the expression."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.stop_matcher import FinishReason, StopMatcher
from moe_serve.engine.output.stop_regex import MAX_MATCH, MAX_POSITIONS, RegexFinder, compile_stop_regex
from moe_serve.errors import RequestError

LEAVES = ["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", "\n"]
expressions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda every: f"(?:{'|'.join(every)})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "{1,2}?"])).map(
            lambda each: f"({each[0]}){each[1]}"
        )
    ),
    max_leaves=8,
)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """Returns start and end of the match that ends first, the longest of those: by trying all parts of the text."""
    matches = (
        (end, start) for end in range(len(text) + 1) for start in range(end) if re.fullmatch(pattern, text[start:end])
    )
    found = next(matches, None)
    return None if found is None else (found[1], found[0])


def found_in(pattern: str, text: str, cut: int) -> tuple[int, int] | None:
    finder = RegexFinder(pattern)
    for at in range(0, len(text), cut):
        ends = finder.push(text[at : at + cut])
        if ends:
            start = finder.start_of(text[: at + ends[0]])
            assert start is not None
            return start, at + ends[0]
    return None


@settings(max_examples=300, deadline=None)
@given(expressions, st.text("abc.1\n", max_size=12), st.integers(1, 5))
def test_the_first_match_is_that_of_trying_all_parts_of_the_text(pattern, text, cut):
    if re.fullmatch(pattern, ""):
        with pytest.raises(RequestError, match="matches the empty text"):
            RegexFinder(pattern)
    else:
        assert found_in(pattern, text, cut) == first_match(pattern, text)


class Characters:
    """A tokenizer whose tokens are the characters."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def has_text(self, token_id, skip_special_tokens=True):
        return True


def run(text: str, **params) -> tuple[str, list[str], FinishReason | None]:
    """Returns the text of a request, as it was released, and why it ended."""
    matcher = StopMatcher(Characters(), SamplingParams(max_new_tokens=10_000, **params), ())
    released = [matcher.push([ord(character)])[0] for character in text]
    return matcher.text, released, matcher.finish_reason


@settings(max_examples=200, deadline=None)
@given(
    expressions.filter(lambda pattern: not re.fullmatch(pattern, "")), st.text("abc.1\n", max_size=12), st.booleans()
)
def test_the_text_ends_before_the_first_match_and_nothing_of_it_was_released(pattern, text, no_stop_trim):
    shown, released, reason = run(text, stop_regex=(pattern,), no_stop_trim=no_stop_trim)
    assert "".join(released) == shown
    match = first_match(pattern, text)
    if match is None:
        assert text.startswith(shown)
        assert reason is None
    else:
        assert shown == text[: match[no_stop_trim]]
        assert reason == FinishReason("stop", pattern)


def test_the_first_of_stop_strings_and_expressions_wins():
    both = {"stop": ("xyz", "3"), "stop_regex": (r"\d\d", "y+")}
    assert run("axyz", **both)[::2] == ("ax", FinishReason("stop", "y+"))
    assert run("a123", **both)[::2] == ("a", FinishReason("stop", r"\d\d"))
    assert run("a43", **both)[::2] == ("a", FinishReason("stop", r"\d\d")), "of two that end there the longer one"
    assert run("a3", **both)[::2] == ("a", FinishReason("stop", "3"))


def test_text_is_held_back_only_while_a_match_may_grow():
    assert run("a b1 \n\n#", stop_regex=(r"\s\s#",))[1] == ["a", "", " b", "1", "", "", "", " "]
    endless = run("x" + "-" * 3 * MAX_MATCH, stop_regex=("x.*y",))[1]
    assert sum(map(len, endless)) > MAX_MATCH, "text older than the longest match is released"


def test_a_match_before_min_new_tokens_does_not_count():
    assert run("1a2", stop_regex=(r"\d",), min_new_tokens=2)[::2] == ("1a", FinishReason("stop", r"\d"))


REFUSED = [
    ("^a", "anchor"), ("a$", "anchor"), (r"a\b", "class or escape"), (r"(a)\1", "class or escape"),
    ("(?=a)b", "group of another kind"), ("(?i)a", "group of another kind"), ("(?P<x>a)", "group of another kind"),
    ("a**", "repeat of a repeat"), ("a{2}{3}", "repeat of a repeat"), ("*a", "repeats nothing"),
    ("a|*", "repeats nothing"),
    ("(a", "without its"), ("a)", "without its"), ("[a", "class or escape"), ("[[a]", "class or escape"),
    ("[a--b]", "class or escape"), ("[z-a]", "not valid"), ("a{3,2}", "m above n"), ("a*", "empty text"),
    ("()", "empty text"), ("a{129}", "too large"), ("(((a{9}){9}){9}){9}", "too large"),
    ("(?:" * 17 + "a" + ")" * 17, "deeper than 16"), ("(((){9999}){9999}){9999}a", "too large"), ("\\", "escape"),
]  # fmt: skip


@pytest.mark.parametrize("pattern, words", REFUSED, ids=[pattern[:20] for pattern, _ in REFUSED])
def test_what_is_not_supported_is_refused(pattern, words):
    with pytest.raises(RequestError, match=f"stop_regex .*{words}") as caught:
        compile_stop_regex(pattern)
    assert caught.value.field == "stop_regex"


def test_expressions_on_which_backtracking_is_exponential_take_a_bounded_number_of_steps():
    for pattern in ("(a+)+b", "(a|a)*b", "(.*)(.*)(.*)(.*)x", "(a?){30}a{30}b"):
        assert RegexFinder(pattern).push("a" * 20_000) == []
    assert RegexFinder("a" * MAX_POSITIONS).push("a" * MAX_POSITIONS) == [MAX_POSITIONS]
