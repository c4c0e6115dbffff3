"""Experts in MXFP4 by the compiled kernels: the bits of the same experts widened to bfloat16, in every form."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import build_cpu_library
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from moe_serve.kernels.forms import SILU, Activation
from moe_serve.kernels.quantised import dequantise_mxfp4, quantise_mxfp4

CLAMPED = Activation("clamped_swiglu", alpha=1.702, limit=1.2)  # low enough to be met
SIZES = ((32, 32), (96, 64), (544, 160), (160, 1056))  # a panel of 32 alone, odd numbers of blocks, several of k
FORMS = ("fma", "amx", "emulated", "avx2", pytest.param("plain", marks=pytest.mark.slow))  # builds them once more


@pytest.fixture(params=FORMS)
def form(request, library, use):
    """The library that the kernels' Python functions call, in each of its forms."""
    chosen = library
    match request.param:
        case "fma":
            library.use_amx(False)
        case "amx":
            if library.form != "amx":
                pytest.skip("needs a processor with AMX, a compiler that knows it, and a system that gives it")
        case "plain":
            chosen = build_cpu_library(("-march=x86-64-v2",))
        case other:
            chosen = request.getfixturevalue(other)
    use(chosen)
    yield chosen
    chosen.set_threads(1)


def random_mxfp4(slots: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Returns blocks [slots, n, k / 32, 16] and scales [slots, n, k / 32] of values of about 1 / sqrt(k)."""
    middle = 125 - k.bit_length() // 2
    return (
        torch.randint(0, 256, (slots, n, k // 32, 16), dtype=torch.uint8),
        torch.randint(middle - 2, middle + 3, (slots, n, k // 32), dtype=torch.uint8),
    )


def both_forms(
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    activation: Activation = SILU,
    biased: bool = False,
) -> tuple[PackedExperts, PackedExperts]:
    """Returns experts in MXFP4, and the same in bfloat16. gate_up, down: blocks and scales, gate above up"""
    slots, hidden = down[0].shape[:2]
    width = gate_up[0].shape[1] // 2
    biases = (torch.randn(slots, 2 * width), torch.randn(slots, hidden)) if biased else (None, None)
    codes = torch.uint8
    packed = PackedExperts(
        torch.empty(slots, gate_up_size(width, hidden // 2), dtype=codes),
        torch.empty(slots, packed_size(hidden, width // 2), dtype=codes),
        hidden, width,
        torch.empty(slots, gate_up_size(width, hidden // 32), dtype=codes),
        torch.empty(slots, packed_size(hidden, width // 32), dtype=codes),
        *biases, activation,
    )  # fmt: skip
    wide = PackedExperts(
        torch.empty(slots, gate_up_size(width, hidden), dtype=torch.bfloat16),
        torch.empty(slots, packed_size(hidden, width), dtype=torch.bfloat16),
        hidden, width, None, None, *biases, activation,
    )  # fmt: skip
    assert packed.gate_up_scale is not None
    assert packed.down_scale is not None
    for slot in range(slots):
        pack_gate_up(gate_up[0][slot].flatten(1), packed.gate_up[slot])
        pack_gate_up(gate_up[1][slot], packed.gate_up_scale[slot])
        pack_gate_up(dequantise_mxfp4(gate_up[0][slot], gate_up[1][slot]), wide.gate_up[slot])
        pack(down[0][slot].flatten(1), packed.down[slot])
        pack(down[1][slot], packed.down_scale[slot])
        pack(dequantise_mxfp4(down[0][slot], down[1][slot]), wide.down[slot])
    return packed, wide


@pytest.mark.parametrize("activation, biased", [(SILU, False), (CLAMPED, True)], ids=["silu", "clamped with biases"])
def test_experts_in_mxfp4_have_the_bits_of_the_same_in_bfloat16(form, activation, biased):
    for (hidden, width), threads in itertools.product(SIZES, (1, 2)):
        form.set_threads(threads)
        counts = torch.tensor([0, 1, 23, 7, 3])
        packed, wide = both_forms(
            random_mxfp4(5, 2 * width, hidden), random_mxfp4(5, hidden, width), activation, biased
        )
        x = torch.randn(int(counts.sum()), hidden)
        wanted = packed_ffn(x, counts, wide)
        assert wanted.isfinite().all()
        assert wanted.std() > 0.01
        assert torch.equal(packed_ffn(x, counts, packed), wanted), (hidden, width, threads)
        assert packed_ffn(x[:0], 0 * counts, packed).shape == (0, hidden)


def test_the_bits_of_a_row_depend_on_that_row_only(form):
    packed, _ = both_forms(random_mxfp4(2, 192, 160), random_mxfp4(2, 160, 96), CLAMPED, biased=True)
    x = torch.randn(100, 160)
    alone = torch.cat([packed_ffn(row[None], torch.tensor([0, 1]), packed) for row in x])
    for rows, threads in itertools.product((2, 6, 7, 13, 81, 100), (1, 2)):
        form.set_threads(threads)
        got = packed_ffn(torch.cat([x[:3], x[:rows]]), torch.tensor([3, rows]), packed)
        assert torch.equal(got[3:], alone[:rows]), (rows, threads)


def test_every_byte_under_every_scale_is_widened_exactly(form):
    """Each row of down has every byte, and a scale of its own."""
    width = 512
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, width // 32, 16)
    blocks, scales = codes.expand(1, 256, -1, -1), torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    down = blocks.contiguous(), scales.expand(-1, -1, width // 32).contiguous()
    packed, wide = both_forms(random_mxfp4(1, 2 * width, 256), down)
    for rows in (1, 7):
        x, counts = torch.randn(rows, 256), torch.tensor([rows])
        wanted, got = packed_ffn(x, counts, wide), packed_ffn(x, counts, packed)
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
        assert got[:, 255].isnan().all(), "255 is not a number"
        assert (got[:, 20:240] != 0).all()


def test_values_are_rounded_to_the_nearest_number():
    weight = torch.randn(40, 96)
    weight[3] = 0
    blocks, scales = quantise_mxfp4(weight)
    got = dequantise_mxfp4(blocks, scales).float()
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    step = 2.0 ** (largest.clamp(min=1e-9).log2().floor() - 2)  # 1 in units of the scale
    allowed = torch.where(got.unflatten(1, (-1, 32)).abs() < 4 * step[..., None], 0.5, 2)
    error = (got - weight).unflatten(1, (-1, 32)).abs()
    assert (error <= allowed * step[..., None]).all()
    assert not got[3].any()
    again = quantise_mxfp4(got)
    assert torch.equal(dequantise_mxfp4(*again).float(), got)
    exact = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(4) * torch.tensor([1.0, -1.0]).repeat(16)
    assert torch.equal(dequantise_mxfp4(*quantise_mxfp4(exact[None])).float()[0], exact)
