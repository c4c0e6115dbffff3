import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

TOOLS = Path(__file__).resolve().parents[2] / "tools"
WORDS = [
    "the",
    "router",
    "sends",
    "every",
    "token",
    "to",
    "the",
    "experts",
    "that",
    "it",
    "likes",
    "best",
    "and",
    "they",
    "answer",
    "in",
    "order",
]
TINY = ["--size", "tiny", "--steps", "12", "--batch", "2", "--seq", "32", "--threads", "1"]


@pytest.fixture(scope="module", autouse=True)
def tools_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield


@pytest.fixture(scope="module")
def run(tools_on_path):
    import make_demo_model

    def invoke(*arguments, expect=0):
        result = CliRunner().invoke(make_demo_model.app, list(map(str, arguments)))
        assert result.exit_code == expect, (result.output, result.exception)
        return result.output

    return invoke


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """Two domains of text that differ: words in an order, and Python-like lines."""
    root = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    for name in ("prose", "code"):
        (root / name).mkdir()
        for i in range(6):
            words = rng.choice(WORDS, 200)
            text = " ".join(words) if name == "prose" else "\n".join(f"def {w}(self):\n    return {w}" for w in words)
            (root / name / f"{i}.txt").write_text(text)
    return [f"--docs={name}={root / name}" for name in ("prose", "code")]


@pytest.fixture(scope="module")
def made(run, docs, tmp_path_factory):
    """A folder where `make` has run: work/ and model/."""
    root = tmp_path_factory.mktemp("made")
    options = ["--work", root / "work", "--out", root / "model", "--no-stdlib", *docs, "--vocab", 300, *TINY]
    output = run("make", *options)
    assert "held-out loss" in output
    assert "expert load" in output
    return root


def train_again(run, made, out, *options):
    run("train", "--work", made / "work", "--out", out, *TINY, *options)
    return (out / "model.safetensors").read_bytes()


def test_the_exported_folder_is_what_transformers_computes(made):
    import torch
    from demo_training.export import load_exported
    from transformers import AutoModelForCausalLM

    oracle, info = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(40)[None] % 300
    with torch.no_grad():
        expected, found = oracle(ids).logits, load_exported(made / "model")(ids)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_exported_folder_loads_into_the_serving_model(made):
    import torch

    from moe_serve.eplb.placement import Placement
    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.weight_share import WeightShare
    from moe_serve.models.weights import load_weights

    spec = read_spec(made / "model")
    assert (spec.num_layers, spec.num_logical, spec.topk, spec.moe_layer_ids) == (2, 8, 2, (1,))
    placement = Placement.trivial(1, 8, num_ranks=2, moe_layer_ids=(1,))
    loaded = load_weights(made / "model", WeightShare(spec, placement, 1, torch.float32, "cpu"))
    assert loaded.experts[1]["gate_up"].shape == (4, 32, 32)
    assert loaded.experts[1]["gate_up"].abs().sum() > 0


