"""Models served with quantised experts: near the dense ones, and bitwise the same however they are served."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_served_model
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.errors import ConfigError
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block
from moe_serve.kernels.quantised import has_vnni
from moe_serve.models.families.registry import read_spec
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import same, shuffled_placement, write_placement
from tests.models.fp8_checkpoint import BLOCKS, write_fp8_checkpoint
from tests.models.mxfp4_checkpoint import write_mxfp4_checkpoint
from tests.models.runner import Runner
from tests.tolerance import FP8_EXPERT_LOGITS, INT4_EXPERT_LOGITS, INT8_EXPERT_LOGITS

NUM_PROMPTS, NUM_TOKENS = 16, 10
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
PLAIN = ["engine.numerics=batch_invariant", "cache.prefix_cache=false"]
FORMS = ["fp8", "fp8 by channel", "int8", "mxfp4", "int4", "int4 by float"]
ROUNDED = ("int8", "int4", "int4 by float")  # whose numbers are not the checkpoint's
BY_TORCH = [
    pytest.param("fp8", BLOCKS, id="fp8"),
    pytest.param("fp8", PER_TENSOR, id="fp8 by tensor"),
    pytest.param(
        "int8", BLOCKS, id="int8", marks=pytest.mark.skipif(not has_vnni(), reason="needs a CPU with AVX-512 VNNI")
    ),
]
WAYS = {  # name -> (ranks, overrides, stagger)
    "two ranks, small batches, arriving one by one": (2, ["engine.max_running_requests=5"], 3),
    "two ranks over gloo, prompts in chunks": (
        2, ["dispatch.backend=collective", "engine.max_batch_tokens=24", "engine.max_running_requests=16"], None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture(scope="module")
def folders(fp8_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    by_channel = write_fp8_checkpoint(tmp_path_factory.mktemp("by channel") / "model", PER_CHANNEL)
    mxfp4 = write_mxfp4_checkpoint(tmp_path_factory.mktemp("mxfp4"))
    return {"fp8": fp8_folder, "fp8 by channel": by_channel, "mxfp4": mxfp4}


def model_of(form: str, folders: dict[str, Path]) -> list[str]:
    """Returns overrides for the model that a form is tried on: a checkpoint that is stored so, or the demo model."""
    return [f"model.path={folders[form]}"] if form in folders else []


def served(overrides: list[str]) -> ServedModel:
    config = load_config(overrides=["cache.memory_gib=0.05", *overrides])
    return build_served_model(config, EpGroup(0, 1, torch.device("cpu")))


def logits(model: ServedModel, ids: list[int]) -> torch.Tensor:
    runner = Runner(model.decoder, model.numerics)
    request = runner.request("only", ids)
    runner.prefill([request])
    return runner.stacked(request)


def setting(form: str) -> list[str]:
    activations = ["model.activations=float"] if form == "int4 by float" else []
    return [f"model.expert_weights={form.split()[0]}", *activations]


def errors_against_dense(form: str, folder: Path, *overrides: str, block: Fp8Block = BLOCKS) -> list[float]:
    """Returns the relative errors of logits of some prompts with experts in this form."""
    # All experts of the tiny model work on each token: a near-tie of the gate would let one rounding choose another.
    every = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    model = [*model_of(form, {"fp8": write_fp8_checkpoint(folder, block, **every)}), *overrides]
    dense, quantised = (served([*model, *setting(kept)]) for kept in ("dense", form))
    errors = []
    for ids in prompts_with_shared_beginnings(4, dense.spec.vocab_size, max_len=60):
        wanted, got = logits(dense, ids), logits(quantised, ids)
        errors.append(float((got - wanted).norm() / wanted.norm()))
    print(f"{form}: relative errors of logits {[f'{error:.4f}' for error in errors]}")
    return errors


@pytest.mark.parametrize(("form", "block"), BY_TORCH)
def test_logits_by_torch_stay_near_those_of_dense_experts(form: str, block: Fp8Block, tmp_path: Path) -> None:
    errors = errors_against_dense(form, tmp_path / "model", "engine.cpu_kernels=torch", block=block)
    assert min(errors) > 0, "the setting changed nothing"
    assert max(errors) < (FP8_EXPERT_LOGITS if form == "fp8" else INT8_EXPERT_LOGITS)


def test_the_kernels_widen_fp8_experts_to_the_values_of_dense_ones(tmp_path: Path) -> None:
    assert errors_against_dense("fp8", tmp_path / "model") == [0.0] * 4


def test_the_kernels_round_weights_to_int8_and_nothing_else(tmp_path: Path) -> None:
    errors = errors_against_dense("int8", tmp_path / "model")
    assert min(errors) > 0, "the setting changed nothing"
    assert max(errors) < INT8_EXPERT_LOGITS


@pytest.mark.parametrize("form", ["int4", "int4 by float"])
def test_the_kernels_round_weights_to_int4(form: str, tmp_path: Path) -> None:
    errors = errors_against_dense(form, tmp_path / "model")
    assert min(errors) > 0, "the setting changed nothing"
    assert max(errors) < INT4_EXPERT_LOGITS


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_ranks_batches_or_placement(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    overrides = [*PLAIN, *model_of(form, folders), *setting(form)]
    spec = read_spec(model_dir(load_config(overrides=overrides).model))
    requests = submits_of(prompts_with_shared_beginnings(NUM_PROMPTS, spec.vocab_size, max_len=40), GREEDY)
    expected = serve(1, requests, overrides)
    assert len(expected.tokens) == NUM_PROMPTS
    for num_ranks, more, stagger in WAYS.values():
        same(serve(num_ranks, requests, [*overrides, *more], stagger), expected)
    rows = shuffled_placement(spec, spec.num_logical + 4)
    placed = serve(2, requests, [*overrides, write_placement(tmp_path / "placement.json", rows)])
    same(placed, expected)
    assert (np.array(placed.slot_rows).sum(axis=1) > 0).all()
    dense = serve(1, requests, [*PLAIN, *model_of(form, folders), "model.expert_weights=dense"])
    if form not in ROUNDED:
        same(dense, expected)  # the kernels widen FP8 and MXFP4 values exactly
        return
    with pytest.raises(AssertionError, match="requests differ"):
        same(dense, expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_server_says_how_experts_are_kept(form: str, folders: dict[str, Path]) -> None:
    said = served([*model_of(form, folders), *setting(form)]).info["expert_weights"]
    assert said.startswith(form.split()[0])
    assert ("not the checkpoint's numbers" in said) == (form in ROUNDED)
    assert ("rounded to int8" in said) == (form == "int4")
    if form in ROUNDED:
        return
    auto = [served([*model_of(form, folders), *by]).info["expert_weights"] for by in ([], ["engine.cpu_kernels=torch"])]
    assert auto[0].startswith(form.split()[0]), "by the kernels"
    assert auto[1].startswith("dense"), "by torch on a CPU"


def test_a_form_that_the_model_cannot_have_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="the checkpoint is not FP8"):
        served(["model.expert_weights=fp8"])
    with pytest.raises(ConfigError, match="only the compiled CPU kernels multiply it"):
        served(["model.expert_weights=int4", "engine.cpu_kernels=torch"])
    with pytest.raises(ConfigError, match=r"model.activations is int8 but experts are kept as dense"):
        served(["model.activations=int8"])
