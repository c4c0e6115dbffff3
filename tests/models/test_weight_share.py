"""The dtypes in which the compiled kernels keep weights are those of the checkpoint, and no value is rounded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.forms import PER_CHANNEL
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_tensors
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import load_weights
from tests.models.families import Oracle
from tests.models.fp8_checkpoint import QWEN3_CONFIG, write_fp8_checkpoint
from tests.models.runner import Runner, decoder_with, load_decoder, one_rank
from tests.models.test_weights import fuse_experts, rewritten
from tests.models.test_weights_of_experts import fused
from tests.tolerance import FLOAT32, LOGITS, relative_error


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_bfloat16_checkpoint_stays_so_but_for_vectors_and_for_what_it_stores_in_float32(
    is_fused: bool, oracle: Oracle, tmp_path: Path
) -> None:
    folder = oracle("deepseek_v3")[1]
    spec = read_spec(folder)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
        return fuse_experts(spec)(tensors) if is_fused else tensors

    half = rewritten(folder, tmp_path / "half", change)
    stored = StoredWeights.of(spec, half)
    assert stored.experts == torch.bfloat16
    assert not stored.keeps_fp8
    loaded = load_weights(half, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "dense", stored))
    wide = load_weights(half, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu"))
    for plan in dense_tensors(spec):
        is_half = plan.kind == "matrix" and plan.name != "embed"
        assert loaded.dense[plan.name].dtype == (torch.bfloat16 if is_half else torch.float32), plan.name
        assert torch.equal(loaded.dense[plan.name].float(), wide.dense[plan.name]), plan.name
    assert all(tensor.dtype == torch.bfloat16 for tensors in loaded.experts.values() for tensor in tensors.values())


def test_one_expert_in_float32_keeps_all_in_float32(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("mixtral")[1]
    spec = read_spec(folder)
    name = next(name for name in load_file(folder / "model.safetensors") if ".experts.3." in name)
    mixed = rewritten(
        folder, tmp_path / "mixed", lambda tensors: {n: t if n == name else t.bfloat16() for n, t in tensors.items()}
    )
    assert StoredWeights.of(spec, mixed).experts == torch.float32


def test_fp8_is_kept_where_kernels_take_its_blocks_and_becomes_float32_elsewhere(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path / "plain")
    spec = read_spec(folder)
    stored = StoredWeights.of(spec, folder)
    assert stored.keeps_fp8
    in_fp8 = {name.rpartition(".")[2] for name, dtype in stored.dense.items() if dtype == torch.float8_e4m3fn}
    assert in_fp8 == {"q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down"}, "a block of q_kv_a holds both"
    assert set(stored.dense.values()) == {torch.float32, torch.float8_e4m3fn}
    straddling = rewritten(folder, tmp_path / "fused", lambda _: fused(folder, spec))
    assert not StoredWeights.of(spec, straddling).keeps_fp8, "width 136: a block would hold rows of gate and up"


def test_without_weights_the_configuration_says_how_they_are_stored(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("qwen3_moe")[1]
    for dtype, experts in (("bfloat16", torch.bfloat16), ("float16", torch.float32), (None, torch.float32)):
        written = rewritten(folder, tmp_path / str(dtype), dict, dtype=dtype, torch_dtype=dtype)
        spec = read_spec(written)
        assert StoredWeights.of(spec, None).experts == experts
        assert StoredWeights.of(spec, None).dense["layers.0.qkv"] == experts
        assert StoredWeights.of(spec, None).dense["norm"] == torch.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_decoder_computes_the_same_from_weights_stored_in_bfloat16(name: str, oracle: Oracle, tmp_path: Path) -> None:
    folder, ids = oracle(name)[1], [3 + 7 * i % 250 for i in range(40)]
    logits = []
    for dtype in (torch.bfloat16, torch.float32):

        def change(tensors: dict[str, torch.Tensor], dtype: torch.dtype = dtype) -> dict[str, torch.Tensor]:
            return {name: tensor.bfloat16().to(dtype) for name, tensor in tensors.items()}

        stored = rewritten(folder, tmp_path / str(dtype), change)
        runner = Runner(load_decoder(stored, COMPILED, moe_layer=MoeLayer), COMPILED)
        request = runner.request("a", ids)
        runner.prefill([request])
        logits.append(runner.stacked(request))
    assert relative_error(*logits) < FLOAT32


@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj", "layers.1.mlp.shared_experts.down_proj"])
def test_an_mlp_whose_matrices_are_stored_unlike_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    """As where a quantised checkpoint leaves some projections in bfloat16: one kernel reads all three."""
    folder, ids = write_fp8_checkpoint(tmp_path / "model", PER_CHANNEL), [3 + 7 * i % 250 for i in range(40)]

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = f"model.{name}.weight"
        tensors[weight] = (tensors[weight].float() * tensors.pop(weight + "_scale").float()).bfloat16()
        return tensors

    unlike = rewritten(folder, tmp_path / "unlike", change)
    logits = []
    for numerics in (FAST, COMPILED):
        runner = Runner(load_decoder(unlike, numerics, moe_layer=MoeLayer), numerics)
        request = runner.request("a", ids)
        runner.prefill([request])
        logits.append(runner.stacked(request))
    assert relative_error(*logits) < LOGITS


@pytest.mark.parametrize(
    ("family", "sizes", "kept"),
    [
        ("qwen3_moe", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}, True),
        ("qwen3_moe", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}, True),
        ("qwen3_moe", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 192}, False),
        ("deepseek_v3", {"q_lora_rank": 128, "kv_lora_rank": 56, "rope_interleave": False}, True),
        ("deepseek_v3", {"q_lora_rank": 128, "kv_lora_rank": 60, "rope_interleave": False}, False),
        ("deepseek_v3", {"q_lora_rank": 100}, False),
    ],
    ids=str,
)
def test_projections_in_blocks_compute_the_bits_of_dequantised_ones(
    family: str, sizes: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    """Rows are reordered for the rotation, and blocks of scales are not: kept only where no row leaves its block."""
    made = {"qwen3_moe": QWEN3_CONFIG, "deepseek_v3": {}}[family]
    folder = write_fp8_checkpoint(tmp_path / "model", **made, **sizes)
    spec = read_spec(folder)
    stored = StoredWeights.of(spec, folder)
    name = "layers.0.qkv" if family == "qwen3_moe" else "layers.0.q_kv_a"
    assert stored.dense[name] == (torch.float8_e4m3fn if kept else torch.float32)
    assert stored.dense["layers.0.o"] == torch.float8_e4m3fn
    logits = []
    for dense in (stored.dense, dict.fromkeys(stored.dense, torch.float32)):
        share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "fp8", replace(stored, dense=dense))
        weights = load_weights(folder, share)
        assert sum(tensor.nbytes for tensor in weights.dense.values()) == sum(share.dense_bytes.values())
        runner = Runner(decoder_with(MoeLayer, spec, weights, COMPILED), COMPILED)
        request = runner.request("a", [3 + 7 * i % 250 for i in range(40)])
        runner.prefill([request])
        logits.append(runner.stacked(request))
    assert torch.equal(*logits)
