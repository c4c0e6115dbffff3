"""Tokenizer: text to ids and back, the beginning token as the model wants it, errors that say the fix."""

import json
import re
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from moe_serve.config import ModelConfig, load_config, model_dir
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.tokenizer import Tokenizer

DEMO = model_dir(ModelConfig())


def make_folder(tmp_path, post_processor=None, **files):
    """A folder with a tokenizer of single letters, <s> = 0 and </s> = 1, and the given JSON files."""
    backend = Backend(models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    if post_processor:
        backend.post_processor = post_processor
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("text", ["", "for i in range(3):\n\tprint(i)", "naïve 漢字 😀", " leading and trailing "])
def test_text_comes_back_unchanged(text):
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_demo_model_wants_no_beginning_token():
    assert Tokenizer.from_folder(DEMO).encode("a")[0] != 0


@pytest.mark.parametrize(
    "settings, ids",
    [
        ({"bos_token": "<s>", "add_bos_token": True}, [0, 2, 3]),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, [0, 2, 3]),
        ({"bos_token": "<s>", "add_bos_token": False}, [2, 3]),
        ({"bos_token": "<s>"}, [2, 3]),
        ({"bos_token": None, "add_bos_token": True}, [2, 3]),
    ],
)
def test_the_beginning_token_is_added_when_the_configuration_says_so(tmp_path, settings, ids):
    assert Tokenizer.from_folder(make_folder(tmp_path, tokenizer_config=settings)).encode("ab") == ids


@pytest.mark.parametrize("add_bos, ids", [(None, [0, 2]), (True, [0, 2]), (False, [2])])
def test_the_configuration_wins_over_the_post_processor(tmp_path, add_bos, ids):
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    settings = {"bos_token": "<s>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    folder = make_folder(tmp_path, template, tokenizer_config=settings)
    assert Tokenizer.from_folder(folder).encode("a") == ids


def test_special_tokens_are_shown_on_request(tmp_path):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    assert tokenizer.decode([2, 1]) == "a"
    assert tokenizer.decode([2, 1], skip_special_tokens=False) == "a</s>"


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json.*skip_tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path, name):
    folder = make_folder(tmp_path)
    (folder / name).write_text("{broken")
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text, place", [("\ud800", "U+D800 at character 0"), ("ab\udfff", "U+DFFF at character 2")])
def test_a_lone_surrogate_is_refused_with_its_place(tmp_path, text, place):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    with pytest.raises(RequestError, match=re.escape(place)):
        tokenizer.encode(text)


@pytest.mark.parametrize("token_id, shown, skipped", [(2, True, True), (1, True, False), (4, False, False)])
def test_ids_have_text_unless_they_are_unknown_or_skipped(tmp_path, token_id, shown, skipped):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    assert tokenizer.has_text(token_id, skip_special_tokens=False) == shown
    assert tokenizer.has_text(token_id) == skipped


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tekken.json", "vocab.json"])
def test_a_vocabulary_of_another_kind_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"{re.escape(name)}.*tokenizer\.json.*skip_tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("add, ids", [(True, [0, 2]), (False, [2])])
def test_special_tokens_in_front_are_left_out_on_request(tmp_path, add, ids):
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert Tokenizer.from_folder(make_folder(tmp_path, template)).encode("a", add_special_tokens=add) == ids


def test_a_special_token_in_the_text_is_one_token(tmp_path):
    assert Tokenizer.from_folder(make_folder(tmp_path)).encode("a</s>b") == [2, 1, 3]


def test_tokens_that_only_the_configuration_names_are_added(tmp_path):
    added = {
        "0": {"content": "<s>", "special": True},
        "4": {"content": "<tool>"},
        "5": {"content": "<|e|>", "special": True},
    }
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.encode("a<tool><|e|>") == [2, 4, 5]
    assert tokenizer.decode([2, 4, 5]) == "a<tool>"


@pytest.mark.parametrize("added", [{"9": {"content": "x"}}, {"one": {"content": "x"}}, {"4": "x"}, {"4": {}}])
def test_added_tokens_that_do_not_fit_are_refused(tmp_path, added):
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added}))


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    turns, ends = 0, threading.Event()

    def encode() -> None:
        tokenizer.encode("ab cd " * 50_000)
        ends.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ends.wait(0.0005):
        turns += 1
    thread.join()
    assert turns > 5, "an encoding that holds Python's lock leaves one or two"
