"""int8 experts on the CPU: integer sums, so the fast product has the reference's bits and a row's own bits."""

import pytest
import torch

from moe_serve.kernels.quantised import (
    LARGEST_INT8,
    RUN_ELEMENTS,
    grouped_gemm_int8,
    grouped_gemm_int8_reference,
    has_vnni,
    quantize_int8,
)
from tests.kernels.data import dequantize_int8
from tests.tolerance import INT8_EXPERT

ROWS = [[0, 0, 0], [1, 0, 7], [4, 4, 4], [0, 3, 40], [1, 1, 1], [600, 0, 1], [90, 700, 0]]
WIDTHS = [(48, 40), (7, 3), (130, 17), (512, 96), (16, RUN_ELEMENTS // 512)]  # the last one: runs of 512 rows

pytestmark = pytest.mark.skipif(not has_vnni(), reason="needs a CPU with AVX-512 VNNI, as the setting itself does")


def draw(rows: list[int], k: int, n: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    weight = torch.randn(len(rows), n, k) / k**0.5
    return torch.randn(sum(rows), k), weight, *quantize_int8(weight)


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows))
def test_the_product_has_the_bits_of_the_reference_and_is_near_the_float_one(rows: list[int]) -> None:
    counts = torch.tensor(rows)
    for k, n in WIDTHS:
        x, weight, q, scale = draw(rows, k, n)
        for dtype in (torch.float32, torch.bfloat16):
            arguments = (*quantize_int8(x), q, scale, counts, dtype)
            out = grouped_gemm_int8(*arguments)
            assert (out.dtype, out.shape) == (dtype, (sum(rows), n))
            assert torch.equal(out, grouped_gemm_int8_reference(*arguments))
        exact = torch.cat([a @ w.T for a, w in zip(x.split(rows), weight, strict=True)])
        got = grouped_gemm_int8(*quantize_int8(x), q, scale, counts, torch.float32)
        error = float((got - exact).norm() / exact.norm().clamp(min=1e-30)) if sum(rows) else 0.0
        assert error < INT8_EXPERT


def test_sums_of_the_largest_products_do_not_saturate() -> None:
    """Products that go through int16 sums, as on CPUs without VNNI, would stop at 32767."""
    for sign in (1, -1):
        x, weight = (
            torch.full((3, 4096), LARGEST_INT8, dtype=torch.int8),
            torch.full((1, 5, 4096), LARGEST_INT8).to(torch.int8),
        )
        out = grouped_gemm_int8(x, torch.ones(3), sign * weight, torch.ones(1, 5), torch.tensor([3]), torch.float32)
        assert (out == sign * 4096 * LARGEST_INT8**2).all()


@pytest.mark.parametrize("k, n", WIDTHS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(k: int, n: int) -> None:
    x, _, q, scale = draw([33, 37], k, n)

    def product(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return grouped_gemm_int8(*quantize_int8(rows), q, scale, torch.tensor(counts), torch.float32)

    whole = product(x, [33, 37])
    for start, length in ((0, 1), (5, 1), (32, 1), (3, 4), (0, 7), (13, 20)):
        assert torch.equal(product(x[start : start + length], [length, 0]), whole[start : start + length])


def test_rounding_is_symmetric_and_zeros_stay_zero() -> None:
    q, scale = quantize_int8(torch.tensor([[-2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert q.tolist() == [[-127, 64, 0], [0, 0, 0]]  # 63.5 to even
    assert scale[0] == pytest.approx(2 / 127)
    assert (dequantize_int8(q, scale)[1] == 0).all()
    x = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    assert ((dequantize_int8(*quantize_int8(x)) - x).abs() <= quantize_int8(x)[1][:, None] / 2 * 1.0001).all()
    assert quantize_int8(torch.zeros(0, 5))[0].shape == (0, 5)
    assert torch.isnan(dequantize_int8(*quantize_int8(torch.tensor([[1.0, float("nan")]])))).all(), "NaN is not hidden"
