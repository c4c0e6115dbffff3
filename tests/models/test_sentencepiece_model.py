"""A `tokenizer.model` folder gives the ids and texts of the sentencepiece library itself."""

import io
import json
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.errors import ModelError
from moe_serve.models.sentencepiece_model import read_sentencepiece, sentencepiece_backend
from moe_serve.models.tokenizer import Tokenizer
from tests.engine.small_tokenizers import bpe_pieces, sentencepiece_file, unigram_pieces

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


def make_folder(folder: Path, **config) -> Path:
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
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, **config))
    ids = tokenizer.encode("the a")
    assert (ids[0] == 1) == begins
    assert tokenizer.encode("the a", add_special_tokens=False)[0] != 1
    assert tokenizer.decode(ids) == "the a"


def test_added_tokens_of_the_configuration_follow_the_pieces(tmp_path):
    size = len(bpe_pieces())
    folder = make_folder(tmp_path, added_tokens_decoder={str(size): {"content": "<|user|>", "special": True}})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a<|user|>", add_special_tokens=False)[-1] == size
    assert tokenizer.decode([size]) == ""
    assert tokenizer.decode([size], skip_special_tokens=False) == "<|user|>"


def test_an_added_token_with_another_id_is_refused(tmp_path):
    folder = make_folder(tmp_path, added_tokens_decoder={"100000": {"content": "<|user|>"}})
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


def test_a_broken_file_is_named(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"{broken")
    with pytest.raises(ModelError, match=r"tokenizer\.model.*copy the file"):
        Tokenizer.from_folder(folder)


def test_options_are_read_from_the_file():
    model = read_sentencepiece(sentencepiece_file(unigram_pieces(), 1, add_dummy_prefix=False))
    assert (model.model_type, model.byte_fallback, model.add_dummy_prefix) == (1, False, False)
    assert model.remove_extra_whitespaces
    assert model.pieces[0] == ("<unk>", 0.0, 2)
