import pytest
import torch

from moe_serve.kernels.huge_pages import zeros_in_huge_pages

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_bytes", [0, 64, 2 * MIB - 64, 2 * MIB, 5 * MIB + 64])
def test_memory_holds_zeros_and_then_what_is_written(dtype: torch.dtype, num_bytes: int) -> None:
    zeros = zeros_in_huge_pages((4, num_bytes // dtype.itemsize // 4), dtype)
    assert zeros.dtype == dtype
    assert zeros.shape == (4, num_bytes // dtype.itemsize // 4)
    assert zeros.data_ptr() % 64 == 0
    assert not zeros.view(torch.uint8).any()
    zeros.view(torch.uint8).fill_(7)
    assert (zeros[1:].view(torch.uint8) == 7).all(), "rows are views of the same memory"


def test_memory_that_is_not_there_is_an_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        zeros_in_huge_pages((1 << 56,), torch.int8)
