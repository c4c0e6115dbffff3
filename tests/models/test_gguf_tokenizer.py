"""Vocabularies of GGUF files give the ids of the tokenizers that they were made of."""

import json
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.config import ModelConfig, load_config, model_dir
from moe_serve.errors import ModelError
from moe_serve.models.families.registry import read_spec
from moe_serve.models.gguf_tokenizer import _RULES
from moe_serve.models.tokenizer import Tokenizer, tokenizer_settings
from moe_serve.models.tokenizer_conversion import read_sentencepiece
from moe_serve.server.workers.chat_template import ChatTemplates
from tests.models.gguf_checkpoint import Vocabulary, write_bpe, write_gguf, write_header, write_pieces
from tests.models.test_tokenizer_conversion import TEXTS, trained

DEMO = model_dir(ModelConfig())
TEMPLATE = (DEMO / "chat_template.jinja").read_text()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary of the demo model, which splits text as GPT-2 does."""
    return write_header(tmp_path_factory.mktemp("gguf") / "demo.gguf", vocabulary("gpt-2"))


def vocabulary(pre: str) -> Vocabulary:
    return write_bpe(DEMO / "tokenizer.json", pre, bos=0, eos=1, template=TEMPLATE)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS | st.sampled_from(["<|bos|>a <|eos|>", "def f(x):\n    return x", ""]))
def test_byte_level_vocabularies_give_the_ids_and_texts_of_tokenizer_json(demo: Path, text: str) -> None:
    ours, theirs = _tokenizers(demo)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip)


_made: dict[Path, tuple[Tokenizer, Tokenizer]] = {}


def _tokenizers(demo: Path) -> tuple[Tokenizer, Tokenizer]:
    if demo not in _made:
        _made[demo] = Tokenizer.from_folder(demo), Tokenizer.from_folder(DEMO)
    return _made[demo]


def test_bytes_of_tokens_are_those_of_tokenizer_json(demo: Path) -> None:
    ours, theirs = _tokenizers(demo)
    assert ours.token_bytes(2048) == theirs.token_bytes(2048)


def test_sentencepiece_vocabularies_give_the_ids_of_their_own_file(tmp_path: Path) -> None:
    model = read_sentencepiece(trained("bpe"))
    (tmp_path / "tokenizer.model").write_bytes(trained("bpe"))
    pieces = write_pieces(model.pieces, bos=1, eos=2)

    def write(writer: gguf.GGUFWriter) -> None:
        pieces(writer)
        writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", model.remove_extra_whitespaces)
        writer.add_add_space_prefix(model.add_dummy_prefix)

    ours = Tokenizer.from_folder(write_header(tmp_path / "x.gguf", write))
    theirs = Tokenizer.from_folder(tmp_path)
    for text in ("the  thee (a, b) = 0", " é漢😀 def\n", "<s> a </s>", ""):
        assert ours.encode(text) == [1, *theirs.encode(text)]  # where nothing is said, a text begins with <s>
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


# Pieces into which text is split, by hand from the rules of each model's own tokenizer.json.
SPLIT = {
    "qwen2": ["don", "'t", " ", "3", "3", "3", "3", " ÀB", " --", " \n \n", "  ", " x"],
    "llama-bpe": ["don", "'t", " ", "333", "3", " ÀB", " --", " \n \n", "  ", " x"],
    "gpt-2": ["don", "'t", " 3333", " ÀB", " --", " \n \n  ", " x"],
    "refact": ["don", "'t", " ", "3", "3", "3", "3", " ÀB", " --", " \n \n  ", " x"],
    "gpt-4o": ["don't", " ", "333", "3", " ÀB", " --", " \n \n", "  ", " x"],
    "deepseek-llm": ["don", "'", "t", " ", "3333", " À", "B", " --", " ", "\n", " ", "\n", "  ", " x"],
    "deepseek-v3": ["don", "'t", " ", "333", "3", " ÀB", " --", " \n \n", "  ", " x"],
}


@pytest.mark.parametrize("pre", SPLIT)
def test_text_is_split_by_the_rules_that_the_file_names(pre: str, tmp_path: Path) -> None:
    backend = Tokenizer.from_folder(write_header(tmp_path / "x.gguf", vocabulary(pre)))._backend
    text = "don't 3333 ÀB -- \n \n   x"
    pieces = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == SPLIT[pre]


def test_every_rule_makes_a_tokenizer_that_loses_no_text(tmp_path: Path) -> None:
    for pre in _RULES:
        ours = Tokenizer.from_folder(write_header(tmp_path / f"{pre}.gguf", vocabulary(pre)))
        text = "don't 3333 ÀB -- \n \n   x 漢字 😀 µ「」"
        assert ours.decode(ours.encode(text)) == text


def test_special_tokens_templates_and_ends_are_those_of_the_file(demo: Path, tmp_path: Path) -> None:
    assert tokenizer_settings(demo) == {
        "add_bos_token": False,
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": [{"name": "default", "template": TEMPLATE}],
    }
    from_file = ChatTemplates.load(load_config(overrides=[f"model.path={demo}"]))
    from_folder = ChatTemplates.load(load_config())
    assert (from_file._templates, from_file._special_tokens) == (from_folder._templates, from_folder._special_tokens)

    def write(writer: gguf.GGUFWriter) -> None:
        vocabulary("gpt-2")(writer)
        writer.add_eot_token_id(7)

    spec = read_spec(write_gguf(DEMO, tmp_path / "demo.gguf", vocabulary=write))
    assert spec.eos_token_ids == (1, 7)


def test_vocabularies_that_are_not_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"split by the rules 'mystery' .* known are qwen2, .* model.skip_tokenizer"):
        Tokenizer.from_folder(write_header(tmp_path / "a.gguf", vocabulary("mystery")))

    def bert(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    with pytest.raises(ModelError, match="vocabulary of the kind 'bert', and read are llama"):
        Tokenizer.from_folder(write_header(tmp_path / "b.gguf", bert))

    def short(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.0])

    with pytest.raises(ModelError, match=r"tokenizer.ggml.scores is no list of 2 entries"):
        Tokenizer.from_folder(write_header(tmp_path / "c.gguf", short))
    with pytest.raises(ModelError, match="holds no list of tokens"):
        Tokenizer.from_folder(write_header(tmp_path / "d.gguf", lambda writer: None))
    damaged = json.loads((DEMO / "tokenizer.json").read_text())
    damaged["model"]["merges"][3] = ["no", "token"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))
    with pytest.raises(ModelError, match="holds a merge of what are no tokens"):
        Tokenizer.from_folder(
            write_header(tmp_path / "e.gguf", write_bpe(tmp_path / "tokenizer.json", "gpt-2", bos=0, eos=1))
        )
