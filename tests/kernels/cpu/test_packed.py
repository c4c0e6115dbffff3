import itertools

import pytest
import torch

from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from tests.kernels.cpu.unpacking import unpack, unpack_gate_up

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor whose bytes differ from place to place."""
    size = dtype.itemsize * torch.Size(shape).numel()
    return (torch.arange(size) * 37 % 251).to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_packed_unpacks_to_the_same_bytes(dtype):
    for n, k in itertools.product((1, 31, 32, 33, 64, 65, 96, 97, 200), (0, 1, 7, 130)):
        weight = bytes_of((n, k), dtype)
        packed = torch.empty(packed_size(n, k), dtype=dtype)
        pack(weight, packed)
        assert torch.equal(unpack(packed, n, k).view(torch.uint8), weight.view(torch.uint8)), (n, k)
        both = bytes_of((2 * n, k), dtype)
        packed = torch.empty(gate_up_size(n, k), dtype=dtype)
        pack_gate_up(both, packed)
        assert torch.equal(unpack_gate_up(packed, n, k).view(torch.uint8), both.view(torch.uint8)), (n, k)


def test_rows_of_gate_and_up_alternate_by_32():
    weight = torch.arange(128.0)[:, None]  # width 64, k 1
    packed = torch.empty(gate_up_size(64, 1))
    pack_gate_up(weight, packed)
    assert packed.view(2, 2, 32)[:, :, 0].tolist() == [[0, 64], [32, 96]]


def test_words_of_bfloat16_hold_rows_c_and_c_plus_16():
    packed = torch.empty(packed_size(32, 1), dtype=torch.bfloat16)
    pack(torch.arange(32.0)[:, None].bfloat16(), packed)
    assert packed.view(16, 2).tolist() == [[c, c + 16] for c in range(16)]
