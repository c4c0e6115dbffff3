"""FP8 rows with one scale per 128 values."""

import pytest
import torch

from moe_serve.kernels.forms import num_groups
from moe_serve.kernels.quantised import dequantize_reference, e4m3_over_256, quantize_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits, randn, relative_error

SIZES = [(0, 128), (1, 128), (3, 200), (2, 2100), (5, 16)]


def test_round_trip_error_is_below_that_of_three_mantissa_bits() -> None:
    x = randn("cpu", 64, 1000)
    q, scale = quantize_reference(x)
    assert relative_error(dequantize_reference(q, scale, torch.float32), x) < 4e-2


def test_the_largest_value_of_a_group_becomes_448_and_zeros_stay_zero() -> None:
    x = torch.zeros(2, 256)
    x[0, 7], x[0, 200] = -3.0, 1e-9
    q, scale = quantize_reference(x)
    assert q.float()[0, 7] == -448
    assert scale[0, 1] == pytest.approx(1e-4 / 448)  # amax is clamped
    assert (dequantize_reference(q, scale, torch.float32)[1] == 0).all()


def check_quantize(device: str, rows: int, width: int) -> None:
    from moe_serve.kernels.triton.quantize import dequantize_triton, quantize_triton

    x = randn(device, rows, width) * torch.logspace(-6, 4, max(width, 1), device=device).to(torch.bfloat16)
    if rows:
        x[0, : width // 2] = 0
    q, scale = quantize_triton(x)
    expected, expected_scale = quantize_reference(x.cpu())
    assert scale.shape == (rows, num_groups(width))
    assert_equal_bits(scale, expected_scale)
    assert_equal_bits(q, expected)
    back = dequantize_triton(q, scale, torch.bfloat16)
    assert_equal_bits(back, dequantize_reference(expected, expected_scale, torch.bfloat16))


@pytest.mark.parametrize("rows, width", SIZES)
def test_quantize_gives_the_bits_of_the_reference(on_device: RunCheck, rows: int, width: int) -> None:
    on_device(check_quantize, rows, width)


def check_strided_rows(device: str) -> None:
    from moe_serve.kernels.triton.quantize import quantize_triton

    x = randn(device, 3, 512)[:, 128:300]
    assert_equal_bits(quantize_triton(x)[0], quantize_reference(x.cpu())[0])


def test_rows_may_be_a_view(on_device: RunCheck) -> None:
    on_device(check_strided_rows)


def check_slabs(device: str, counts: list[int], capacity: int, width: int) -> None:
    from moe_serve.kernels.triton.quantize import quantize_triton

    x = randn(device, len(counts), capacity, width)
    q, scale = quantize_triton(x, torch.tensor(counts, device=device))
    assert (q.shape, scale.shape) == (x.shape, (*x.shape[:2], num_groups(width)))
    for slot, count in enumerate(counts):
        expected, expected_scale = quantize_reference(x[slot, :count].cpu())
        assert_equal_bits(q[slot, :count], expected)
        assert_equal_bits(scale[slot, :count], expected_scale)


def test_slabs_use_their_first_rows_only(on_device: RunCheck) -> None:
    on_device(check_slabs, [0, 3, 1], 3, 200)


def test_every_e4m3_number_is_a_float16_256_times_smaller() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[(every & 0x7F) != 0x7F].view(torch.float8_e4m3fn)  # all but the two NaNs
    assert torch.equal(e4m3_over_256(numbers).float() * 256, numbers.float())
    across = numbers[:250].view(10, 25).t()
    assert torch.equal(e4m3_over_256(across).float() * 256, across.float())
    assert e4m3_over_256(across).stride() == across.stride(), "memory order stays"
