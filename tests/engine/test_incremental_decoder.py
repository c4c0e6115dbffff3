"""IncrementalDecoder: what is handed out token by token is the text of all tokens, for every kind of tokenizer."""

import re
from itertools import groupby

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_serve.config import ModelConfig, model_dir
from moe_serve.engine.output.incremental_decoder import IncrementalDecoder
from moe_serve.models.tokenizer import Tokenizer
from tests.engine.small_tokenizers import EOS, KINDS, byte_fallback, eos_of, metaspace, vocab_size

DEMO = Tokenizer.from_folder(model_dir(ModelConfig()))
DEMO_EOS = 1
TEXTS = ["", "def f(x):\n    return x", "naïve café — 😀😀 漢字", "\r\n\t\x00 x", "👩‍👩‍👧‍👦 family", "ends in €"]

TOKENIZERS = tuple(make() for make in KINDS)
BYTE_LEVEL, BYTE_FALLBACK, *_ = TOKENIZERS
by_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=[make.__name__ for make in KINDS])
texts = st.text(st.sampled_from("你好😀😃é\ufffd the abc.\n"), max_size=40)


def decoded(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int] = (), skip_special_tokens: bool = True) -> str:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens, prompt_ids)
    return "".join(decoder.push(i) for i in ids) + decoder.flush()


def common(one: str, other: str) -> int:
    """Returns the number of characters that two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def streamed(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int] = ()) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt_ids=prompt_ids)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@by_kind
@settings(deadline=None, max_examples=200)
@given(text=texts, specials=st.lists(st.integers(0, 60), max_size=4), cut=st.integers(0, 60), skip=st.booleans())
def test_a_text_continues_its_prompt_wherever_it_is_cut(tokenizer, text, specials, cut, skip):
    ids = tokenizer.encode(text)
    for place in specials:
        ids.insert(
            place if skip else len(ids), eos_of(tokenizer)
        )  # a special token that is shown ends a run of byte tokens
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    shown = len(prompt)
    if not whole.startswith(prompt):  # cut inside a character, which belongs to the output
        assume("\ufffd" not in text)  # else nobody can tell the prompt's from the cut's
        heads = [tokenizer.decode(prompt_ids[:end], skip_special_tokens=skip) for end in range(len(prompt_ids) + 1)]
        shown = max(common(whole, head) for head in heads)
    assert decoded(tokenizer, output_ids, prompt_ids, skip) == whole[shown:]


@by_kind
@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_nothing_unfinished_is_handed_out_before_the_end(tokenizer, text):
    *pieces, _ = streamed(tokenizer, tokenizer.encode(text.replace("\ufffd", "")))
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("text, characters", [("你好", ["你", "好"]), ("😀😃 there", ["😀", "😃", " ", *"there"])])
def test_characters_of_byte_fallback_come_one_by_one(text, characters):
    tokenizer = byte_fallback()
    assert [piece for piece in streamed(tokenizer, tokenizer.encode(text)) if piece] == characters


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
def test_a_completion_keeps_its_leading_space(make):
    tokenizer = make()
    prompt_ids, word = tokenizer.encode("the"), tokenizer.encode("a")[0]
    assert decoded(tokenizer, [word], prompt_ids) == " a"
    assert decoded(tokenizer, [word], [*prompt_ids, EOS, EOS]) == " a"
    assert decoded(tokenizer, [word]) == "a"


@by_kind
@pytest.mark.parametrize("count", [1, 2, 5, 6, 40])
def test_u_fffd_in_the_true_text_comes_out_at_the_end_or_sooner(tokenizer, count):
    ids = tokenizer.encode("a " + "\ufffd" * count)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces[-1]) <= 8, "no more than the window's tokens waits for the end"


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, vocab_size(BYTE_LEVEL) - 1), max_size=60), st.integers(0, 60))
def test_any_ids_of_a_byte_level_tokenizer_decode_as_at_once(ids, cut):
    whole, prompt = BYTE_LEVEL.decode(ids), BYTE_LEVEL.decode(ids[:cut])
    assert decoded(BYTE_LEVEL, ids[cut:], ids[:cut]) == whole[common(whole, prompt) :]


def is_byte(token_id: int) -> bool:
    return 3 <= token_id < 3 + 256


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from([*BYTE_FALLBACK.encode("😀你")[1:], 3 + 0xFF, 3 + 0x41])
        | st.integers(3 + 256, vocab_size(BYTE_FALLBACK) - 1),
        max_size=60,
    )
)
def test_broken_bytes_of_byte_fallback_spoil_no_more_than_their_run(ids):
    prompt_ids = BYTE_FALLBACK.encode("a")
    wanted = ""
    for bytes_, run in groupby(ids, is_byte):
        text = BYTE_FALLBACK.decode([*prompt_ids, *run])[1:]
        wanted += "(?s:.*)\ufffd(?s:.*)" if bytes_ and "\ufffd" in text else re.escape(text)
    assert re.fullmatch(wanted, decoded(BYTE_FALLBACK, ids, prompt_ids))


def test_a_character_that_was_handed_out_stays_when_its_run_of_bytes_breaks():
    tokenizer = byte_fallback()
    ids = [*tokenizer.encode("你好")[:-2], *tokenizer.encode("a")]
    assert "".join(streamed(tokenizer, ids)) == "你\ufffd a"


@by_kind
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_each_token_costs_the_decoding_of_a_few(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, vocab_size(tokenizer) - 1), min_size=100, max_size=200))
    num_decoded = 0

    class Counting:
        def decode(self, ids, skip_special_tokens=True):
            nonlocal num_decoded
            num_decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

        has_text = tokenizer.has_text

    decoder = IncrementalDecoder(Counting(), prompt_ids=ids)
    num_decoded = 0
    for i in ids:
        decoder.push(i)
    assert num_decoded <= 32 * len(ids)


def test_text_without_broken_bytes_costs_three_tokens_for_each():
    ids = BYTE_LEVEL.encode("a b c the" * 20)
    num_decoded = 0

    class Counting:
        def decode(self, ids, skip_special_tokens=True):
            nonlocal num_decoded
            num_decoded += len(ids)
            return BYTE_LEVEL.decode(ids, skip_special_tokens)

        has_text = BYTE_LEVEL.has_text

    decoder = IncrementalDecoder(Counting())
    for i in ids:
        decoder.push(i)
    assert num_decoded <= 3 * len(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_incremental_decoding_gives_the_text_back(text):
    decoder = IncrementalDecoder(DEMO)
    assert "".join(decoder.push(i) for i in DEMO.encode(text)) + decoder.flush() == text


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 2047), max_size=60))
def test_incremental_decoding_of_any_ids_equals_decoding_them_at_once(ids):
    decoder = IncrementalDecoder(DEMO)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == DEMO.decode(ids)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([*DEMO.encode("😀漢é"), DEMO_EOS, 0, *DEMO.encode("a")]), max_size=80))
def test_broken_and_interrupted_characters_decode_as_at_once(ids):
    decoder = IncrementalDecoder(DEMO)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == DEMO.decode(ids)


def test_endless_broken_bytes_decode_few_tokens_at_a_time():
    class Counting:
        has_text, longest = DEMO.has_text, 0

        def decode(self, ids, skip_special_tokens=True):
            self.longest = max(self.longest, len(ids))
            return DEMO.decode(ids, skip_special_tokens)

    decoder, broken = IncrementalDecoder(counting := Counting()), DEMO.encode("😀")[0]
    for _ in range(500):
        decoder.push(broken)
    assert 0 < counting.longest < 20
