"""Norms with residual, factors of rows, rotations with the cache's write, and rows sorted by slot, in Triton."""

import pytest
import torch

from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.kernels import rows
from moe_serve.kernels.forms import MlaWidths
from moe_serve.kernels.indexed_attention import index_write
from moe_serve.kernels.rope import mla_rope_write, rope_write
from moe_serve.kernels.rows import LayerNorm, pack_all_rows_reference, pack_rows
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits, randn, relative_error
from tests.tolerance import BFLOAT16, FLOAT32

EPS = 1e-6


def limit_of(dtype: torch.dtype) -> float:
    return FLOAT32 if dtype == torch.float32 else BFLOAT16


def check_norm(device: str, num_rows: int, width: int, kind: str, factor: float) -> None:
    from moe_serve.kernels.triton.norm import norm_triton

    dtype = getattr(torch, kind)
    wide = randn(device, num_rows, width + 3, dtype=dtype)
    x, delta = wide[:, 1 : width + 1], randn(device, num_rows, width, dtype=dtype, seed=1)
    weight, bias = (randn(device, width, dtype=torch.float32, seed=seed) for seed in (2, 3))
    exact = x.float() + (delta.float() * factor).to(dtype).float()
    before, out = x.clone(), torch.empty(num_rows, width, dtype=dtype, device=device)
    norm_triton(x, None, weight, None, EPS, 1.0, out)
    assert relative_error(out, rows.rms_norm_reference(before.float(), weight, EPS)) < limit_of(dtype)
    assert_equal_bits(x, before)
    norm_triton(x, delta, weight, None, EPS, factor, out)
    assert_equal_bits(x, exact.to(dtype))
    assert relative_error(out, rows.rms_norm_reference(x.float(), weight, EPS)) < limit_of(dtype)
    norm_triton(x, None, weight, bias, EPS, 1.0, out)
    expected = rows.layer_norm_reference(x.float(), LayerNorm(weight, bias), EPS)
    assert relative_error(out, expected) < limit_of(dtype)
    norm_triton(x, None, weight, bias, EPS, 1.0, x)  # in place, between columns of others
    assert_equal_bits(x, out)
    assert torch.equal(wide[:, 0], randn(device, num_rows, width + 3, dtype=dtype)[:, 0])


@pytest.mark.parametrize("num_rows, width", [(0, 8), (1, 1), (5, 7), (3, 192), (2, 1100)])
@pytest.mark.parametrize("kind, factor", [("bfloat16", 1.0), ("float32", 0.22)])
def test_norms_match_the_reference_and_the_sum_is_kept(
    on_device: RunCheck, num_rows: int, width: int, kind: str, factor: float
) -> None:
    on_device(check_norm, num_rows, width, kind, factor)


def check_factors(device: str, num_rows: int, width: int) -> None:
    from moe_serve.kernels.triton.row_factors import multiply_rows_triton

    x, factors = randn(device, num_rows, width), randn(device, num_rows, 1, dtype=torch.float32, seed=1)
    out = torch.empty_like(x)
    assert relative_error(multiply_rows_triton(x, factors, out), x.float() * factors) < BFLOAT16
    expected = x.float() * factors.sigmoid()
    assert relative_error(multiply_rows_triton(x, factors, x, sigmoid=True), expected) < BFLOAT16


@pytest.mark.parametrize("num_rows, width", [(0, 8), (1, 1), (3, 1100)])
def test_rows_are_multiplied_by_their_numbers(on_device: RunCheck, num_rows: int, width: int) -> None:
    on_device(check_factors, num_rows, width)


def turns_of(device: str, num_rows: int, pairs: int) -> torch.Tensor:
    angles = randn("cpu", num_rows, pairs, dtype=torch.float32, seed=9)
    return (torch.polar(torch.ones_like(angles), angles) * 1.3).to(device)


def slots_of(device: str, num_rows: int) -> torch.Tensor:
    """Slots of a cache of 12 and a spare one; the last row is padding."""
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(4))[:num_rows]
    slots[-1:] = -1
    return slots.to(device)


