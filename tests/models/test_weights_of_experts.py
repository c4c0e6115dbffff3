"""The contents of a rank's expert slots in each form, against the checkpoint."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_serve.ep.expert_form import ExpertForm, scale_of
from moe_serve.eplb.placement import Placement
from moe_serve.errors import CapacityError, ModelError
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block
from moe_serve.kernels.quantised import quantize_int8
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import dense_tensors, expert_tensors
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import LoadedWeights, dummy_weights, empty_slots, load_weights
from tests.kernels.cpu.unpacking import unpack, unpack_gate_up
from tests.kernels.data import dequantize_int8
from tests.models.fp8_checkpoint import write_fp8_checkpoint
from tests.models.runner import one_rank

QUANTISED: list[ExpertForm] = ["fp8", "int8"]


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


def load(folder: Path, form: ExpertForm, placement: Placement | None = None, rank: int = 0) -> LoadedWeights:
    return load_weights(folder, share_of(read_spec(folder), form, placement, rank))


def share_of(spec: ModelSpec, form: ExpertForm, placement: Placement | None = None, rank: int = 0) -> WeightShare:
    return WeightShare(spec, placement or one_rank(spec), rank, torch.float32, "cpu", form)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def replicated(spec: ModelSpec) -> Placement:
    row = [3, 0, 3, -1, 5, 1, 2, 4, 6, 7, 0, -1]
    return Placement([row] * spec.num_moe_layers, spec.num_logical, 2, spec.moe_layer_ids)


def test_fp8_slots_hold_the_stored_bytes_with_gate_and_up_in_blocks_of_their_own(fp8_folder: Path) -> None:
    """Width 136: two block rows of gate, two of up; one stack of 272 rows would have three."""
    stored, spec = load_file(fp8_folder / "model.safetensors"), read_spec(fp8_folder)
    loaded = load(fp8_folder, "fp8")
    for layer in spec.moe_layer_ids:
        slots = loaded.experts[layer]
        assert slots["gate_up_scale"].shape == (8, 4, 2)
        assert slots["down_scale"].shape == (8, 2, 2)
        for expert in range(spec.num_logical):
            of = f"model.layers.{layer}.mlp.experts.{expert}."
            for name, sources in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
                values = [stored[f"{of}{source}.weight"].view(torch.uint8) for source in sources]
                scales = [stored[f"{of}{source}.weight_scale_inv"] for source in sources]
                assert same_bytes(slots[name][expert], torch.cat(values))
                assert same_bytes(slots[scale_of(name)][expert], torch.cat(scales))
    assert loaded.bytes_read == load(fp8_folder, "dense").bytes_read
    assert all(tensor.dtype == torch.float32 for tensor in loaded.dense.values())


@pytest.mark.parametrize("block", [PER_CHANNEL, PER_TENSOR], ids=str)
def test_fp8_slots_hold_the_stored_bytes_with_a_scale_for_each_row(block: Fp8Block, tmp_path: Path) -> None:
    """Gate and up have scales of their own, which a scale for the stack of both could not say."""
    folder = write_fp8_checkpoint(tmp_path / "model", block, num_hidden_layers=2)
    stored, spec = load_file(folder / "model.safetensors"), read_spec(folder)
    loaded = load(folder, "fp8")
    slots = loaded.experts[1]
    for expert, sources in product(range(spec.num_logical), (("gate_proj", "up_proj"), ("down_proj",))):
        of, name = f"model.layers.1.mlp.experts.{expert}.", "down" if len(sources) == 1 else "gate_up"
        values = [stored[f"{of}{source}.weight"] for source in sources]
        scales = [
            stored[f"{of}{source}.weight_scale"].float().flatten().expand(len(v))
            for source, v in zip(sources, values, strict=True)
        ]
        assert same_bytes(slots[name][expert], torch.cat([v.view(torch.uint8) for v in values]))
        assert same_bytes(slots[scale_of(name)][expert], torch.cat(scales))
    assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in loaded.experts[1].items()} == loaded.slot_forms[1].tensors
    drawn = dummy_weights(share_of(spec, "fp8"), 1).experts[1]
    assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in drawn.items()} == loaded.slot_forms[1].tensors
    assert StoredWeights.of(spec, None).keeps_fp8


@pytest.mark.parametrize("width", [128, 200])
def test_fused_experts_with_scales_of_channels_are_kept_alike_at_any_width(width: int, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": width, "num_hidden_layers": 2}
    folder = write_fp8_checkpoint(tmp_path / "plain", PER_CHANNEL, **sizes)
    spec = read_spec(folder)
    whole_folder = rewritten(folder, tmp_path / "fused", fused(folder, spec, "_scale", torch.bfloat16))
    assert StoredWeights.of(spec, whole_folder).keeps_fp8
    plain, whole = load(folder, "fp8"), load(whole_folder, "fp8")
    for layer, tensors in plain.experts.items():
        for name, tensor in tensors.items():
            assert same_bytes(whole.experts[layer][name], tensor)


def test_int8_slots_hold_the_dense_weights_rounded_by_output_channel(fp8_folder: Path) -> None:
    dense, quantised = load(fp8_folder, "dense"), load(fp8_folder, "int8")
    for layer, tensors in quantised.experts.items():
        for name in ("gate_up", "down"):
            exact = dense.experts[layer][name]
            q, scale = quantize_int8(exact)
            assert same_bytes(tensors[name], q)
            assert same_bytes(tensors[scale_of(name)], scale)
            assert ((dequantize_int8(q, scale) - exact).abs() <= scale[..., None] * 0.5001).all()


@pytest.mark.parametrize("form", ["dense", *QUANTISED])
def test_replicas_hold_equal_bytes_and_empty_slots_zeros(form: ExpertForm, fp8_folder: Path) -> None:
    spec = read_spec(fp8_folder)
    placement = replicated(spec)
    for whole, halves in (
        (load(fp8_folder, form), [load(fp8_folder, form, placement, rank) for rank in range(2)]),
        (
            dummy_weights(share_of(spec, form), 1),
            [dummy_weights(share_of(spec, form, placement, rank), 1) for rank in range(2)],
        ),
    ):
        for layer, tensors in whole.experts.items():
            assert list(tensors) == list(halves[0].experts[layer])
            for name, tensor in tensors.items():
                raw = torch.cat([half.experts[layer][name].view(torch.uint8) for half in halves])
                for slot, expert in enumerate(placement.physical_to_logical[0].tolist()):
                    wanted = tensor[expert] if expert >= 0 else torch.zeros(tensor.shape[1:], dtype=tensor.dtype)
                    assert same_bytes(raw[slot], wanted.view(torch.uint8))


@pytest.mark.parametrize("form", ["dense", *QUANTISED])
def test_loaded_and_drawn_slots_have_the_shapes_that_sizes_are_computed_from(
    form: ExpertForm, fp8_folder: Path
) -> None:
    spec = read_spec(fp8_folder)
    wanted = share_of(spec, form).slot_form.tensors
    drawn = dummy_weights(share_of(spec, form), 1)
    for weights in (load(fp8_folder, form), drawn):
        for tensors in weights.experts.values():
            assert {name: (tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()} == wanted


def packed_share(spec: ModelSpec, form: ExpertForm, dtype: torch.dtype) -> WeightShare:
    stored = StoredWeights({plan.name: dtype for plan in dense_tensors(spec)}, dtype, keeps_fp8=True)
    return replace(share_of(spec, form), stored=stored, dtype=dtype)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("dense", torch.float32), ("dense", torch.bfloat16), ("fp8", torch.float32), ("int8", torch.float32)],
)
def test_packed_slots_hold_what_slots_hold_that_are_not(form: ExpertForm, dtype: torch.dtype, fp8_folder: Path) -> None:
    check_packed(form, dtype, fp8_folder)


def test_packed_slots_hold_what_slots_hold_that_are_not_by_channel(tmp_path: Path) -> None:
    check_packed("fp8", torch.float32, write_fp8_checkpoint(tmp_path / "model", PER_CHANNEL, num_hidden_layers=2))


def check_packed(form: ExpertForm, dtype: torch.dtype, fp8_folder: Path) -> None:
    spec = read_spec(fp8_folder)
    plain, packed = replace(share_of(spec, form), dtype=dtype), packed_share(spec, form, dtype)
    width, hidden = spec.moe_intermediate, spec.hidden
    for right, got in (
        (load_weights(fp8_folder, plain), load_weights(fp8_folder, packed)),
        (dummy_weights(plain, 3), dummy_weights(packed, 3)),
    ):
        for layer, tensors in got.experts.items():
            assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in tensors.items()} == packed.slot_forms[layer].tensors
            for name, wanted in right.experts[layer].items():
                for slot, matrix in enumerate(wanted):
                    held = tensors[name][slot]
                    if name == "gate_up":
                        held = unpack_gate_up(held, width, hidden)
                    elif name == "down":
                        held = unpack(held, hidden, width)
                    assert same_bytes(held, matrix)


def rewritten(source: Path, folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def fused(
    folder: Path, spec: ModelSpec, scale: str = "_scale_inv", scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors with all experts of a layer in one."""
    tensors = load_file(folder / "model.safetensors")
    for layer in spec.moe_layer_ids:
        block = f"model.layers.{layer}.mlp.experts."
        for suffix in ("", scale):
            parts = [
                torch.stack([tensors.pop(f"{block}{e}.{n}.weight{suffix}").view(torch.uint8) for e in range(8)])
                for n in ("gate_proj", "up_proj", "down_proj")
            ]
            dtype = scale_dtype if suffix else torch.float8_e4m3fn
            tensors[f"{block}gate_up_proj{suffix}"] = torch.cat(parts[:2], 1).view(dtype)
            tensors[f"{block}down_proj{suffix}"] = parts[2].view(dtype)
    return tensors


