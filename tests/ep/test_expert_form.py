"""The forms of expert weights: which setting selects which, and the FFN over quantised experts."""

import pytest
import torch

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep import expert_form
from moe_serve.ep.expert_form import ExpertForm, SlotForm, bias_of, choose_activations, choose_expert_form, scale_of
from moe_serve.ep.expert_store import ExpertStore, expert_ffn
from moe_serve.errors import ConfigError
from moe_serve.kernels.activation import clamped_swiglu_reference
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Activation, Fp8Block
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.quantised import (
    dequantize,
    dequantize_weight,
    has_vnni,
    quantize,
    quantize_int8,
    quantize_weight,
)
from tests.kernels.data import dequantize_int8
from tests.tolerance import FLOAT32, FP8_WIRE, INT8_EXPERT

QUANTISED: list[ExpertForm] = ["fp8", "int8"]
INVARIANT = Numerics(row_tile=4)
BLOCKS = Fp8Block(128, 128)


@pytest.mark.parametrize(
    ("wanted", "block", "device", "e4m3", "form"),
    [
        ("auto", None, "cpu", False, "dense"),
        ("auto", BLOCKS, "cpu", False, "dense"),
        ("auto", BLOCKS, "cuda", True, "fp8"),
        ("auto", PER_CHANNEL, "cuda", True, "fp8"),
        ("auto", PER_TENSOR, "cuda", True, "fp8"),
        ("auto", BLOCKS, "cuda", False, "dense"),
        ("auto", Fp8Block(64, 64), "cuda", True, "dense"),
        ("auto", None, "cuda", True, "dense"),
        ("dense", BLOCKS, "cuda", True, "dense"),
        ("fp8", BLOCKS, "cuda", True, "fp8"),
        ("fp8", BLOCKS, "cpu", False, "fp8"),
        ("fp8", PER_CHANNEL, "cpu", False, "fp8"),
        ("int8", None, "cpu", False, "int8"),
        ("int8", BLOCKS, "cpu", False, "int8"),
    ],
)
def test_a_setting_selects_one_form(
    monkeypatch: pytest.MonkeyPatch, wanted: str, block: Fp8Block | None, device: str, e4m3: bool, form: ExpertForm
) -> None:
    monkeypatch.setattr(expert_form, "has_vnni", lambda: True)
    assert choose_expert_form(wanted, block, device, e4m3) == form


def test_mxfp4_is_kept_by_the_compiled_kernels_and_by_gpus_with_narrow_rows() -> None:
    def chosen(
        wanted: str, compiled: bool = True, in_mxfp4: bool = True, device: str = "cpu", narrow: bool = False
    ) -> ExpertForm:
        return choose_expert_form(wanted, None, device, False, compiled, in_mxfp4, narrow)

    assert chosen("auto") == chosen("mxfp4") == "mxfp4"
    assert chosen("auto", compiled=False) == chosen("auto", in_mxfp4=False) == chosen("dense") == "dense"
    assert chosen("int8") == "int8"
    assert chosen("auto", False, device="cuda", narrow=True) == chosen("mxfp4", False, device="cuda", narrow=True)
    assert chosen("mxfp4", False, device="cuda", narrow=True) == "mxfp4"
    assert chosen("auto", False, device="cuda") == chosen("auto", False, narrow=True) == "dense"
    with pytest.raises(ConfigError, match=r"mxfp4 but the checkpoint is not .* set model.expert_weights: auto"):
        chosen("mxfp4", in_mxfp4=False)
    with pytest.raises(
        ConfigError, match=r"only the compiled CPU kernels, and GPUs .* set model.expert_weights: dense"
    ):
        chosen("mxfp4", compiled=False)


def test_int4_takes_int8_activations_unless_told_otherwise_and_other_forms_refuse_them() -> None:
    assert choose_expert_form("int4", None, "cpu", False, compiled=True) == "int4"
    assert choose_activations("auto", "int4") == choose_activations("int8", "int4") == "int8"
    assert choose_activations("float", "int4") == choose_activations("auto", "dense") == "float"
    assert choose_activations("int8", "mxfp4", has_groups=True) == "int8"
    with pytest.raises(ConfigError, match=r"experts are kept as mxfp4.* set model.activations: auto"):
        choose_activations("int8", "mxfp4")
    forms = [SlotForm("int4", 96, 64, torch.float32, packed=True, activations=each) for each in ("float", "int8")]
    assert forms[0].label != forms[1].label, "ranks that give other bits must not serve together"
    assert forms[0].num_bytes == (3 * 96 * 64) * 4.5 / 8


