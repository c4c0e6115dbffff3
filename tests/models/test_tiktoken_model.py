"""A `tiktoken.model` folder gives the ids of the tiktoken library with the pattern of its family."""

import base64
import json
import re

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.errors import ModelError
from moe_serve.models.tiktoken_model import FAMILIES, read_ranks, tiktoken_backend
from moe_serve.models.tokenizer import Tokenizer
from tests.engine.small_tokenizers import RANKS, kimi, ranks_file

KIMI = FAMILIES["TikTokenTokenizer"]
WORDS = (
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
)
TEXTS = st.lists(st.sampled_from([*WORDS, " ", "  ", "\n", "１２", "न", "ß", "Ǆ"]) | st.text(max_size=6)).map("".join)


def trained_ranks() -> list[bytes]:
    """Returns ranks in which merges are deep and overlap: every substring of some words, the short ones first."""
    text = b"the theme there aaaa ababa \xe6\xbc\xa2\xe5\xad\x97 123 we'll\n\n"
    parts = {text[i:j] for i in range(len(text)) for j in range(i + 2, min(i + 6, len(text)) + 1)}
    return [*(bytes([i]) for i in range(256)), *sorted(parts, key=lambda part: (len(part), part))]


@pytest.mark.parametrize("ranks", [RANKS, trained_ranks()], ids=["few", "all substrings"])
def test_ids_are_those_of_tiktoken(ranks):
    oracle = tiktoken.Encoding(
        "kimi", pat_str=KIMI.pattern, mergeable_ranks={t: i for i, t in enumerate(ranks)}, special_tokens={}
    )
    tokenizer = Tokenizer(
        tiktoken_backend(ranks_file(ranks), "tiktoken.model", {"tokenizer_class": "TikTokenTokenizer"})
    )

    @settings(deadline=None, max_examples=300)
    @given(TEXTS)
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


def make_folder(folder, config=None, data=None):
    (folder / "tiktoken.model").write_bytes(ranks_file(RANKS) if data is None else data)
    settings_ = {"tokenizer_class": "TikTokenTokenizer"} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def test_special_tokens_follow_the_ranks_by_their_names(tmp_path):
    size = len(RANKS)
    named = {
        str(size): {"content": "[BOS]", "special": True},
        str(size + 5): {"content": "<|tool_call_begin|>", "special": False},
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": named}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, config))
    assert tokenizer.encode("[BOS]a<|tool_call_begin|>") == [size, ord("a"), size + 5]
    assert tokenizer.decode([size, size + 5, size + 1]) == "<|tool_call_begin|>"
    assert tokenizer.decode([size + 1], skip_special_tokens=False) == f"<|reserved_token_{size + 1}|>"
    assert tokenizer.has_text(size + 255, skip_special_tokens=False)
    assert not tokenizer.has_text(size + 256, skip_special_tokens=False)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "HYTokenizer"}, {"tokenizer_class": ["x"]}])
def test_an_unknown_family_is_refused_by_its_name(tmp_path, config):
    name = re.escape(repr(str(config.get("tokenizer_class"))))
    with pytest.raises(ModelError, match=rf"{name}.*TikTokenTokenizer.*tokenizer\.json"):
        Tokenizer.from_folder(make_folder(tmp_path, config))


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
def test_a_broken_file_is_named(tmp_path, data):
    with pytest.raises(ModelError, match=r"tiktoken\.model.*copy the file"):
        Tokenizer.from_folder(make_folder(tmp_path, data=data))


def test_names_that_are_twice_there_are_refused(tmp_path):
    size = len(RANKS)
    named = {str(size + i): {"content": "<|same|>"} for i in range(2)}
    with pytest.raises(ModelError, match="same"):
        Tokenizer.from_folder(
            make_folder(tmp_path, {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named})
        )


def test_ranks_are_read_in_any_order():
    lines = ranks_file(RANKS).splitlines(keepends=True)
    assert read_ranks(b"".join(reversed(lines))) == {token: i for i, token in enumerate(RANKS)}