def check_rope(
    device: str, num_rows: int, heads: tuple[int, int], width: int, pairs: int, norm: str, kind: str
) -> None:
    from moe_serve.kernels.triton.rope import rope_write_triton

    num_heads, num_kv, dtype = *heads, getattr(torch, kind)
    qkv = randn(device, num_rows, (num_heads + 2 * num_kv) * width, dtype=dtype)
    weight = randn(device, num_heads + num_kv, width, dtype=dtype, seed=1) if norm else None
    turns, slots = turns_of(device, num_rows, pairs), slots_of(device, num_rows)
    cache = torch.zeros(13, 2 * num_kv, width, dtype=dtype, device=device)
    expected, expected_cache = qkv.float().cpu(), cache.float().cpu()
    exact = (turns.cpu(), slots.cpu(), expected_cache, num_heads, num_kv, norm == "last")
    rope_write(expected, None if weight is None else weight.float().cpu(), EPS, *exact)
    split = qkv.view(num_rows, num_heads + 2 * num_kv, width)
    rope_write_triton(split[:, :num_heads], split[:, num_heads:], weight, EPS, turns, slots, cache, norm == "last")
    queries = num_heads * width
    limit = FLOAT32 if dtype == torch.float32 else 2 * BFLOAT16  # rounded behind the norm, and behind the rotation
    assert relative_error(qkv[:, :queries], expected[:, :queries]) < limit
    assert relative_error(cache, expected_cache) < limit
    values = cache[:, num_kv:]
    assert_equal_bits(values, expected_cache[:, num_kv:].to(dtype).to(device))


@pytest.mark.parametrize(
    "num_rows, heads, width, pairs",
    [(0, (2, 1), 8, 4), (1, (1, 1), 2, 1), (5, (4, 2), 16, 3), (3, (6, 2), 64, 0), (2, (5, 1), 24, 12)],
)
@pytest.mark.parametrize("norm, kind", [("", "float32"), ("first", "bfloat16"), ("last", "float32")])
def test_queries_turn_and_keys_and_values_go_to_their_slots(
    on_device: RunCheck, num_rows: int, heads: tuple[int, int], width: int, pairs: int, norm: str, kind: str
) -> None:
    on_device(check_rope, num_rows, heads, width, pairs, norm, kind)


