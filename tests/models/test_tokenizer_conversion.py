"""Folders with only `tokenizer.model` or `tiktoken.model` give the ids and texts of those libraries themselves."""

import base64
import io
import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.errors import ModelError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.models.tokenizer_conversion import (
    KNOWN_CLASS,
    PATTERN,
    read_ranks,
    read_sentencepiece,
    sentencepiece_backend,
    tiktoken_backend,
)
from tests.engine.small_tokenizers import RANKS, bpe_pieces, kimi, ranks_file, sentencepiece_file, unigram_pieces

# ---- sentencepiece

SENTENCES = [
    line
    for path in sorted(Path(__file__).parent.glob("test_*.py"))[:4]
    for line in path.read_text().splitlines()[:150]
    if line
] + ["naïve café — 漢字 😀", "the  the   thee", "Ｆｕｌｌ ｗｉｄｔｈ ①"]
KINDS = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe, no prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "remove_extra_whitespaces": False},
    "unigram, nfkc": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
}
# Without control characters: sentencepiece gives a lone space for a text of which normalization leaves nothing.
ANY_CHARACTER = st.characters(codec="utf-8", exclude_categories=["Cc"])
TEXTS = st.text(st.sampled_from("abcdefthe .,()=\n\t_é漢😀ＦＡ①0123") | ANY_CHARACTER, max_size=40)


@cache
def trained(kind: str) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        vocab_size=700,
        minloglevel=2,
        num_threads=1,
        **KINDS[kind],
    )
    return written.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_sentencepiece(kind):
    data = trained(kind)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    old, new = (Tokenizer(sentencepiece_backend(data, "tokenizer.model", legacy)) for legacy in (True, False))

    @settings(deadline=None, max_examples=100)
    @given(TEXTS)
    def check(text):
        if any(symbol in text for symbol in ("<unk>", "<s>", "</s>", "▁", "\0")):
            return
        wanted = oracle.encode(text)
        # As in transformers, newer Llamas give no second space to a text that begins with one.
        for tokenizer in (old, new) if text[:1].isascii() and text[:1].isalpha() else (old,):
            assert tokenizer.encode(text) == wanted
            if oracle.unk_id() not in wanted:  # sentencepiece writes " ⁇ " for it
                assert tokenizer.decode(wanted) == oracle.decode(wanted)

    check()


@pytest.mark.parametrize("legacy", [True, False])
def test_text_after_a_special_token_gets_a_space_in_old_llamas_only(legacy):
    data = sentencepiece_file(bpe_pieces(), model_type=2, byte_fallback=True, remove_extra_whitespaces=False)
    backend = sentencepiece_backend(data, "tokenizer.model", legacy)
    assert backend.encode("a</s>b").tokens == ["▁a", "</s>", "▁b" if legacy else "b"]


def sentencepiece_folder(folder: Path, **config) -> Path:
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(bpe_pieces(), 2, byte_fallback=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | config))
    return folder


@pytest.mark.parametrize(
    "config, begins",
    [
        ({}, True),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, False),
        ({"tokenizer_class": "Ernie4_5_Tokenizer", "add_bos_token": True}, True),
    ],
)
def test_a_folder_with_a_sentencepiece_file_alone_is_served(tmp_path, config, begins):
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(tmp_path, **config))
    ids = tokenizer.encode("the a")
    assert (ids[0] == 1) == begins
    assert tokenizer.encode("the a", add_special_tokens=False)[0] != 1
    assert tokenizer.decode(ids) == "the a"


def test_added_tokens_of_the_configuration_follow_the_pieces(tmp_path):
    size = len(bpe_pieces())
    folder = sentencepiece_folder(tmp_path, added_tokens_decoder={str(size): {"content": "<|user|>", "special": True}})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a<|user|>", add_special_tokens=False)[-1] == size
    assert tokenizer.decode([size]) == ""
    assert tokenizer.decode([size], skip_special_tokens=False) == "<|user|>"


def test_an_added_token_with_another_id_is_refused(tmp_path):
    folder = sentencepiece_folder(tmp_path, added_tokens_decoder={"100000": {"content": "<|user|>"}})
    with pytest.raises(ModelError, match=r"<\|user\|>.*100000"):
        Tokenizer.from_folder(folder)


def test_models_of_words_are_refused_with_what_to_do():
    data = sentencepiece_file(unigram_pieces(), model_type=3)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        sentencepiece_backend(data, "tokenizer.model", legacy=True)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | st.integers(0, 2000).map(lambda cut: trained("unigram, nfkc")[: cut * 7]))
def test_any_bytes_are_a_model_or_one_error(data):
    with suppress(ModelError):  # cut between pieces, it is a smaller model
        assert sentencepiece_backend(data, "tokenizer.model", legacy=True).get_vocab_size()


def test_a_normalization_that_breaks_the_library_is_an_error_of_the_model():
    charsmap = b"\x04\x00\x00\x003\x1aA\xcb"  # a table of one entry that points far outside of it
    data = sentencepiece_file(unigram_pieces(), 1, charsmap=charsmap)
    tokenizer = Tokenizer(sentencepiece_backend(data, "tokenizer.model", legacy=True))
    with pytest.raises(ModelError, match="copy the files"):
        tokenizer.encode("abc")