@pytest.mark.parametrize(
    ("wanted", "block", "device", "message"),
    [
        ("fp8", None, "cpu", "the checkpoint is not FP8 .* set model.expert_weights: auto"),
        ("fp8", Fp8Block(64, 64), "cpu", "blocks of 64 x 64 .* set model.expert_weights: dense"),
        ("fp8", BLOCKS, "cuda", "no e4m3 .* set model.expert_weights: dense"),
        ("int8", None, "cuda", "the ranks run on GPUs; int8 is for CPUs: set model.expert_weights: auto"),
        ("int8", None, "cpu", "no AVX-512 VNNI.* set model.expert_weights: auto"),
        ("int4", None, "cpu", "only the compiled CPU kernels multiply it.* set model.expert_weights: int8"),
        ("int4", None, "cuda", "only the compiled CPU kernels multiply it.* set model.expert_weights: dense"),
        ("int2", None, "cpu", "choose one of auto, dense, fp8, int8, mxfp4, int4"),
    ],
)
def test_an_impossible_form_is_refused_naming_a_possible_one(
    monkeypatch: pytest.MonkeyPatch, wanted: str, block: Fp8Block | None, device: str, message: str
) -> None:
    monkeypatch.setattr(expert_form, "has_vnni", lambda: False)
    with pytest.raises(ConfigError, match=message):
        choose_expert_form(wanted, block, device, has_e4m3=False)


def draw(form: ExpertForm, slots: int, hidden: int, width: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, ...]:
    """Returns the slot tensors, and what gate_up and down mean in float32."""
    tensors, meant = {}, []
    for name, shape, parts in (("gate_up", (2 * width, hidden), 2), ("down", (hidden, width), 1)):
        drawn = torch.randn(slots, *shape) / shape[1] ** 0.5
        if form == "fp8":
            weight = quantize_weight(drawn, parts)
            tensors[name], tensors[scale_of(name)] = weight.q, weight.scale
            meant.append(dequantize_weight(weight))
        else:
            tensors[name], tensors[scale_of(name)] = quantize_int8(drawn)
            meant.append(dequantize_int8(tensors[name], tensors[scale_of(name)]))
    return tensors, *meant