def test_fused_fp8_experts_are_kept_alike_where_no_block_holds_both_gate_and_up(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path / "plain", moe_intermediate_size=128, num_hidden_layers=2)
    spec = read_spec(folder)
    plain = load(folder, "fp8")
    whole = load(rewritten(folder, tmp_path / "fused", fused(folder, spec)), "fp8")
    for layer, tensors in plain.experts.items():
        for name, tensor in tensors.items():
            assert same_bytes(whole.experts[layer][name], tensor)


def test_what_cannot_be_kept_in_fp8_is_refused_by_name(fp8_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(fp8_folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    del tensors[name + "_scale_inv"]
    mixed = rewritten(fp8_folder, tmp_path / "mixed", tensors | {name: tensors[name].float()})
    load(mixed, "dense")
    with pytest.raises(ModelError, match=rf"{name} \(F32, and only F8_E4M3 is kept in fp8; set model.expert_weights"):
        load(mixed, "fp8")
    # 200 rows: two blocks each for gate and up, four for both; the third of a fused tensor holds rows of either.
    folder = write_fp8_checkpoint(tmp_path / "wide", moe_intermediate_size=200, num_hidden_layers=2)
    straddling = rewritten(folder, tmp_path / "straddling", fused(folder, read_spec(folder)))
    with pytest.raises(ModelError, match=r"blocks of 128 rows hold both gate and up of width 200"):
        load(straddling, "fp8")


def test_slots_that_no_memory_holds_are_refused_with_what_to_lower(fp8_folder: Path) -> None:
    spec = read_spec(fp8_folder)
    plan = next(expert_tensors(spec))
    huge = SimpleNamespace(slots_per_rank=1 << 40)
    with pytest.raises(CapacityError, match=r"1099511627776 expert slots of one layer take .*lower eplb.num_redundant"):
        empty_slots(plan, share_of(spec, "dense", huge), huge.slots_per_rank)
