"""Rotation of pairs, and the normalisation of heads before it, in place on views."""

import pytest
import torch

from moe_serve.kernels.rope import pair_order, rotate_, rotate_reference
from moe_serve.kernels.rows import rms_norm, rms_norm_heads_, rms_norm_reference
from tests.tolerance import BFLOAT16, FLOAT32, relative_error


def turns_of(num_tokens: int, dim: int) -> torch.Tensor:
    angles = torch.randn(num_tokens, dim // 2, generator=torch.Generator().manual_seed(1))
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "heads", "dim"), [(0, 2, 8), (1, 1, 2), (5, 3, 16), (16, 10, 64)])
def test_rotation_in_place_matches_reference_and_leaves_its_neighbours(
    num_tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(num_tokens, heads + 2, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = whole.clone()
    turns = turns_of(num_tokens, dim)
    wanted[:, :heads] = rotate_reference(whole[:, :heads].float(), turns).to(dtype)
    rotate_(whole[:, :heads], turns)
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    assert relative_error(whole, wanted) < tolerance
    assert torch.equal(whole[:, heads:], wanted[:, heads:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("first", "width"), [(31, 39), (15, 24), (1, 9), (16, 25)])
def test_a_slice_that_begins_anywhere_is_rotated_alike(first: int, width: int, dtype: torch.dtype) -> None:
    whole = torch.randn(5, 3, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    turns, before = turns_of(5, 8), whole.clone()
    wanted = rotate_reference(whole[..., first : first + 8], turns)
    rotate_(whole[..., first : first + 8], turns)
    assert relative_error(whole[..., first : first + 8], wanted) < (FLOAT32 if dtype == torch.float32 else BFLOAT16)
    assert torch.equal(whole[..., :first], before[..., :first])
    assert torch.equal(whole[..., first + 8 :], before[..., first + 8 :])
    for row in range(5):  # the same bits in any batch
        one = before[row : row + 1].clone()
        rotate_(one[..., first : first + 8], turns[row : row + 1])
        assert torch.equal(one[0], whole[row])


def test_a_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    angles = torch.arange(20.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    turns = torch.polar(torch.ones_like(angles), angles)
    q, k = torch.randn(1, 1, 8).expand(20, 1, 8).clone(), torch.randn(1, 1, 8).expand(20, 1, 8).clone()
    before = q.norm()
    rotate_(q, turns)
    rotate_(k, turns)
    assert relative_error(q.norm(), before) < FLOAT32
    scores = q[:, 0] @ k[:, 0].T
    assert relative_error(scores.diagonal(3), scores[0, 3].expand(17)) < FLOAT32


def test_pair_order_brings_the_two_halves_together() -> None:
    assert pair_order(8, torch.device("cpu")).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 16])
@pytest.mark.parametrize("width", [1, 7, 64, 192])
def test_norms_match_reference(width: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(num_rows, width, generator=generator), torch.randn(width, generator=generator)
    assert relative_error(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)) < FLOAT32
    heads = torch.randn(num_rows, 5, width, generator=generator)
    weights = torch.randn(3, width, generator=generator)
    wanted = torch.cat((rms_norm_reference(heads[:, :3], torch.ones(width), 1e-6) * weights, heads[:, 3:]), dim=1)
    rms_norm_heads_(heads[:, :3], weights, 1e-6)
    assert relative_error(heads, wanted) < FLOAT32


@pytest.mark.parametrize("width", [20, 64, 192])
def test_a_norms_bits_do_not_depend_on_the_rows_around_it(width: int) -> None:
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1))
    whole = rms_norm(x, weight, 1e-6)
    for start, end in ((0, 1), (1, 2), (3, 10), (17, 64)):
        assert torch.equal(rms_norm(x[start:end], weight, 1e-6), whole[start:end])


@pytest.mark.parametrize("dim", [6, 8, 64])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_rotations_bits_do_not_depend_on_the_rows_around_it(heads: int, dim: int) -> None:
    x = torch.randn(64, heads, dim + 4, generator=torch.Generator().manual_seed(0))
    turns = turns_of(64, dim)
    whole = x.clone()
    rotate_(whole[..., 4:], turns)
    for start, end in ((0, 1), (1, 2), (3, 10), (17, 64)):
        part = x[start:end].clone()
        rotate_(part[..., 4:], turns[start:end])
        assert torch.equal(part, whole[start:end])