def stored(tensors: dict[str, torch.Tensor]) -> ExpertStore:
    return ExpertStore({name: tensor.clone() for name, tensor in tensors.items()})


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def rounded(form: ExpertForm, x: torch.Tensor) -> torch.Tensor:
    """Returns rows as the form's products see them, in float64."""
    back = dequantize(*quantize(x), torch.float32) if form == "fp8" else dequantize_int8(*quantize_int8(x))
    return back.double()


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
@pytest.mark.parametrize("rows", [[0, 0, 0], [1, 0, 7], [4, 4, 4], [0, 0, 60]], ids=lambda rows: str(rows))
def test_packed_and_masked_rows_give_each_row_its_experts_output(
    form: ExpertForm, numerics: Numerics, rows: list[int]
) -> None:
    if form == "int8" and not has_vnni():
        pytest.skip("needs a CPU with AVX-512 VNNI")
    torch.manual_seed(0)
    tensors, gate_up, down = draw(form, 3, 200, 136)
    store, counts, x = stored(tensors), torch.tensor(rows), torch.randn(sum(rows), 200)
    packed = expert_ffn(PackedRows(x, counts), store, numerics)
    assert packed.dtype == x.dtype

    exact, stepwise = [], []
    for part, a, b in zip(torch.split(x, rows), gate_up.double(), down.double(), strict=True):
        exact.append(swiglu(part.double() @ a.T) @ b.T)
        middle = swiglu(rounded(form, part) @ a.T).float()
        stepwise.append(rounded(form, middle) @ b.T)
    # The same roundings in float64: what differs is where a last bit before rounding decides a step.
    assert distance(packed, torch.cat(stepwise)) < 2e-3
    assert distance(packed, torch.cat(exact)) < 2 * (FP8_WIRE if form == "fp8" else INT8_EXPERT)

    slab = torch.full((3, max(rows) + 2, 200), float("nan"))
    filled = torch.arange(slab.shape[1]) < counts[:, None]
    slab[filled] = x
    masked = expert_ffn(MaskedRows(slab, counts), store, numerics)
    assert masked.shape == slab.shape
    if numerics.invariant or form == "int8":
        assert torch.equal(masked[filled], packed), "both layouts give the same bits"
    else:
        assert distance(masked[filled], packed.double()) < 2e-3


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_biases_and_the_clamped_activation_by_torch_are_each_slots_own(form: ExpertForm) -> None:
    if form == "int8" and not has_vnni():
        pytest.skip("needs a CPU with AVX-512 VNNI")
    torch.manual_seed(0)
    activation = Activation("clamped_swiglu", alpha=1.702, limit=0.7)
    for hidden, width, rows in ((64, 33, [0, 5, 1]), (200, 136, [23, 0, 17]), (16, 1, [0, 0, 0])):
        tensors, gate_up, down = draw("int8", 3, hidden, width)
        if form == "dense":
            tensors = {"gate_up": gate_up, "down": down}
        tensors |= {bias_of("gate_up"): torch.randn(3, 2 * width), bias_of("down"): torch.randn(3, hidden)}
        kept = SlotForm(form, hidden, width, torch.float32, has_bias=True, activation=activation)
        assert {name: (tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()} == kept.tensors
        store, x = (
            ExpertStore({name: tensor.clone() for name, tensor in tensors.items()}, kept),
            torch.randn(sum(rows), hidden),
        )
        for numerics in (FAST, INVARIANT):
            got = expert_ffn(PackedRows(x, torch.tensor(rows)), store, numerics)
            wanted = []
            for slot, part in enumerate(torch.split(x, rows)):
                gate_up_rows = part @ gate_up[slot].T + tensors["gate_up_bias"][slot]
                middle = clamped_swiglu_reference(gate_up_rows, activation)
                wanted.append(middle @ down[slot].T + tensors["down_bias"][slot])
            assert distance(got, torch.cat(wanted).double()) < (FLOAT32 if form == "dense" else 2 * INT8_EXPERT)
            slab = torch.randn(3, max(rows) + 2, hidden)
            filled = torch.arange(slab.shape[1]) < torch.tensor(rows)[:, None]
            slab[filled] = x
            assert (
                distance(expert_ffn(MaskedRows(slab, torch.tensor(rows)), store, numerics)[filled], got.double())
                < FLOAT32
            )
        alone = [
            expert_ffn(PackedRows(x[i : i + 1], one_hot), store, INVARIANT) for i, one_hot in enumerate(owners(rows))
        ]
        assert torch.equal(torch.cat([got[:0], *alone]), got)


def owners(rows: list[int]) -> list[torch.Tensor]:
    """Returns for every row the counts of a batch that holds this row alone."""
    return [torch.eye(len(rows), dtype=torch.int64)[slot] for slot, count in enumerate(rows) for _ in range(count)]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not got.numel():
        assert got.shape == wanted.shape
        return 0.0
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("form", QUANTISED)
def test_in_batch_invariant_an_experts_output_is_bitwise_the_rows_own(form: ExpertForm) -> None:
    if form == "int8" and not has_vnni():
        pytest.skip("needs a CPU with AVX-512 VNNI")
    torch.manual_seed(0)
    for hidden, width in ((64, 48), (130, 33), (256, 136)):
        store = stored(draw(form, 2, hidden, width)[0])
        x = torch.randn(40, hidden)
        whole = expert_ffn(PackedRows(x, torch.tensor([23, 17])), store, INVARIANT)
        for start, length in ((0, 1), (22, 1), (5, 4), (1, 13)):
            part = PackedRows(x[start : start + length], torch.tensor([length, 0]))
            assert torch.equal(expert_ffn(part, store, INVARIANT), whole[start : start + length])


@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_expert_moves_between_stores_with_its_scales(form: ExpertForm) -> None:
    torch.manual_seed(0)
    (source, *_), (target, *_) = draw(form, 2, 130, 72), draw(form, 3, 130, 72)
    here, there = stored(source), stored(target)
    assert here.form == form
    assert here.names == ("gate_up", "gate_up_scale", "down", "down_scale")
    assert here.slot_bytes == SlotForm(form, 130, 72, torch.float32).num_bytes
    staging = there.staging(1)
    for name, tensor in here.slot(1).items():
        assert tensor.is_contiguous(), "it is sent as it lies in memory"
        staging.slot(0)[name].copy_(tensor)
    there.write_slot(2, staging.slot(0))
    for name in ("gate_up", "down"):
        assert torch.equal(there.matrix(name)[2].float(), source[name][1].float())
        assert torch.equal(there.scale(name)[2], source[scale_of(name)][1])
        assert torch.equal(there.matrix(name)[:2].float(), target[name][:2].float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [[0, 0, 0], [1, 0, 7], [0, 0, 300]], ids=lambda rows: str(rows))
def test_on_a_gpu_fp8_experts_give_what_they_give_on_a_cpu(rows: list[int]) -> None:
    torch.manual_seed(0)
    tensors, *_ = draw("fp8", 3, 256, 136)
    x, counts = torch.randn(sum(rows), 256).bfloat16(), torch.tensor(rows)
    expected = expert_ffn(PackedRows(x, counts), stored(tensors)).double()
    store = ExpertStore({name: tensor.cuda() for name, tensor in tensors.items()})
    assert distance(expert_ffn(PackedRows(x.cuda(), counts), store).cpu(), expected) < 2e-2
    slab = torch.full((3, max(rows) + 2, 256), float("nan"), dtype=x.dtype)
    filled = torch.arange(slab.shape[1]) < counts[:, None]
    slab[filled] = x
    masked = expert_ffn(MaskedRows(slab.cuda(), counts.cuda()), store).cpu()
    assert distance(masked[filled], expected) < 2e-2