def test_a_broken_sentencepiece_file_is_named(tmp_path):
    folder = sentencepiece_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"{broken")
    with pytest.raises(ModelError, match=r"tokenizer\.model.*copy the file"):
        Tokenizer.from_folder(folder)


def test_options_are_read_from_the_file():
    model = read_sentencepiece(sentencepiece_file(unigram_pieces(), 1, add_dummy_prefix=False))
    assert (model.model_type, model.byte_fallback, model.add_dummy_prefix) == (1, False, False)
    assert model.remove_extra_whitespaces
    assert model.pieces[0] == ("<unk>", 0.0, 2)


# ---- tiktoken

WORDS = [
    "the",
    "them",
    "THE",
    "iPhone",
    "we'll",
    "WE'LL",
    "x1234567",
    "\n\n",
    "\r\n",
    "漢字かな漢",
    "é😀",
    "...",
    "a_b",
]
PIECES = [*WORDS, " ", "  ", "\n", "１２", "न", "ß", "Ǆ"]
SPLIT_TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6)).map("".join)


def trained_ranks() -> list[bytes]:
    """Returns ranks in which merges are deep and overlap: every substring of some words, the short ones first."""
    text = b"the theme there aaaa ababa \xe6\xbc\xa2\xe5\xad\x97 123 we'll\n\n"
    parts = {text[i:j] for i in range(len(text)) for j in range(i + 2, min(i + 6, len(text)) + 1)}
    return [*(bytes([i]) for i in range(256)), *sorted(parts, key=lambda part: (len(part), part))]


@pytest.mark.parametrize("ranks", [RANKS, trained_ranks()], ids=["few", "all substrings"])
def test_ids_are_those_of_tiktoken(ranks):
    oracle = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(ranks)}, special_tokens={}
    )
    tokenizer = Tokenizer(tiktoken_backend(ranks_file(ranks), "tiktoken.model", {"tokenizer_class": KNOWN_CLASS}))

    @settings(deadline=None, max_examples=300)
    @given(SPLIT_TEXTS)
    def check(text):
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == text

    check()


def test_text_is_split_as_kimi_does():
    spans = kimi()._backend.pre_tokenizer.pre_tokenize_str("Hello漢字world's 12345 x\n\n  y")
    shown = "Hello漢字world's 12345 x\n\n  y"
    assert [shown[start:end] for _, (start, end) in spans] == (
        ["Hello", "漢字", "world's", " ", "123", "45", " x", "\n\n", " ", " y"]
    )


def tiktoken_folder(folder, config=None, data=None):
    (folder / "tiktoken.model").write_bytes(ranks_file(RANKS) if data is None else data)
    settings_ = {"tokenizer_class": KNOWN_CLASS} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def test_special_tokens_follow_the_ranks_by_their_names(tmp_path):
    size = len(RANKS)
    named = {
        str(size): {"content": "[BOS]", "special": True},
        str(size + 5): {"content": "<|tool_call_begin|>", "special": False},
    }
    config = {"tokenizer_class": KNOWN_CLASS, "bos_token": "[BOS]", "added_tokens_decoder": named}
    tokenizer = Tokenizer.from_folder(tiktoken_folder(tmp_path, config))
    assert tokenizer.encode("[BOS]a<|tool_call_begin|>") == [size, ord("a"), size + 5]
    assert tokenizer.decode([size, size + 5, size + 1]) == "<|tool_call_begin|>"
    assert tokenizer.decode([size + 1], skip_special_tokens=False) == f"<|reserved_token_{size + 1}|>"
    assert tokenizer.has_text(size + 255, skip_special_tokens=False)
    assert not tokenizer.has_text(size + 256, skip_special_tokens=False)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "HYTokenizer"}, {"tokenizer_class": ["x"]}])
def test_an_unknown_family_is_refused_by_its_name(tmp_path, config):
    name = re.escape(repr(str(config.get("tokenizer_class"))))
    with pytest.raises(ModelError, match=rf"{name}.*TikTokenTokenizer.*tokenizer\.json"):
        Tokenizer.from_folder(tiktoken_folder(tmp_path, config))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not ranks at all",
        b"YQ== 0\nYQ== 1",
        b"!!! 0",
        b"YQ== 1",
        base64.b64encode(b"a" * 5000) + b" 0",
        ranks_file(RANKS[1:]),
    ],
    ids=["empty", "words", "twice", "no base64", "a gap", "a long token", "a byte is missing"],
)
def test_a_broken_file_of_ranks_is_named(tmp_path, data):
    with pytest.raises(ModelError, match=r"tiktoken\.model.*copy the file"):
        Tokenizer.from_folder(tiktoken_folder(tmp_path, data=data))


def test_names_that_are_twice_there_are_refused(tmp_path):
    size = len(RANKS)
    named = {str(size + i): {"content": "<|same|>"} for i in range(2)}
    with pytest.raises(ModelError, match="same"):
        Tokenizer.from_folder(
            tiktoken_folder(tmp_path, {"tokenizer_class": KNOWN_CLASS, "added_tokens_decoder": named})
        )


def test_ranks_are_read_in_any_order():
    lines = ranks_file(RANKS).splitlines(keepends=True)
    assert read_ranks(b"".join(reversed(lines))) == {token: i for i, token in enumerate(RANKS)}
