import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.activation import clamped_swiglu_, clamped_swiglu_reference
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from moe_serve.kernels.forms import RELU2, SILU, Activation, BlockScaled
from moe_serve.kernels.quantised import dequantize_weight, quantize_int8, quantize_weight
from tests.tolerance import FLOAT32, relative_error

ROWS = (0, 1, 70, 7, 3)
BY_CHANNEL = "e4m3 by channel"
KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, BY_CHANNEL)
CLAMPED = Activation("clamped_swiglu", alpha=1.702, limit=1.2)  # low enough to be met


@dataclass(frozen=True)
class Experts:
    """Weights of some slots: as they are stored and packed, and as float32 numbers."""

    packed: PackedExperts
    gate_up: Tensor
    down: Tensor


def make_experts(
    kind: torch.dtype | str, slots: int, hidden: int, width: int, activation: Activation = SILU, biased: bool = False
) -> Experts:
    stacks = activation.stacks
    gate_up = torch.randn(slots, stacks * width, hidden) / hidden**0.5
    down = torch.randn(slots, hidden, width) / width**0.5
    (stored_gate_up, gate_up_scale, wide_gate_up) = stored(gate_up, kind, stacks)
    (stored_down, down_scale, wide_down) = stored(down, kind, 1)
    packed = PackedExperts(
        stored_gate_up.new_empty(slots, gate_up_size(width, hidden, stacks)),
        stored_down.new_empty(slots, packed_size(hidden, width)),
        hidden, width, gate_up_scale, down_scale,
        torch.randn(slots, stacks * width) if biased else None, torch.randn(slots, hidden) if biased else None,
        activation,
    )  # fmt: skip
    for slot in range(slots):
        pack_gate_up(stored_gate_up[slot], packed.gate_up[slot], stacks)
        pack(stored_down[slot], packed.down[slot])
    return Experts(packed, wide_gate_up, wide_down)