def check_mla_rope(device: str, num_rows: int, heads: int, nope: int, latent: int, rope: int) -> None:
    from moe_serve.kernels.triton.rope import mla_rope_write_triton, rope_write_triton

    widths = MlaWidths(nope, latent, rope)
    both = randn(device, num_rows, heads * (nope + rope) + latent + rope, dtype=torch.float32)
    norm = randn(device, latent, dtype=torch.float32, seed=1)
    turns, slots = turns_of(device, num_rows, rope // 2), slots_of(device, num_rows)
    cache = torch.zeros(13, 1, latent + rope, device=device)

    def parts(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = heads * (nope + rope)
        return whole[:, :end].view(num_rows, heads, nope + rope), whole[:, end:]

    expected, expected_cache = both.cpu().clone(), cache.cpu().clone()
    mla_rope_write(*parts(expected), norm.cpu(), EPS, turns.cpu(), slots.cpu(), expected_cache, widths)
    mla_rope_write_triton(*parts(both), norm, EPS, turns, slots, cache, widths)
    assert relative_error(parts(both)[0], parts(expected)[0]) < FLOAT32
    assert relative_error(cache, expected_cache) < FLOAT32

    # Queries and keys of an indexer: keys alone, of one head.
    q, k = randn(device, num_rows, heads, latent, dtype=torch.float32), both[:, :latent]
    keys = torch.zeros(13, 1, latent, device=device)
    wanted, wanted_keys = q.cpu().clone(), keys.cpu().clone()
    turns = turns[:, : latent // 2]
    index_write(wanted, k.cpu().clone(), turns.cpu(), slots.cpu(), wanted_keys)
    rope_write_triton(q, k[:, None], None, 0.0, turns, slots, keys)
    assert relative_error(q, wanted) < FLOAT32
    assert relative_error(keys, wanted_keys) < FLOAT32


def check_8_bits(device: str, kind: str) -> None:
    from moe_serve.kernels.triton.rope import mla_rope_write_triton, rope_write_triton

    dtype, num_rows = getattr(torch, kind), 5
    turns, slots = turns_of(device, num_rows, 3), slots_of(device, num_rows)

    def caches(heads: int, width: int, parts: int) -> list[torch.Tensor]:
        """A cache as KvCache lays it out, scales behind the values of their slot; and another one."""
        layout = KvLayout.gqa(heads // 2, width) if parts == 1 else KvLayout.mla(width - 6, 6)
        pair = [KvCache([layout], 3, 4, dtype, where) for where in ("cpu", device)]
        return [each for cache in pair for each in (cache.layer(0), cache.scales(0)) if each is not None]

    def compare(plain: torch.Tensor, plain_scales: torch.Tensor, ours: torch.Tensor, scales: torch.Tensor) -> None:
        used = slots[slots >= 0].cpu()
        scales, ours = scales.cpu(), ours.cpu()
        assert torch.equal(scales.isnan(), plain_scales.isnan())
        assert relative_error(scales[used].nan_to_num(), plain_scales[used].nan_to_num()) < FLOAT32
        is_number = ~plain_scales[used].isnan().any(2)  # of other heads codes mean nothing
        got, wanted = (each.float()[used][is_number] for each in (ours, plain))
        # Rotations differ in their last bits, which may make the next number of 8 bits.
        assert (got != wanted).float().mean() < 0.02
        assert ((got - wanted).abs() <= wanted.abs() / 8 + 1).all()

    qkv = randn(device, num_rows, 4 * 20, dtype=torch.float32)
    qkv[2, 50] = float("nan")
    qkv[3, 60:80] = 0
    plain, plain_scales, ours, scales = caches(2, 20, 1)
    expected = qkv.cpu().clone()
    rope_write(expected, None, EPS, turns.cpu(), slots.cpu(), plain, 2, 1, False, plain_scales)
    split = qkv.view(num_rows, 4, 20)
    rope_write_triton(split[:, :2], split[:, 2:], None, EPS, turns, slots, ours, False, scales)
    assert bool(plain_scales.isnan().any())
    compare(plain, plain_scales, ours, scales)

    widths, norm = MlaWidths(7, 18, 6), randn(device, 18, dtype=torch.float32, seed=1)
    q, row = randn(device, num_rows, 3, 13, dtype=torch.float32), randn(device, num_rows, 24, dtype=torch.float32)
    plain, plain_scales, ours, scales = caches(1, 24, 2)
    mla_rope_write(q.cpu(), row.cpu().clone(), norm.cpu(), EPS, turns.cpu(), slots.cpu(), plain, widths, plain_scales)
    mla_rope_write_triton(q, row, norm, EPS, turns, slots, ours, widths, scales)
    compare(plain, plain_scales, ours, scales)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_keys_and_values_are_written_in_8_bits(on_device: RunCheck, kind: str) -> None:
    on_device(check_8_bits, kind)


@pytest.mark.parametrize(
    "num_rows, heads, nope, latent, rope", [(0, 2, 4, 8, 4), (1, 1, 1, 2, 2), (5, 5, 13, 18, 6), (2, 4, 16, 32, 8)]
)
def test_latents_are_normed_and_rotated_keys_go_behind_them(
    on_device: RunCheck, num_rows: int, heads: int, nope: int, latent: int, rope: int
) -> None:
    on_device(check_mla_rope, num_rows, heads, nope, latent, rope)


def check_packed(device: str, num_tokens: int, topk: int, num_slots: int, width: int, missing: bool) -> None:
    from moe_serve.kernels.quantised import quantize_reference
    from moe_serve.kernels.triton import pack_rows as module

    pack_all_rows_triton = module.pack_all_rows_triton
    module.ENTRIES_PER_STEP = 16  # so that a slot is counted in several steps
    x = randn(device, num_tokens, width + 1)[:, :width]
    draw = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1 if missing else 0, num_slots, (num_tokens, topk), generator=draw)
    expected, counts, index = pack_rows(x.cpu(), ids, num_slots)
    for got in (
        pack_all_rows_triton(x, ids.to(device), num_slots, False),
        pack_all_rows_reference(x, ids.to(device), num_slots),
    ):
        assert torch.equal(got[2].cpu(), counts)
        assert torch.equal(got[3].cpu(), index)
        assert got[0].shape == (num_tokens * topk, width)
        assert_equal_bits(got[0][: len(expected)], expected)
    q, scale, _, _ = pack_all_rows_triton(x, ids.to(device), num_slots, True)
    assert scale is not None
    expected_q, expected_scale = quantize_reference(expected)
    assert_equal_bits(q[: len(expected)], expected_q)
    assert_equal_bits(scale[: len(expected)], expected_scale)


@pytest.mark.parametrize(
    "num_tokens, topk, num_slots, width",
    [(0, 2, 3, 8), (1, 1, 1, 130), (7, 3, 5, 200), (9, 4, 3, 16)],
)
@pytest.mark.parametrize("missing", [False, True])
def test_rows_are_sorted_by_slot_and_quantised_on_the_way(
    on_device: RunCheck, num_tokens: int, topk: int, num_slots: int, width: int, missing: bool
) -> None:
    on_device(check_packed, num_tokens, topk, num_slots, width, missing)
