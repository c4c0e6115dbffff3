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
    weight = torch.arange(256.0).view(2, 128).T  # width 64, k 2
    packed = torch.empty(gate_up_size(64, 2))
    pack_gate_up(weight, packed)
    assert packed.view(2, 2, 2, 32)[:, 0, :, 0].tolist() == [[0, 64], [32, 96]]


def test_words_of_bfloat16_hold_two_of_a_row():
    weight = torch.arange(96.0).view(32, 3).bfloat16()
    packed = torch.full((packed_size(32, 3),), 7, dtype=torch.bfloat16)
    pack(weight, packed)
    assert packed.view(2, 32, 2)[0].tolist() == weight[:, :2].tolist()
    assert packed.view(2, 32, 2)[1].tolist() == [[last, 0] for last in weight[:, 2].tolist()], "the padding is zero"