def stored(weight: Tensor, kind: torch.dtype | str, parts: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns a weight [slots, n, k] as stored, its scales, and the float32 numbers that both stand for."""
    if kind == torch.int8:
        q, scale = quantize_int8(weight)
        return q, scale, q * scale[..., None]
    if kind in (torch.float8_e4m3fn, BY_CHANNEL):
        blocks: BlockScaled = quantize_weight(weight, parts, by_channel=kind == BY_CHANNEL)
        return blocks.q, blocks.scale, dequantize_weight(blocks)
    assert isinstance(kind, torch.dtype)
    return weight.to(kind), None, weight.to(kind).float()


def reference(x: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """Returns the rows of all slots in float64."""
    packed = experts.packed
    rows = []
    for row, slot in zip(x.double(), torch.repeat_interleave(counts).tolist(), strict=True):
        both = experts.gate_up[slot].double() @ row
        both += 0 if packed.gate_up_bias is None else packed.gate_up_bias[slot]
        gate, up = both.chunk(2) if len(both) > 1 else (both, both)
        match packed.activation.kind:
            case "silu":
                middle = torch.nn.functional.silu(gate) * up
            case "clamped_silu":
                limit = packed.activation.limit
                middle = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            case "relu2":
                middle = both.clamp(min=0) ** 2
            case _:
                middle = clamped_swiglu_reference(both, packed.activation)
        rows.append(experts.down[slot].double() @ middle + (0 if packed.down_bias is None else packed.down_bias[slot]))
    return torch.stack(rows)


FORMS = {"silu": (SILU, False), "clamped with biases": (CLAMPED, True), "relu2": (RELU2, False)}
FORMS["clamped silu"] = (Activation("clamped_silu", limit=1.2), False)


@pytest.mark.parametrize("activation, biased", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("hidden, width", [(40, 16), (513, 33), (130, 200), (1, 1)])
def test_experts_match_their_reference(kind, hidden, width, activation, biased, library):
    counts, places = torch.tensor(ROWS), [70 * slot + nth for slot, rows in enumerate(ROWS) for nth in range(rows)]
    experts = make_experts(kind, len(ROWS), hidden, width, activation, biased)
    rows = torch.randn(len(places), hidden)
    wanted = reference(rows, counts, experts)
    for threads in (1, 2):
        library.set_threads(threads)
        got = packed_ffn(rows, counts, experts.packed)
        assert relative_error(got, wanted) < FLOAT32
        slabs = torch.full((len(ROWS) * 70, hidden), float("nan"))
        slabs[places] = rows
        out = torch.full_like(slabs, 7)
        assert torch.equal(packed_ffn(slabs, counts, experts.packed, out, slab_rows=70)[places], got)
        out[places] = 7
        assert (out == 7).all(), "wrote rows beyond a slot's count"
    assert packed_ffn(rows[:0], torch.zeros(len(ROWS), dtype=torch.int64), experts.packed).shape == (0, hidden)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_bits_of_a_row_depend_on_that_row_only(kind, library, avx2, use):
    activation = {torch.bfloat16: CLAMPED, torch.float32: RELU2}.get(kind, SILU)
    experts = make_experts(kind, 2, 300, 150, activation, biased=activation == CLAMPED)
    x = torch.randn(250, 310)[:, :300]
    alone = torch.cat([packed_ffn(row[None], torch.tensor([0, 1]), experts.packed) for row in x])
    for rows, threads in itertools.product((2, 6, 7, 8, 9, 13, 16, 64, 65, 200, 250), (1, 2)):
        library.set_threads(threads)
        for counts in ([0, rows], [3, rows]):
            got = packed_ffn(torch.cat([x[: counts[0]], x[:rows]]), torch.tensor(counts), experts.packed)
            assert torch.equal(got[counts[0] :], alone[:rows]), (rows, threads)
    use(avx2)
    for rows in (1, 3, 6, 8, 12, 250):
        assert torch.equal(packed_ffn(x[:rows], torch.tensor([0, rows]), experts.packed), alone[:rows]), rows


@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float8_e4m3fn, BY_CHANNEL), ids=str)
def test_stored_weights_give_the_bits_of_float32_weights_with_the_same_values(kind, library):
    library.use_amx(False)
    for rows, (hidden, width) in itertools.product((1, 6, 7, 70), ((40, 16), (300, 150))):
        experts = make_experts(kind, 2, hidden, width)
        wide = PackedExperts(
            torch.empty(2, gate_up_size(width, hidden)), torch.empty(2, packed_size(hidden, width)), hidden, width
        )
        for slot in range(2):
            pack_gate_up(experts.gate_up[slot], wide.gate_up[slot])
            pack(experts.down[slot], wide.down[slot])
        x, counts = torch.randn(2 * rows, hidden), torch.tensor([rows, rows])
        assert torch.equal(packed_ffn(x, counts, experts.packed), packed_ffn(x, counts, wide)), (rows, hidden, width)


def test_every_e4m3_value_is_widened_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[:, None]  # without the two NaNs
    hidden, scale = len(values), torch.full((1, 2, 1), 0.3)
    gate_up = torch.ones(2, hidden)
    results = []
    for down, gate_up_scale, down_scale in ((values, torch.ones(1, 2, 2), scale), (values.float() * 0.3, None, None)):
        packed = PackedExperts(
            torch.empty(1, gate_up_size(1, hidden), dtype=down.dtype),
            torch.empty(1, packed_size(hidden, 1), dtype=down.dtype),
            hidden, 1, gate_up_scale, down_scale,
        )  # fmt: skip
        pack_gate_up(gate_up.to(down.dtype), packed.gate_up[0])
        pack(down, packed.down[0])
        results.append(packed_ffn(torch.ones(1, hidden), torch.tensor([1]), packed))
    assert torch.equal(*results)


def test_the_clamped_activation_of_torch_matches_its_reference_and_a_rows_bits_stay():
    for n in (1, 16, 33, 150):
        gate_up = 2 * torch.randn(21, 2 * n)
        gate_up[:, 0] = torch.linspace(-100, 100, 21)
        out = clamped_swiglu_(gate_up.clone(), CLAMPED)
        assert relative_error(out, clamped_swiglu_reference(gate_up, CLAMPED)) < 1e-6
        for start, length in ((0, 1), (5, 3), (20, 1)):
            rows = gate_up[start : start + length].clone()
            assert torch.equal(clamped_swiglu_(rows, CLAMPED), out[start : start + length]), (n, start)
        assert clamped_swiglu_(gate_up[:0].clone(), CLAMPED).shape == (0, n)


def test_a_row_that_is_not_a_number_is_not_clamped_to_one(library):
    experts = make_experts(torch.float32, 1, 40, 16, CLAMPED, biased=True)
    clean = torch.randn(3, 40)
    wanted = packed_ffn(clean, torch.tensor([3]), experts.packed)
    dirty = clean.clone()
    dirty[1, 0] = float("nan")
    got = packed_ffn(dirty, torch.tensor([3]), experts.packed)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], wanted[[0, 2]])
