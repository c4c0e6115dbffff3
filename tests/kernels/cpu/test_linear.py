import itertools

import pytest
import torch

from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear
from moe_serve.kernels.linear import linear_reference
from moe_serve.kernels.quantised import dequantize_weight, quantize_weight
from tests.tolerance import FLOAT32, relative_error

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_projection_matches_its_reference(dtype, threads, library):
    library.set_threads(threads)
    for n, k in itertools.product((1, 31, 65, 200), (0, 1, 130, 600)):
        weight, bias = torch.rand(n, k).to(dtype), torch.rand(n)  # positive: no result is near zero
        for rows in (0, 1, 5, 6, 7, 64, 65, 130):
            x = torch.rand(rows, k + 3)[:, :k]  # rows with a stride
            out = torch.zeros(rows, n + 5)
            PackedLinear(weight, bias).into(x, out[:, :n])
            wanted = linear_reference(x.double(), weight.double(), bias.double())
            assert relative_error(out[:, :n], wanted) < FLOAT32, (n, k, rows)
            assert not out[:, n:].any(), "wrote beyond its columns"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_row_depend_on_that_row_only(dtype, library, avx2, use):
    weight, x = torch.randn(200, 1100).to(dtype), torch.randn(500, 1100)
    linear = PackedLinear(weight)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows, threads in itertools.product((2, 5, 6, 7, 8, 9, 16, 63, 64, 65, 130, 192, 193, 500), (1, 2)):
        library.set_threads(threads)
        assert torch.equal(linear(x[:rows]), alone[:rows]), (rows, threads)
    use(avx2)
    for rows in (1, 3, 6, 8, 12, 500):
        assert torch.equal(PackedLinear(weight)(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("by_channel", [False, True], ids=["blocks", "channels"])
def test_fp8_gives_the_bits_of_float32_weights_with_the_same_values(by_channel, library, avx2, use):
    for n, k in itertools.product((1, 31, 65, 200), (1, 130, 600)):
        stored, bias = quantize_weight(torch.randn(1, n, k), by_channel=by_channel), torch.randn(n)
        kept, widened = (
            PackedLinear(stored.q[0], bias, stored.scale[0]),
            PackedLinear(dequantize_weight(stored)[0], bias),
        )
        for rows, threads in itertools.product((0, 1, 5, 6, 7, 64, 193), (1, 2)):
            library.set_threads(threads)
            x = torch.randn(rows, k + 3)[:, :k]
            assert torch.equal(kept(x), widened(x)), (n, k, rows)
    wanted = kept(x)
    use(avx2)
    assert torch.equal(PackedLinear(stored.q[0], bias, stored.scale[0])(x), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_match_their_reference(dtype):
    weight = torch.randn(5, 33, 70).to(dtype)
    x = torch.randn(5, 9, 40).transpose(0, 1)[:, :, :33]  # any strides of rows and heads
    wanted = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert relative_error(PackedHeads(weight)(x), wanted) < FLOAT32
