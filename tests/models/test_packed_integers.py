"""Checkpoints of GPTQ, AWQ and compressed-tensors: the logits of their values in float32, and refusals by name."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.config import load_config
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.launcher.preflight import look_for_files
from moe_serve.models.decoder.moe_decoder import MoeDecoder
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import StoredWeights
from moe_serve.models.weights import load_weights
from tests.models.packed_checkpoint import Packing, change_tensor, write_packed_checkpoint
from tests.models.runner import Runner, decoder_with, load_decoder, share_in_groups
from tests.tolerance import GROUPS_BY_INT8, relative_error

PACKINGS = (
    Packing("gptq"),
    Packing("gptq", symmetric=True, group=64, version_2=True),
    Packing("gptq", act_order=True),
    Packing("gptq", bits=8, group=-1),
    Packing("awq", group=64),
    Packing("compressed-tensors", symmetric=True),
    Packing("compressed-tensors", group=64),
    Packing("compressed-tensors", act_order=True),
    Packing("compressed-tensors", bits=8, group=-1, symmetric=True),
    Packing("compressed-tensors", bits=8, group=-1),
)


def logits(folder: Path, numerics: Numerics, decoder: MoeDecoder | None = None) -> torch.Tensor:
    ids = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    runner = Runner(decoder or load_decoder(folder, numerics, moe_layer=MoeLayer), numerics)
    request = runner.request("one", ids)
    runner.prefill([request])
    return runner.stacked(request)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_logits_have_the_bits_of_the_values_in_float32(packing: Packing, tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", packing)
    look_for_files(load_config(overrides=[f"model.path={folder}"]))
    for numerics in (COMPILED, FAST):
        assert torch.equal(logits(folder, numerics), logits(tmp_path / "model-values", numerics))


@pytest.mark.parametrize("packing", [each for each in PACKINGS if not each.act_order], ids=str)
def test_experts_keep_their_codes_and_scales(packing: Packing, tmp_path: Path) -> None:
    # All experts work on each token: a near-tie of the gate would let one rounding choose another.
    folder = write_packed_checkpoint(tmp_path / "model", packing, num_experts_per_tok=4)
    wanted = logits(tmp_path / "model-values", COMPILED)
    for activations, most in (("float", 0), ("int8", GROUPS_BY_INT8)):
        share = share_in_groups(folder, activations)
        decoder = decoder_with(MoeLayer, share.spec, load_weights(folder, share), COMPILED)
        assert relative_error(logits(folder, COMPILED, decoder), wanted) <= most


def test_experts_whose_columns_are_scattered_over_groups_are_dequantised(tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", Packing("gptq", act_order=True))
    assert not StoredWeights.of(read_spec(folder), folder).groups


def test_scattered_columns_that_the_configuration_does_not_mention_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", Packing("gptq"))
    change_tensor(folder, EXPERT + "g_idx", lambda t: t.flip(0))
    share = share_in_groups(folder, "float")
    with pytest.raises(ModelError, match=r"experts.2.down_proj.weight: columns are scattered.*expert_weights: dense"):
        load_weights(folder, share)


EXPERT = "model.layers.1.mlp.experts.2.down_proj."  # [192, 64]
BAD_PIECES: dict[str, tuple[Packing, str, Any, str]] = {
    "zeros are missing": (Packing("gptq"), "qzeros", lambda t: None, r"qzeros is missing"),
    "scales are missing": (Packing("gptq"), "scales", lambda t: None, r"scales is missing"),
    "scales of AWQ are missing": (Packing("awq"), "scales", lambda t: None, r"scales is missing"),
    "scales of compressed-tensors are missing": (
        Packing("compressed-tensors"), "weight_scale", lambda t: None, r"weight_scale is missing",
    ),
    "half a weight": (Packing("gptq"), "qweight", lambda t: t[:-1], r"qweight I32 \[7, 192\], expected I32 \[8"),
    "scales of another group": (Packing("awq"), "scales", lambda t: t[:1], r"scales F16 \[1, 192\], expected F16 \[2"),
    "weights in int64": (Packing("awq"), "qweight", lambda t: t.long(), r"qweight I64 \[64, 24\], expected I32"),
    "an index beyond the groups": (
        Packing("gptq", act_order=True), "g_idx", lambda t: t + 1, r"g_idx holds the group 2 of 2, counted from 0",
    ),
    "an index below 0": (
        Packing("compressed-tensors", act_order=True), "weight_g_idx", lambda t: t - 1, r"weight_g_idx holds the group",
    ),
    "no order": (
        Packing("compressed-tensors", act_order=True), "weight_g_idx", lambda t: None, r"weight_g_idx is missing",
    ),
    "no zeros": (Packing("compressed-tensors"), "weight_zero_point", lambda t: None, r"weight_zero_point is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PIECES)
def test_pieces_that_do_not_fit_are_named_before_anything_starts(case: str, tmp_path: Path) -> None:
    packing, end, change, message = BAD_PIECES[case]
    folder = write_packed_checkpoint(tmp_path / "model", packing)
    change_tensor(folder, EXPERT + end, change)
    with pytest.raises(ModelError, match=EXPERT + message):
        look_for_files(load_config(overrides=[f"model.path={folder}"]))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_file_that_was_cut_is_named_before_anything_starts(method: str, tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", Packing(method))
    (file,) = folder.glob("*.safetensors")
    for length in (file.stat().st_size - 1, file.stat().st_size // 2, 100, 4, 0):
        os.truncate(file, length)
        with pytest.raises(ModelError, match=re.escape(str(file))):
            look_for_files(load_config(overrides=[f"model.path={folder}"]))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_group_that_does_not_divide_a_row_is_named(method: str, tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", Packing(method, group=32))
    config = json.loads((folder / "config.json").read_text())
    coding = config["quantization_config"]
    if method == "compressed-tensors":
        coding = coding["config_groups"]["group_0"]["weights"]
    coding["group_size"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj.weight has rows of 192, which do not divide into groups of 40"):
        look_for_files(load_config(overrides=[f"model.path={folder}"]))


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path / "model", Packing("awq"))
    change_tensor(folder, EXPERT + "scales", lambda scales: torch.full_like(scales, torch.nan))
    with pytest.raises(ModelError, match=EXPERT + "qweight holds numbers of|" + EXPERT + "qweight holds numbers that"):
        logits(folder, FAST)


REFUSED: dict[str, tuple[Packing, dict[str, Any], str]] = {
    "three bits": (Packing("gptq"), {"bits": 3}, "gptq weights of 3 bits .4 and 8 are. is not supported"),
    "marlin": (Packing("gptq"), {"checkpoint_format": "marlin"}, "GPTQ in the form 'marlin' .gptq and gptq_v2 are."),
    "gemv": (Packing("awq"), {"version": "gemv"}, "AWQ of 4 bits in the form 'gemv'"),
    "own bits": (Packing("gptq"), {"dynamic": {"+:x": {"bits": 8}}}, "GPTQ with modules of their own bits"),
    "a group of -3": (Packing("awq"), {"group_size": -3}, "group_size is -3, expected a whole number of at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_codings_that_are_not_read_are_named(case: str, tmp_path: Path) -> None:
    packing, changes, message = REFUSED[case]
    folder = write_packed_checkpoint(tmp_path / "model", packing)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_spec(folder)
