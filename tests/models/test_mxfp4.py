"""MXFP4 experts of gpt-oss: every value exact, against transformers' reading of the same checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.models.families.registry import read_spec
from moe_serve.models.mxfp4 import dequantise_mxfp4
from moe_serve.models.stored_weights import StoredWeights
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import load_weights
from tests.models.families import oracle_logits
from tests.models.runner import Runner, load_decoder, one_rank
from tests.tolerance import LOGITS, relative_error

Oracle = Callable[[str], tuple[Any, Path]]


def random_mxfp4(num_experts: int, n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns blocks and scales, of values of about 1 / sqrt(k)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 124, (num_experts, n, k // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def folder(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of gpt-oss whose experts are stored in MXFP4."""
    plain, path = oracle("gpt_oss")[1], tmp_path_factory.mktemp("mxfp4")
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors = load_file(plain / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if name.endswith("_proj") and ".experts." in name]):
        num_experts, k, n = tensors.pop(name).shape
        tensors[name + "_blocks"], tensors[name + "_scales"] = random_mxfp4(num_experts, n, k, seed)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_every_byte_under_every_scale_is_the_number_of_the_format() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    got = dequantise_mxfp4(blocks, scales)
    assert got.dtype == torch.bfloat16

    def number(code: int) -> float:
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))

    one_row = torch.tensor([number(code) for byte in range(256) for code in (byte & 15, byte >> 4)]).double()
    wanted = one_row * 2.0 ** (torch.arange(255)[:, None].double() - 127)
    representable = wanted.abs() < 2.0**128  # the largest scales reach beyond bfloat16, as beyond float32
    assert torch.equal(got.double()[representable], wanted[representable])
    assert got[~representable].isinf().all()
    assert dequantise_mxfp4(blocks[:1], torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all()


def test_logits_match_transformers_on_the_same_checkpoint(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    how = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how, attn_implementation="eager"
    ).eval()
    ids = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = oracle_logits(model, ids)
    for numerics in (FAST, COMPILED):
        runner = Runner(load_decoder(folder, numerics, moe_layer=MoeLayer), numerics)
        request = runner.request("request", ids)
        runner.prefill([request], chunk=40)
        assert relative_error(runner.stacked(request), wanted) < LOGITS


def test_ranks_keep_the_values_exactly_in_bfloat16_and_read_their_own_bytes_only(folder: Path) -> None:
    spec, tensors = read_spec(folder), load_file(folder / "model.safetensors")
    stored = StoredWeights.of(spec, folder)
    assert stored.experts == torch.bfloat16
    wide = load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu"))
    for layer in spec.moe_layer_ids:
        block = f"model.layers.{layer}.mlp.experts."
        rows = dequantise_mxfp4(*(tensors[f"{block}gate_up_proj_{part}"][3] for part in ("blocks", "scales")))
        assert torch.equal(wide.experts[layer]["gate_up"][3], torch.cat((rows[0::2], rows[1::2])).float())
        bias = tensors[block + "gate_up_proj_bias"][3]
        assert torch.equal(wide.experts[layer]["gate_up_bias"][3], torch.cat((bias[0::2], bias[1::2])))
    packed = load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", stored=stored))
    of_layer = packed.experts[0]
    assert {name: tensor.dtype for name, tensor in of_layer.items()} == {
        "gate_up": torch.bfloat16, "down": torch.bfloat16, "gate_up_bias": torch.float32, "down_bias": torch.float32,
    }  # fmt: skip
    file_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert wide.bytes_read == packed.bytes_read == file_bytes


def test_blocks_of_another_dtype_and_a_config_without_mxfp4_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors | {name: tensors[name].bfloat16()}, tmp_path / "model.safetensors")
    share = WeightShare(read_spec(folder), one_rank(read_spec(folder)), 0, torch.float32, "cpu")
    with pytest.raises(ModelError, match=rf"{name} \(BF16\)"):
        load_weights(tmp_path, share)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    spec = read_spec(tmp_path)
    with pytest.raises(ModelError, match=r"6 missing: .*gate_up_proj, .*unknown: .*_blocks"):
        load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu"))
