"""MXFP4 experts of gpt-oss: every value exact, against transformers' reading of the same checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.kernels.quantised import dequantise_mxfp4
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import ExpertReloader, ExpertToRead, dummy_weights, load_weights
from tests.kernels.cpu.unpacking import unpack, unpack_gate_up
from tests.models.families import Oracle, oracle_logits
from tests.models.mxfp4_checkpoint import MXFP4_CONFIG, random_mxfp4
from tests.models.runner import Runner, decoder_with, load_decoder, one_rank
from tests.models.test_weights_of_experts import same_bytes
from tests.tolerance import LOGITS, relative_error


@pytest.fixture(scope="module")
def folder(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of gpt-oss whose experts are stored in MXFP4."""
    plain, path = oracle("gpt_oss")[1], tmp_path_factory.mktemp("mxfp4")
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | MXFP4_CONFIG))
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
    got = []
    for decoder, numerics in (
        (load_decoder(folder, FAST, moe_layer=MoeLayer), FAST),
        (load_decoder(folder, COMPILED, moe_layer=MoeLayer), COMPILED),
        (decoder_with(MoeLayer, read_spec(folder), load_weights(folder, kept_share(folder)), COMPILED), COMPILED),
    ):
        runner = Runner(decoder, numerics)
        request = runner.request("request", ids)
        runner.prefill([request], chunk=40)
        got.append(runner.stacked(request))
        assert relative_error(got[-1], wanted) < LOGITS
    assert torch.equal(got[2], got[1]), "kept as stored, and widened to bfloat16"


def kept_share(folder: Path, rows: list[list[int]] | None = None) -> WeightShare:
    """Returns the share of a rank that keeps MXFP4 as it is. rows: of the placement; None: one rank has all in order"""
    spec = read_spec(folder)
    placement = one_rank(spec)
    if rows is not None:
        placement = Placement(rows, spec.num_logical, 2, spec.moe_layer_ids, allow_lost=True)
    stored = StoredWeights.of(spec, folder)
    return WeightShare(spec, placement, 0, torch.float32, "cpu", "mxfp4", stored)


def test_slots_hold_the_stored_bytes_packed_with_gate_before_up(folder: Path) -> None:
    share, tensors = kept_share(folder), load_file(folder / "model.safetensors")
    spec, loaded = share.spec, load_weights(folder, share)
    hidden, width = spec.hidden, spec.moe_intermediate
    for layer, of_layer in loaded.experts.items():
        assert {name: (tuple(t.shape[1:]), t.dtype) for name, t in of_layer.items()} == share.slot_form.tensors
        block = f"model.layers.{layer}.mlp.experts."
        for expert in range(spec.num_logical):
            for ending, of, per in (("", "blocks", 2), ("_scale", "scales", 32)):
                rows = tensors[f"{block}gate_up_proj_{of}"][expert].flatten(1)
                gate_up, down = (of_layer[name + ending][expert] for name in ("gate_up", "down"))
                assert torch.equal(unpack_gate_up(gate_up, width, hidden // per), torch.cat((rows[0::2], rows[1::2])))
                assert torch.equal(
                    unpack(down, hidden, width // per), tensors[f"{block}down_proj_{of}"][expert].flatten(1)
                )
    wide = replace(share, form="dense").slot_form.num_bytes
    biases = 4 * (2 * width + hidden)
    assert share.slot_form.num_bytes - biases <= (wide - biases) * (4.25 / 16) * 1.02, "k is padded to even numbers"
    assert loaded.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("is_dummy", [False, True], ids=["checkpoint", "dummy"])
def test_experts_read_again_have_the_bytes_of_the_first_load(folder: Path, is_dummy: bool) -> None:
    num_logical = read_spec(folder).num_logical
    row = [*range(1, num_logical), -1, 0, *[-1] * (num_logical - 1)]  # of two ranks; the first one's slots change
    source = None if is_dummy else folder

    def stores(rows: list[list[int]]) -> list[ExpertStore]:
        share = kept_share(folder, rows)
        weights = dummy_weights(share, 3) if source is None else load_weights(source, share)
        return [weights.store(layer) for layer in share.spec.moe_layer_ids]

    num_layers = read_spec(folder).num_moe_layers
    got, wanted_rows = stores([row] * num_layers), [row.copy() for _ in range(num_layers)]
    read = [ExpertToRead(0, 0, num_logical - 1), ExpertToRead(num_layers - 1, 0, 1)]
    ExpertReloader(kept_share(folder, [row] * num_layers), source, seed=3).read(read, got)
    for each in read:
        wanted_rows[each.layer_row][each.slot] = each.expert
    for store, right in zip(got, stores(wanted_rows), strict=True):
        assert store.form == "mxfp4"
        for slot in range(store.num_slots):
            for name, tensor in right.slot(slot).items():
                assert same_bytes(store.slot(slot)[name], tensor), (slot, name)


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
