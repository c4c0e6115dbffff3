"""Linear and HeadLinear against plain products, and a row's bits in different batches."""

import pytest
import torch

from moe_serve.kernels.linear import (
    LARGEST_TILE,
    SMALLEST_PACKED,
    HeadLinear,
    Linear,
    cut,
    linear_reference,
    proven_tiles,
)
from moe_serve.kernels.numerics import FAST, Numerics
from tests.tolerance import BFLOAT16, FLOAT32, relative_error

SIZES = [(3, 5), (64, 40), (512, 300), (48, 384), (300, 512)]  # the larger ones are packed
ROWS = (0, 1, 2, 3, 4, 5, 8, 13, 16, 33, 64, 130, 300)


def rows_of(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("numerics", [FAST, Numerics(row_tile=4), Numerics(row_tile=16)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_matches_reference(size: tuple[int, int], bias: bool, numerics: Numerics) -> None:
    weight = rows_of(size[1], size[0])
    offsets = torch.linspace(-1, 1, size[1]) if bias else None
    linear = Linear(weight, offsets, numerics)
    for count in ROWS:
        x = rows_of(count, size[0])
        got = linear(x)
        assert got.shape == (count, size[1])
        assert relative_error(got, linear_reference(x, weight, offsets)) < FLOAT32


def test_linear_in_bfloat16_matches_reference() -> None:
    weight = rows_of(300, 512).bfloat16()
    linear = Linear(weight, None, FAST)
    x = rows_of(7, 512).bfloat16()
    assert relative_error(linear(x).float(), linear_reference(x.float(), weight.float())) < BFLOAT16


@pytest.mark.parametrize("row_tile", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(size: tuple[int, int], row_tile: int) -> None:
    numerics = Numerics(row_tile=row_tile)
    linear = Linear(rows_of(size[1], size[0]), None, numerics)
    x = rows_of(300, size[0])
    wanted = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for count in ROWS:
        for start in (0, 1, 7, 300 - count):
            assert torch.equal(linear(x[start : start + count]), wanted[start : start + count][: 300 - start])


@pytest.mark.parametrize("row_tile", [1, 4, 8])
def test_head_linear_matches_reference_and_keeps_its_bits(row_tile: int) -> None:
    weight = torch.randn(6, 32, 48, generator=torch.Generator().manual_seed(0))
    linear = HeadLinear(weight, Numerics(row_tile=row_tile))
    wide = torch.randn(160, 6, 50, generator=torch.Generator().manual_seed(1))
    x = wide[..., 3:35]  # a view, as the model passes it
    whole = linear(x)
    assert relative_error(whole, torch.einsum("rhk,hkn->rhn", x, weight)) < FLOAT32
    for start in range(0, 160, 8):
        assert torch.equal(linear(x[start : start + 8]), whole[start : start + 8])


def test_weights_are_packed_only_where_it_gains() -> None:
    assert Linear(torch.zeros(SMALLEST_PACKED // 512 + 1, 512), None, FAST)._packed is not None
    assert Linear(torch.zeros(16, 16), None, FAST)._packed is None


def test_only_row_counts_that_change_no_bit_are_proven() -> None:
    """A kernel that notices how many rows it got must be cut to single tiles."""

    def honest(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def moody(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) <= 8 else x * 2 + 1e-6

    like = torch.zeros(())
    assert proven_tiles(honest, 3, 4, like)[:2] == (LARGEST_TILE, 96)
    assert proven_tiles(moody, 3, 4, like) == (8, 4)
    assert list(cut(28, (8, 4))) == [(0, 8), (8, 16), (16, 24), (24, 28)]
    assert list(cut(0, (8, 4))) == []


@pytest.mark.parametrize("row_tile", [4, 8, 16])
@pytest.mark.parametrize("depth", [15, 16, 61])
def test_narrow_outputs_have_the_same_bits_at_any_place_in_a_tile(depth: int, row_tile: int) -> None:
    for width in range(1, 18):
        weight = torch.randn(4, depth, width, generator=torch.Generator().manual_seed(width))
        heads = HeadLinear(weight, Numerics(row_tile=row_tile))
        linear = Linear(weight[0].t().contiguous(), weight[0, 0].clone(), Numerics(row_tile=row_tile))
        x = rows_of(2 * row_tile, 4 * depth).view(-1, 4, depth)
        by_head, plain = heads(x), linear(x[:, 0].contiguous())
        assert relative_error(by_head, torch.einsum("rhk,hkn->rhn", x, weight)) < FLOAT32
        assert relative_error(plain, x[:, 0] @ weight[0] + weight[0, 0]) < FLOAT32
        for start in range(1, row_tile):
            assert torch.equal(heads(x[start : start + row_tile]), by_head[start : start + row_tile]), width
            assert torch.equal(linear(x[start : start + row_tile, 0].contiguous()), plain[start : start + row_tile])
