"""FP8 checkpoints in every published form mean values times scales, and clear messages say what does not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, BlockScaled, Fp8Block
from moe_serve.kernels.numerics import COMPILED
from moe_serve.kernels.quantised import dequantize_weight
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import StoredWeights, WeightShare, fp8_projections
from moe_serve.models.weights import dequantise, dummy_weights, load_weights, no_weights
from tests.models.families import LIGHTNING_BUFFERS, V4, Oracle, make_random, oracle_logits, save
from tests.models.fp8_checkpoint import CONFIG, SCALES, compressed, quantise_whole_rows, write_fp8_checkpoint
from tests.models.runner import Runner, decoder_with, load_decoder, one_rank
from tests.models.test_weights import assert_equal, load, placed, rewritten
from tests.tolerance import LOGITS, relative_error


def to_fp8(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (fp8 values, scales, what they mean in float32), block by block as the format defines it."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            square = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[square].abs().max() / 448
            values[square] = (weight[square] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[square] = values[square].float() * scales[i, j]
    return values, scales, meant


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_fp8_checkpoints_mean_what_their_blocks_say(fused: bool, oracle: Oracle, tmp_path: Path) -> None:
    """Blocks of 16, so that the tiny model has several, partial ones too (24 rows of the compressed projection)."""
    folder = oracle("deepseek_v3")[1]
    spec = read_spec(folder)
    names: list[str] = []
    meant: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [n for n in tensors if "_proj" in n and "norm" not in n]:
            values, scales, meant[name] = to_fp8(tensors[name], 16)
            tensors[name], tensors[name + "_scale_inv"] = values, scales
            names.append(name)
        return fuse(tensors) if fused else tensors

    def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in spec.moe_layer_ids:
            block = f"model.layers.{layer}.mlp.experts."
            for suffix, theirs in (("", ".weight"), ("_scale_inv", ".weight_scale_inv")):
                gate, up, down = (
                    torch.stack([tensors.pop(f"{block}{e}.{n}{theirs}").view(torch.uint8) for e in range(8)])
                    for n in ("gate_proj", "up_proj", "down_proj")
                )
                dtype = torch.float32 if suffix else torch.float8_e4m3fn
                tensors[block + "gate_up_proj" + suffix] = torch.cat((gate, up), dim=1).view(dtype)
                tensors[block + "down_proj" + suffix] = down.view(dtype)
        return tensors

    quantisation = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    fp8 = rewritten(folder, tmp_path / "fp8", quantise, **quantisation)
    wanted = rewritten(folder, tmp_path / "meant", lambda tensors: tensors | meant)
    assert len(names) > 50
    assert_equal(load(fp8, placed(spec, 2), 1), load(wanted, placed(spec, 2), 1))


OTHERS = (
    "minimax_m2", "glm4_moe", "qwen2_moe", "granitemoeshared", "olmoe", "dots1", "longcat_flash", "axk2", "minimax",
    "cohere2_moe", "laguna", "mimo_v2_flash", "deepseek_v4",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_fp8_checkpoints_of_other_families_mean_what_their_blocks_say(
    name: str, oracle: Oracle, tmp_path: Path
) -> None:
    folder = oracle(name)[1]
    spec = read_spec(folder)
    meant: dict[str, Tensor] = {}
    of_v4 = "^head", r"\.ape", "hc_", "tid2eid"
    others = "|".join(("embed", "lm_head", "gate.weight", *of_v4, *LIGHTNING_BUFFERS))

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for key in [n for n, t in tensors.items() if t.dim() > 1 and not re.search(others, n)]:
            parts = [to_fp8(matrix, 16) for matrix in tensors[key].view(-1, *tensors[key].shape[-2:])]
            values, scales, meant[key] = (
                torch.stack([part[i].view(torch.uint8) if i == 0 else part[i] for part in parts]) for i in range(3)
            )
            shape = tensors[key].shape
            tensors[key] = values.view(torch.float8_e4m3fn).view(shape)
            tensors[key + "_scale_inv"] = scales.view(*shape[:-2], *scales.shape[-2:])
            meant[key] = meant[key].view(shape)
        return tensors

    quantisation = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    fp8 = rewritten(folder, tmp_path / "fp8", quantise, **quantisation)
    wanted = rewritten(folder, tmp_path / "meant", lambda tensors: tensors | meant)
    assert len(meant) > 8 * spec.num_layers or name == "granitemoeshared"
    assert_equal(load(fp8, placed(spec, 2), 1), load(wanted, placed(spec, 2), 1))


def test_projections_of_deepseek_v4_stay_in_fp8(tmp_path: Path) -> None:
    widths = {"hidden_size": 256, "head_dim": 128, "q_lora_rank": 128, "index_head_dim": 128, "index_n_heads": 2}
    folder = save(make_random("deepseek_v4", V4 | widths), tmp_path / "model")
    meant: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored = dict(tensors)
        for key in [key for key in tensors if re.search(r"\b(w[qo]_[ab]|wkv|wgate|w[123]|weights_proj)\.weight$", key)]:
            stored[key], stored[key + "_scale_inv"], meant[key] = to_fp8(tensors[key])
        return stored

    how = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    fp8 = rewritten(folder, tmp_path / "fp8", quantise, **how)
    plain = rewritten(folder, tmp_path / "meant", lambda tensors: tensors | meant)
    stored = StoredWeights.of(read_spec(fp8), fp8)
    kept = {name.removeprefix("layers.1.") for name, dtype in stored.dense.items() if dtype == torch.float8_e4m3fn}
    assert kept >= {"attend_in", "q_b", "index_q_b", "o", "shared_gate_up", "shared_down"}
    assert stored.keeps_fp8
    logits = []
    for path in (fp8, plain):
        runner = Runner(load_decoder(path, COMPILED), COMPILED)
        request = runner.request("request", list(range(3, 63)))
        runner.prefill([request], chunk=9)
        logits.append(runner.stacked(request))
    assert torch.equal(*logits), "kept as stored, and widened to float32"


def test_blocks_of_compressed_tensors_mean_what_deepseeks_do(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path / "deepseek")

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("_scale_inv", "_scale"): tensor for name, tensor in tensors.items()}

    theirs = rewritten(
        folder, tmp_path / "compressed", renamed, **compressed(strategy="block", block_structure=[128, 128])
    )
    spec = read_spec(folder)
    assert read_spec(theirs) == spec
    assert_equal(load(theirs, placed(spec, 2), 1), load(folder, placed(spec, 2), 1))


@pytest.mark.parametrize("block", SCALES.values(), ids=SCALES)
def test_gpus_keep_projections_as_they_are_stored(block: Fp8Block, tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path, block)
    spec = read_spec(folder)
    names = fp8_projections(spec, folder)
    kinds = {name.rpartition(".")[2] for name in names}
    assert kinds >= {"q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down"}
    assert names == fp8_projections(spec, None), "all of them are in FP8 here"
    share = WeightShare(spec, one_rank(spec), 0, torch.bfloat16, "cpu", "fp8", fp8_dense=names)
    kept, wide = load_weights(folder, share).dense, load_weights(folder, replace(share, fp8_dense=frozenset())).dense
    assert kept.keys() == wide.keys() | {f"{name}_scale" for name in names}
    assert kept.keys() == no_weights(share).dense.keys() == dummy_weights(share).dense.keys()
    assert sum(share.dense_bytes.values()) == sum(each.nbytes for each in kept.values())
    for name in names:
        parts = 2 if name.endswith("gate_up") else 1
        weight = BlockScaled(kept[name][None], kept[f"{name}_scale"][None], parts)
        assert torch.equal(dequantize_weight(weight)[0].bfloat16(), wide[name]), name


@pytest.mark.parametrize(
    "how",
    [{"strategy": "group", "group_size": 128}, {"num_bits": 4, "type": "int", "strategy": "group"},
     {"strategy": "channel", "type": "int"}, {"strategy": "block", "block_structure": [128, 64]},
     {"strategy": "block", "block_structure": [0, 0]}, {"strategy": "block", "block_structure": "128"}],
    ids=str,
)  # fmt: skip
def test_other_kinds_of_compressed_tensors_are_refused_with_what_to_use(how: dict[str, object], tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path / "deepseek")
    theirs = rewritten(folder, tmp_path / "compressed", dict, **compressed(**how))
    with pytest.raises(ModelError, match=r"compressed-tensors with weights .* use the model's checkpoint with quant"):
        read_spec(theirs)


def test_groups_that_differ_and_transforms_of_weights_are_refused(tmp_path: Path) -> None:
    how = compressed(strategy="channel")["quantization_config"]
    other = compressed(strategy="tensor")["quantization_config"]["config_groups"]["group_0"]
    two = how | {"config_groups": how["config_groups"] | {"group_1": other}}
    folder = write_fp8_checkpoint(tmp_path / "model", PER_CHANNEL)
    for changed, message in (
        (two, "the same for all groups"),
        (how | {"config_groups": {}}, "the same for all groups"),
        (how | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
    ):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": changed}))
        with pytest.raises(ModelError, match=message):
            read_spec(folder)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns Llama-4's tensors with a layer's experts taken apart, as its quantised ones are published."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        block, _, matrix = name.rpartition(".")
        if not block.endswith(".experts") or tensor.dim() != 3:
            out[name] = tensor
            continue
        for expert, values in enumerate(tensor.mT):
            halves = zip(("gate_proj", "up_proj"), values.chunk(2), strict=True)
            parts = dict(halves) if matrix == "gate_up_proj" else {"down_proj": values}
            out |= {f"{block}.{expert}.{part}.weight": rows for part, rows in parts.items()}
    return out


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `apart`."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] + ".experts." for name in tensors.keys() - out.keys()}:

        def all_of(part: str, block: str = block) -> list[Tensor]:
            count = sum(name.startswith(block) and name.endswith(part + ".weight") for name in tensors)
            return [tensors[f"{block}{expert}.{part}.weight"].t() for expert in range(count)]

        gates, ups = all_of("gate_proj"), all_of("up_proj")
        out[block + "gate_up_proj"] = torch.stack([torch.cat(pair, 1) for pair in zip(gates, ups, strict=True)])
        out[block + "down_proj"] = torch.stack(all_of("down_proj"))
    return out


@pytest.mark.parametrize("block", [PER_CHANNEL, PER_TENSOR], ids=str)
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3-halves-bias", "deepseek_v3-no-q-lora", "llama4_text"]
)
def test_checkpoints_of_compressed_tensors_match_transformers_on_values_times_scales(
    name: str, block: Fp8Block, oracle: Oracle, tmp_path: Path
) -> None:
    """Written as llm-compressor does: bfloat16 scales, static scales of activations and of the cache beside them."""
    from transformers import AutoModelForCausalLM

    folder = oracle(name)[1]
    meant: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = apart(tensors)
        for key in [
            k for k, t in tensors.items() if t.dim() == 2 and not re.search(r"embed|lm_head|gate\.w|router", k)
        ]:
            tensors[key], tensors[key + "_scale"] = quantise_whole_rows(tensors[key], block)
            meant[key] = tensors[key].float() * tensors[key + "_scale"].float()
            if block == PER_TENSOR:
                tensors[key.replace(".weight", ".input_scale")] = torch.tensor([0.02])
        for cached in ("k_scale", "v_scale"):
            tensors[f"model.layers.0.self_attn.{cached}"] = torch.ones(1)
        return tensors

    halves = {"rope_interleave": False} if name.endswith("no-q-lora") else {}
    how = compressed(strategy="channel" if block == PER_CHANNEL else "tensor") | halves
    fp8 = rewritten(folder, tmp_path / "fp8", quantise, **how)
    as_trained = together if "llama" in name else dict
    plain = rewritten(folder, tmp_path / "meant", lambda tensors: as_trained(apart(tensors) | meant), **halves)
    spec = read_spec(fp8)
    assert spec.fp8_block == block
    assert len(meant) > 30
    assert_equal(load(fp8, placed(spec, 2), 1), load(plain, placed(spec, 2), 1))

    stored = StoredWeights.of(spec, fp8)
    assert stored.keeps_fp8
    share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "fp8", stored)
    in_float32 = replace(stored, dense=dict.fromkeys(stored.dense, torch.float32))
    kept, wide = load_weights(fp8, share), load_weights(fp8, replace(share, form="dense", stored=in_float32))
    in_fp8 = [each for each, tensor in kept.dense.items() if tensor.dtype == torch.float8_e4m3fn]
    assert {"layers.0.o", "layers.0.q_kv_a" if "deepseek" in name else "layers.0.qkv"} <= set(in_fp8)
    assert ("layers.0.q_b" in in_fp8) == (name in ("deepseek_v2", "deepseek_v3-halves-bias"))
    for each in in_fp8:
        assert share.dense_bytes[each] == kept.dense[each].nbytes + kept.dense[each + "_scale"].nbytes
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    got = []
    for weights in (wide, kept):
        decoder = decoder_with(MoeLayer, spec, weights, COMPILED)
        runner = Runner(decoder, COMPILED)
        request = runner.request("request", ids)
        runner.prefill([request], chunk=40)
        got.append(runner.stacked(request))
    assert relative_error(got[0], oracle_logits(model, ids)) < LOGITS
    assert torch.equal(got[0], got[1]), "kept as stored, and widened to float32"


def test_one_scale_for_a_tensor_as_autofp8_writes_it_is_a_scale_per_tensor(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path / "theirs", PER_TENSOR)
    for shape in ((), (1,), (1, 1)):

        def change(tensors: dict[str, Tensor], shape: tuple[int, ...] = shape) -> dict[str, Tensor]:
            return {n: t.float().view(shape) if n.endswith("_scale") else t for n, t in tensors.items()}

        how = {
            "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
        }
        auto = rewritten(folder, tmp_path / f"auto{len(shape)}", change, **how)
        assert read_spec(auto) == read_spec(folder)
        assert_equal(load(auto, one_rank(read_spec(auto))), load(folder, one_rank(read_spec(folder))))


def test_scales_that_do_not_fit_are_refused_with_their_file_and_what_config_says(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    for kind, wrong, message in (
        ("channels", torch.ones(3, 1), rf"{name}_scale \[3, 1\] in model.safetensors, expected \[200, 1\], as config"),
        ("channels", torch.ones(3, 1), r"config.json says a scale per channel"),
        ("channels", torch.ones(()), r"_scale \[\] in .* expected \[200, 1\]"),
        ("tensors", torch.ones(200, 1), r"_scale \[200, 1\] in .* expected \[1, 1\], .* says a scale per tensor"),
        ("blocks", torch.ones(3), r"_scale_inv \[3\] in .* says blocks of 128 x 128"),
        ("channels", torch.ones(200, 1, dtype=torch.int32), r"not supported: .*_scale \(I32, expected one of"),
        ("channels", None, rf"1 missing: {name}_scale_inv or {name}_scale\."),
    ):  # fmt: skip
        folder = write_fp8_checkpoint(tmp_path / "right", SCALES[kind])
        scale = name + ("_scale_inv" if kind == "blocks" else "_scale")

        def change(right: dict[str, Tensor], scale: str = scale, wrong: Tensor | None = wrong) -> dict[str, Tensor]:
            assert scale in right
            return {n: t for n, t in right.items() if n != scale} | ({} if wrong is None else {scale: wrong})

        changed = rewritten(folder, tmp_path / f"wrong{len(list(tmp_path.iterdir()))}", change)
        with pytest.raises(ModelError, match=message):
            load(changed, one_rank(read_spec(changed)))


def test_what_is_no_matrix_and_experts_in_another_order_are_refused_in_fp8(oracle: Oracle, tmp_path: Path) -> None:
    how = compressed(strategy="channel")
    norm = "model.norm.weight"
    folder = write_fp8_checkpoint(tmp_path / "model", PER_CHANNEL)
    changed = rewritten(folder, tmp_path / "norm", lambda t: t | {norm: t[norm].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=rf"{norm} \(FP8, which only matrices are\)"):
        load(changed, one_rank(read_spec(changed)))

    def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        fused = [name for name in tensors if name.endswith(".experts.down_proj")]
        scales = {name + "_scale": torch.ones(*tensors[name].shape[:2], 1) for name in fused}
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn) for name in fused} | scales

    llama = rewritten(oracle("llama4_text")[1], tmp_path / "llama", transposed, **how)
    with pytest.raises(ModelError, match=r"experts.down_proj \(FP8; only a tensor for each expert is read in FP8\)"):
        load(llama, one_rank(read_spec(llama)))


def test_dequantise_covers_partial_blocks_of_128() -> None:
    weight = torch.randn(576, 200, generator=torch.Generator().manual_seed(0))
    values, scales, meant = to_fp8(weight)
    assert scales.shape == (5, 2)
    assert torch.equal(dequantise(values, scales, Fp8Block(128, 128)), meant)


def test_fp8_tensors_without_scales_or_configuration_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("mixtral")[1]
    name = "model.layers.0.self_attn.o_proj.weight"

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn)}

    placement = one_rank(read_spec(folder))
    with pytest.raises(ModelError, match=r"FP8, but config\.json has no quantization_config"):
        load(rewritten(folder, tmp_path / "unsaid", quantise), placement)
    quantisation = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ModelError, match="1 missing: " + name.replace(".", r"\.") + "_scale_inv"):
        load(rewritten(folder, tmp_path / "unscaled", quantise, **quantisation), placement)


def test_experts_one_below_the_other_are_refused_in_fp8(oracle: Oracle, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: each.to(torch.float8_e4m3fn) if ".mlp." in key else each for key, each in tensors.items()}

    written = rewritten(oracle("dbrx")[1], tmp_path / "written", change, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"mlp\.w2 \(FP8; only a tensor for each expert is read in FP8\)"):
        load(written, one_rank(read_spec(written)))
