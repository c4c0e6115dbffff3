"""Operations on single rows: norms, rotary embedding with the cache's write, weighted sums, packing."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels import rope
from moe_serve.kernels import rows as plain
from moe_serve.kernels.cpu import rows
from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import MlaWidths
from moe_serve.kernels.rows import rms_norm_reference, weighted_sum_reference
from tests.tolerance import FLOAT32, relative_error

WIDTHS = (1, 7, 16, 50, 64, 70, 200, 1031)
EPS = 1e-6


def strided(num_rows: int, width: int) -> Tensor:
    """Returns random rows with a stride."""
    return torch.randn(num_rows, width + 4)[:, :width]


def noted(name: str, *arguments: object) -> Tensor:
    """Runs a declared operation by its kernel, on all rows of its first argument that is a tensor."""
    num_rows = next(len(argument) for argument in arguments if isinstance(argument, Tensor))
    return recorded_once(num_rows, lambda do: getattr(do, name)(*arguments))


def turns_of(num_rows: int, width: int) -> Tensor:
    angles = torch.randn(num_rows, width // 2)
    return torch.complex(angles.cos(), angles.sin())


@pytest.mark.parametrize("threads", (1, 2))
def test_norms_match_their_reference(threads, library):
    library.set_threads(threads)
    for num_rows, width in itertools.product((0, 1, 3, 300), WIDTHS):
        x, delta, weight = strided(num_rows, width), strided(num_rows, width), torch.randn(width)
        assert relative_error(noted("rms_norm", x, weight, EPS), rms_norm_reference(x, weight, EPS)) < FLOAT32, width
        total = x + delta
        normed = noted("add_rms_norm", x, delta, weight, EPS)
        assert torch.equal(x, total)
        assert relative_error(normed, rms_norm_reference(total, weight, EPS)) < FLOAT32, width


def test_rows_are_multiplied_each_by_its_factor(library):
    for num_rows, width, threads in itertools.product((0, 1, 5, 300), WIDTHS, (1, 2)):
        library.set_threads(threads)
        x, factors = strided(num_rows, width), torch.randn(num_rows, 1)
        assert torch.equal(noted("multiply_rows", x, factors), x * factors)
        wanted = x * factors
        noted("multiply_rows_", x, factors)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    "width, rotated, kv_heads, group, norm_last",
    [
        (16, 16, 1, 1, None),
        (64, 64, 2, 4, False),
        (38, 38, 3, 2, True),
        (64, 32, 2, 3, True),
        (38, 2, 1, 4, None),
        (16, 0, 2, 2, None),
    ],
)
def test_rotation_and_cache_write_match_torch(width, rotated, kv_heads, group, norm_last, library):
    heads = kv_heads * group
    for num_rows, threads in itertools.product((0, 1, 5, 200), (1, 2)):
        library.set_threads(threads)
        qkv, turns = strided(num_rows, (heads + 2 * kv_heads) * width), turns_of(num_rows, rotated)
        norm = None if norm_last is None else torch.randn(heads + kv_heads, width)
        slots = torch.randperm(num_rows + 4)[:num_rows]
        slots[1::3] = -1
        cache = torch.zeros(num_rows + 5, 2 * kv_heads, width)
        wanted, wanted_cache = qkv.clone(), cache.clone()
        rope.rope_write(wanted, norm, EPS, turns, slots, wanted_cache, heads, kv_heads, bool(norm_last))
        noted("rope_write", qkv, norm, EPS, turns, slots, cache, heads, kv_heads, bool(norm_last))
        wanted_cache[-1] = 0  # torch writes padding there
        assert relative_error(qkv, wanted) < FLOAT32
        assert relative_error(cache, wanted_cache) < FLOAT32


@pytest.mark.parametrize("heads, nope, latent, rotated", [(6, 32, 48, 16), (3, 10, 22, 6), (16, 128, 512, 64)])
def test_latent_rotation_and_cache_write_match_torch(heads, nope, latent, rotated, library):
    widths = MlaWidths(nope, latent, rotated)
    for num_rows, threads in itertools.product((0, 1, 5, 200), (1, 2)):
        library.set_threads(threads)
        q, row = torch.randn(num_rows, heads, nope + rotated), strided(num_rows, latent + rotated)
        turns, norm = turns_of(num_rows, rotated), torch.randn(latent)
        slots = torch.randperm(num_rows + 4)[:num_rows]
        slots[1::3] = -1
        cache = torch.zeros(num_rows + 5, 1, latent + rotated)
        wanted, wanted_cache = q.clone(), cache.clone()
        rope.mla_rope_write(wanted, row.clone(), norm, EPS, turns, slots, wanted_cache, widths)
        noted("mla_rope_write", q, row, norm, EPS, turns, slots, cache, widths)
        wanted_cache[-1] = 0
        assert relative_error(q, wanted) < FLOAT32
        assert relative_error(cache, wanted_cache) < FLOAT32


@pytest.mark.parametrize("num_tokens, topk, width", [(0, 2, 64), (1, 1, 7), (5, 3, 1100), (2, 16, 40), (600, 8, 70)])
def test_weighted_sum_has_the_bits_of_its_reference(num_tokens, topk, width, library):
    source = torch.randn(70, width)
    index = torch.randint(-1, 70, (num_tokens, topk))
    weights = torch.randn(num_tokens, topk)
    weights[index < 0] = torch.nan
    for threads in (1, 2):
        library.set_threads(threads)
        assert torch.equal(rows.weighted_sum(source, index, weights), weighted_sum_reference(source, index, weights))


@pytest.mark.parametrize("num_tokens, topk, width", [(0, 2, 64), (1, 1, 7), (5, 3, 70), (600, 8, 33)])
def test_rows_are_packed_by_slot_as_in_torch(num_tokens, topk, width, library):
    x, ids = strided(num_tokens, width), torch.randint(-1, 9, (num_tokens, topk))
    for threads in (1, 2):
        library.set_threads(threads)
        for got, wanted in zip(rows.pack_rows(x, ids, 9), plain.pack_rows(x, ids, 9), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("pack", [rows.pack_rows, plain.pack_rows])
def test_ids_that_are_no_slots_are_refused(pack):
    for bad in (-2, 9):
        with pytest.raises(IndexError, match="below 9"):
            pack(torch.zeros(1, 4), torch.tensor([[3, bad]]), 9)


def test_a_rows_bits_do_not_depend_on_the_batch_threads_or_register_width(library, avx2, use):
    def results(first: int, end: int) -> list[Tensor]:
        part = [tensor[first:end].clone() for tensor in (x, delta, turns)]
        normed = noted("rms_norm", part[0], weight, EPS)
        summed = noted("add_rms_norm", part[0], part[1], weight, EPS)
        cache = torch.zeros(300, 2, 70)
        noted("rope_write", part[1], head_norm, EPS, part[2], torch.arange(end - first), cache, 3, 1)
        total = rows.weighted_sum(x, index[first:end], weights[first:end])
        return [normed, summed, part[1], cache[: end - first], total]

    x, delta, turns = torch.randn(300, 350), torch.randn(300, 350), turns_of(300, 70)
    weight, head_norm = torch.randn(350), torch.randn(4, 70)
    index, weights = torch.randint(-1, 300, (300, 4)), torch.randn(300, 4)
    whole = results(0, 300)
    library.set_threads(2)
    for first, end in ((0, 300), (0, 1), (17, 18), (64, 127)):
        for got, wanted in zip(results(first, end), whole, strict=True):
            assert torch.equal(got, wanted[first:end]), (first, end)
    use(avx2)
    for got, wanted in zip(results(0, 300), whole, strict=True):
        assert torch.equal(got, wanted)
