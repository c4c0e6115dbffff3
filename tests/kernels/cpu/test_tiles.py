"""Products with bfloat16 weights by AMX, and as tiles.h plays it, with equal bits."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.digest import kernel_digest
from moe_serve.kernels.cpu.experts import packed_ffn
from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear
from moe_serve.kernels.forms import RELU2, SILU
from tests.kernels.cpu.test_experts import make_experts, reference
from tests.tolerance import FLOAT32, relative_error

TILE_K = 32


@pytest.fixture(params=("emulated", "amx"))
def form(request, library, emulated, use):
    """The library that the kernels' Python functions call, in each of the two forms."""
    chosen = emulated if request.param == "emulated" else library
    if chosen.form != "amx":
        pytest.skip("needs a processor with AMX, a compiler that knows it, and a system that gives it")
    use(chosen)
    chosen.set_threads(1)
    yield chosen
    chosen.set_threads(1)


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def special_rows(num_rows: int, k: int) -> Tensor:
    """Returns rows of ordinary numbers, of which some have one that is large, tiny, denormal or not finite."""
    bits = (0x7F7FFFFF, 0x00800000, 0x00000001, 0x807FFFFF, 0x0C123457, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001)
    x = torch.randn(num_rows, k)
    odd = torch.tensor(np.array(bits, np.uint32).view(np.float32))
    for row in range(0, num_rows, 2):
        x[row, row * 5 % k] = odd[row // 2 % len(odd)]
    return x


def parts_of(x: np.ndarray) -> list[np.ndarray]:
    """Returns the high, middle and low part of finite float32 numbers."""
    parts = []
    for _ in range(3):
        parts.append((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
        x = x - parts[-1]
    assert not x.any(), "three parts are the number"
    return parts


def by_hand(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns x [k] by weight [n, k], summed as the manual says of TDPBF16PS; sums of two are exact in float64."""
    sums = []
    for part in parts_of(x):
        total = np.zeros(len(weight), np.float32)
        for start in range(0, len(x), TILE_K):
            half = [np.zeros(len(weight), np.float32) for _ in range(2)]
            for k in range(start, min(start + TILE_K, len(x))):
                product = part[k].astype(np.float64) * weight[:, k].astype(np.float64)
                half[k % 2] = (half[k % 2] + product).astype(np.float32)
            total = total + (half[0] + half[1])
        sums.append(total)
    high, middle, low = sums
    return (low + middle) + high


def test_products_add_up_in_the_order_of_the_manual(form):
    weight, x = bfloat16(40, 150).clamp(-4, 4), torch.randn(7, 150)
    x[x.abs() < 2**-8] = 0  # so that every sum of two is exact in float64
    weight[weight.abs() < 2**-8] = 0
    wanted = np.stack([by_hand(row, weight.float().numpy()) for row in x.numpy()])
    assert torch.equal(PackedLinear(weight)(x), torch.from_numpy(wanted))


@pytest.mark.parametrize("threads", (1, 2))
def test_a_projection_matches_its_reference(form, threads):
    form.set_threads(threads)
    for n, k in itertools.product((1, 31, 65, 200), (0, 1, 31, 33, 130)):
        weight, bias = torch.rand(n, k).bfloat16(), torch.rand(n)  # positive: no result is near zero
        for rows in (0, 1, 5, 6, 11, 79, 81):
            x = torch.rand(rows, k + 3)[:, :k]  # rows with a stride
            out = torch.zeros(rows, n + 5)
            PackedLinear(weight, bias).into(x, out[:, :n])
            wanted = x.double() @ weight.double().T + bias.double()
            assert relative_error(out[:, :n], wanted) < FLOAT32, (n, k, rows)
            assert not out[:, n:].any(), "wrote beyond its columns"


def test_heads_match_their_reference(form):
    weight = bfloat16(5, 33, 70)
    x = torch.randn(5, 9, 40).transpose(0, 1)[:, :, :33]  # any strides of rows and heads
    wanted = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert relative_error(PackedHeads(weight)(x), wanted) < FLOAT32


def test_the_bits_of_a_row_depend_on_that_row_only(form):
    linear, experts = PackedLinear(bfloat16(70, 150)), make_experts(torch.bfloat16, 2, 70, 40, SILU)
    x = torch.randn(100, 150)
    alone = torch.cat([linear(row[None]) for row in x])
    expert_alone = torch.cat([packed_ffn(row[None, :70], torch.tensor([0, 1]), experts.packed) for row in x])
    for rows, threads in itertools.product((*range(2, 12), 16, 79, 80, 81, 100), (1, 2)):
        form.set_threads(threads)
        assert torch.equal(linear(x[:rows]), alone[:rows]), (rows, threads)
        both = torch.cat([x[:3], x[:rows]])[:, :70]
        got = packed_ffn(both, torch.tensor([3, rows]), experts.packed)
        assert torch.equal(got[3:], expert_alone[:rows]), (rows, threads)


@pytest.mark.parametrize("hidden, width, activation", [(40, 16, SILU), (65, 33, SILU), (1, 1, SILU), (65, 97, RELU2)])
def test_experts_match_their_reference(form, hidden, width, activation):
    counts, room = torch.tensor([0, 1, 23, 7, 3]), 25
    places = [room * slot + nth for slot, rows in enumerate(counts.tolist()) for nth in range(rows)]
    experts = make_experts(torch.bfloat16, len(counts), hidden, width, activation)
    rows = torch.randn(len(places), hidden)
    got = packed_ffn(rows, counts, experts.packed)
    assert relative_error(got, reference(rows, counts, experts)) < FLOAT32
    slabs = torch.full((len(counts) * room, hidden), float("nan"))
    slabs[places] = rows
    out = torch.full_like(slabs, 7)
    assert torch.equal(packed_ffn(slabs, counts, experts.packed, out, slab_rows=room)[places], got)
    out[places] = 7
    assert (out == 7).all(), "wrote rows beyond a slot's count"


def test_more_rows_than_are_split_at_a_time_have_the_same_bits(form):
    hidden, room_bytes, bytes_of_a_row = 12000, 8 << 20, 12032 // 32 * 192
    counts = torch.tensor([3, 0, room_bytes // bytes_of_a_row, 2])
    experts = make_experts(torch.bfloat16, len(counts), hidden, 1, SILU)
    x = torch.randn(int(counts.sum()), hidden)
    together = packed_ffn(x, counts, experts.packed)
    for slot, rows in enumerate(x.split(counts.tolist())):
        few = torch.zeros_like(counts)
        few[slot] = min(2, len(rows))
        start = int(counts[:slot].sum())
        assert torch.equal(packed_ffn(rows[:2], few, experts.packed), together[start : start + int(few[slot])]), slot


def test_numbers_that_are_not_finite_stay_in_their_row(form):
    linear, x = PackedLinear(bfloat16(70, 150)), special_rows(37, 150)
    finite = x.isfinite().all(dim=1)
    assert not finite.all()
    out, clean = linear(x), linear(x[finite])
    assert torch.equal(out[finite], clean)
    assert clean.isnan().sum() == 0
    assert not out[~finite].isfinite().any()
    nan = x.isnan().any(dim=1)
    assert out[nan].isnan().all(), "a NaN stays one, whatever its bits"


def test_denormal_numbers_count_as_next_to_nothing(form):
    weight = torch.ones(32, 40).bfloat16()
    assert PackedLinear(weight)(torch.full((1, 40), 1e-40)).eq(0).all()
    assert PackedLinear(torch.full((32, 40), 1e-40).bfloat16())(torch.ones(1, 40)).eq(0).all()
    small = PackedLinear(weight)(torch.full((1, 40), 1.2345678e-37))
    assert (small - 40 * 1.2345678e-37).abs().max() < 40 * 2.0**-126


def test_the_emulation_has_the_bits_of_the_processor(library, emulated, use):
    if library.form != "amx":
        pytest.skip("needs a processor with AMX")
    results = []
    weight = special_rows(200, 330).bfloat16().nan_to_num()
    weight[weight.abs() > 1e38] = 3
    x = torch.cat([special_rows(60, 330), special_rows(60, 330) * 1e-19, special_rows(60, 330) * 1e19])
    for each in (library, emulated):
        use(each)
        results.append((PackedLinear(weight)(x).nan_to_num(1.5), kernel_digest()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_without_amx_the_bits_are_those_of_float32_weights(library):
    weight, x = bfloat16(70, 150), torch.randn(9, 150)
    wide = PackedLinear(weight.float())(x)
    assert not library.use_amx(False)
    assert library.form == library.vectors
    assert torch.equal(PackedLinear(weight)(x), wide)


def test_the_digest_tells_amx_from_vectors(library, emulated, use):
    library.use_amx(False)
    by_vectors = kernel_digest()
    use(emulated)
    assert kernel_digest() != by_vectors