def test_expert_load_counts_every_token_topk_times(made):
    loads = json.loads((made / "model" / "expert_load.json").read_text())
    assert set(loads) == {"prose", "code"}
    for name, rows in loads.items():
        held_out = len(np.load(made / "work" / f"validation_{name}.npy"))
        num_tokens = min(64, (held_out - 1) // 32) * 32
        assert [sum(row) for row in rows] == [2 * num_tokens]
    assert loads["prose"] != loads["code"]


def test_training_is_deterministic_also_when_interrupted_and_resumed(run, made, tmp_path):
    from demo_training.model import named_shape
    from demo_training.text import load_corpus
    from demo_training.training import TrainSettings, train

    whole = train_again(run, made, tmp_path / "a")
    assert whole == (made / "model" / "model.safetensors").read_bytes()

    class Interrupt(Exception):
        pass

    def stop_at_step_6(report):
        if report.step == 6:
            raise Interrupt

    corpus = load_corpus(made / "work")
    shape, settings = named_shape("tiny", corpus.vocab_size), TrainSettings(12, 2, 32)
    with pytest.raises(Interrupt):
        train(shape, corpus, settings, made / "work" / "state.pt", False, stop_at_step_6)
    assert train_again(run, made, tmp_path / "b", "--resume") == whole
    assert train_again(run, made, tmp_path / "c", "--seed", "2") != whole


def test_a_layer_that_predicts_is_trained_beside_the_model_and_served(run, made, docs, tmp_path):
    import torch
    from demo_training.export import few_bits, load_exported, prediction_tensors
    from demo_training.prediction import train_prediction
    from demo_training.text import load_corpus
    from demo_training.training import TrainSettings

    from moe_serve.ep.moe_layer import MoeLayer
    from moe_serve.kernels.numerics import FAST
    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.weight_share import WeightShare
    from moe_serve.models.weights import load_weights
    from tests.models.runner import decoder_with, one_rank
    from tests.models.test_prediction import PredictingRunner

    folder, before = tmp_path / "model", (made / "model" / "model.safetensors").read_bytes()
    shutil.copytree(made / "model", folder)
    sizes = ["--steps", 6, "--batch", 2, "--seq", 32, "--threads", 1]
    output = run("predict", "--work", tmp_path / "work", "--out", folder, "--no-stdlib", *docs, *sizes)
    assert "guesses the model's best token" in output
    assert (folder / "model.safetensors").read_bytes() == before
    assert "--overwrite" in run("predict", "--work", tmp_path / "work", "--out", folder, expect=2)
    spec = read_spec(folder).with_predictor()
    assert spec.moe_layer_ids == (1, 2)
    decoder = decoder_with(
        MoeLayer, spec, load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu")), FAST
    )
    runner = PredictingRunner(decoder, FAST)
    ids = [number % 300 for number in range(7, 300, 11)]
    found = runner.run([(runner.request("a", ids), len(ids) - 1)])["a"]
    model = load_exported(folder)
    layer = train_prediction(model, load_corpus(tmp_path / "work"), TrainSettings(6, 2, 32), lambda report: None)
    with torch.no_grad():
        for name, weight in prediction_tensors(layer, model).items():  # as they are stored
            weight.copy_(weight if name.endswith("bias") else few_bits(name, weight).to(torch.bfloat16))
        row = torch.tensor([ids])
        expected = layer(model, model.hidden(row)[:, :-1], row[:, 1:])[0]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def test_sample_continues_the_prompt(run, made):
    output = run("sample", "--out", made / "model", "--prompt", "the router [/] sends", "--tokens", 5)
    assert "the router [/] sends" in output


def test_a_model_that_is_there_is_not_overwritten_by_accident(run, made, tmp_path):
    assert "--overwrite" in run("train", "--work", made / "work", "--out", made / "model", *TINY, expect=2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["prep", "--no-stdlib"], "at least one"),
        (["prep", "--no-stdlib", "--docs", "manual"], "NAME=FOLDER"),
        (["prep", "--no-stdlib", "--docs", "manual=/nowhere"], "not a folder"),
        (["prep", "--no-stdlib", "--docs", "manual=."], "at least 2"),
        (["train"], "prep"),
        (["stats"], "train"),
    ],
)
def test_mistakes_get_one_line_with_the_fix(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    output = run(*arguments, expect=2)
    assert output.startswith("error:") or "\nerror:" in output
    assert words in output
    assert "Traceback" not in output


def test_a_vocabulary_below_all_bytes_is_refused(run, docs, tmp_path):
    assert "258" in run("prep", "--work", tmp_path, "--no-stdlib", *docs, "--vocab", 100, expect=2)


def test_docstrings_of_library_code_are_its_prose():
    from demo_training.text import _docstrings

    source = '"""Module words."""\n\ndef f():\n    """Function words."""\n    return 1\n'
    assert _docstrings(source) == "Module words.\n\nFunction words."
    assert _docstrings("not python (") == ""


def test_html_becomes_plain_text(tmp_path):
    from demo_training.text import _plain_text

    page = tmp_path / "page.html"
    page.write_text("<head><title>x</title></head><h1>Title</h1><p>a &lt; b</p><script>no()</script>")
    assert _plain_text(page) == "Title\na < b"


def test_help_answers_without_torch():
    code = f"""
import runpy, sys
sys.argv[1:] = ["make", "--help"]
try:
    runpy.run_path({str(TOOLS / "make_demo_model.py")!r}, run_name="__main__")
except SystemExit:
    pass
print("heavy:", sorted({{"torch", "numpy", "tokenizers"}} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "Usage" in output
    assert "heavy: []" in output
