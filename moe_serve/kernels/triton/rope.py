# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twins of kernels/rope.py: norms, rotations and the cache's write of one layer in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import MlaWidths
from moe_serve.kernels.triton.mode import as_dtype, quantised

HEADS_PER_PROGRAM = 8
VALUES_PER_WARP = 256  # 8 for each thread: one 16-byte access of bf16


def rope_write_triton(
    q: Tensor, k: Tensor, norm: Tensor | None, eps: float, turns: Tensor, slots: Tensor, cache_layer: Tensor,
    norm_last: bool = False, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotates queries in place; norms and rotates keys, and writes them and the values behind them into the cache.

    q: [T, heads, width];  k: [T, cached heads, width], keys, then as many values, or keys alone; both may be slices
    norm: [heads + key heads, width] or None;  turns, slots, norm_last: as in rope_write
    cache_layer: [slots, cached heads, width];  scales: of a cache in 8 bits [slots, cached heads, 1] float32
    """
    num_tokens, num_heads, width = q.shape
    num_cached = k.shape[1]
    num_keys = num_cached if num_cached == 1 else num_cached // 2
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads + num_cached, HEADS_PER_PROGRAM))
        rope_write_kernel[grid](
            q, k, norm, _numbers(turns), slots, cache_layer, scales, q.stride(0), k.stride(0), cache_layer.stride(0),
            0 if scales is None else scales.stride(0), cache_layer.shape[0], num_heads, num_keys, num_cached, width,
            turns.shape[1], turns.stride(0) * 2, eps, SCALED=scales is not None, NORM=norm is not None,
            NORM_LAST=norm_last, HEADS=HEADS_PER_PROGRAM, PAIRS=triton.next_power_of_2(width // 2),
            num_warps=_num_warps(triton.next_power_of_2(width // 2)),
        )  # fmt: skip


def mla_rope_write_triton(
    q: Tensor, row: Tensor, latent_norm: Tensor, eps: float, turns: Tensor, slots: Tensor, cache_layer: Tensor,
    widths: MlaWidths, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Same contract as mla_rope_write of kernels/rope.py, but leaves `row` as it is."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens:
        mla_rope_write_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM) + 1)](
            q, row, latent_norm, _numbers(turns), slots, cache_layer, scales, q.stride(0), q.stride(1), row.stride(0),
            cache_layer.stride(0), 0 if scales is None else scales.stride(0), cache_layer.shape[0], num_heads,
            widths.nope, widths.latent, turns.stride(0) * 2, eps, SCALED=scales is not None,
            HEADS=HEADS_PER_PROGRAM, PAIRS=triton.next_power_of_2(widths.rope // 2), NUM_PAIRS=widths.rope // 2,
            LATENT=triton.next_power_of_2(widths.latent),
            num_warps=_num_warps(triton.next_power_of_2(widths.rope // 2)),
        )  # fmt: skip


def _num_warps(pairs: int) -> int:
    return max(1, min(8, HEADS_PER_PROGRAM * 2 * pairs // VALUES_PER_WARP))


def _numbers(turns: Tensor) -> Tensor:
    """Returns the real and imaginary parts, which Triton can load; a view."""
    return torch.view_as_real(turns)


@triton.jit
def rotated(x, turns, num_pairs, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Returns x [heads, 2 x pairs] float32 with the first num_pairs adjacent pairs turned.

    turns: address of cos and sin of each pair. Rows are read and written whole, 16 bytes at a time, and split here.
    """
    element = tl.arange(0, 2 * PAIRS)
    numbers = tl.load(turns + element, mask=element < 2 * num_pairs, other=0.0)
    even, odd = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
    cos, sin = tl.split(tl.reshape(numbers, (PAIRS, 2)))
    turned = tl.join(even * cos[None, :] - odd * sin[None, :], even * sin[None, :] + odd * cos[None, :])
    return tl.where((element < 2 * num_pairs)[None, :], tl.reshape(turned, (HEADS, 2 * PAIRS)), x)


@triton.jit
def normed(x, weight, width, eps):
    """Returns x [heads, elements] float32, each head normed by its root mean square, times weight."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None] * weight


@triton.jit(do_not_specialize=["num_slots", "eps"])
def rope_write_kernel(
    q, k, norm, turns, slots, cache, scales, q_stride, k_stride, slot_stride, scale_stride, num_slots, num_heads,
    num_keys, num_cached, width, num_pairs, turns_stride, eps, SCALED: tl.constexpr, NORM: tl.constexpr,
    NORM_LAST: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Program: (token, some heads of queries, keys and values, in this order)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    element = tl.arange(0, 2 * PAIRS)
    cached = head - num_heads
    inside = (head < num_heads + num_cached)[:, None] & (element < width)[None, :]
    at_q = token * q_stride + head[:, None] * width + element[None, :]
    at_k = token * k_stride + cached[:, None] * width + element[None, :]
    of_query, of_cached = inside & (cached < 0)[:, None], inside & (cached >= 0)[:, None]
    kind = q.dtype.element_ty
    x = tl.load(q + at_q, mask=of_query, other=0.0).to(tl.float32)
    x += tl.load(k + at_k, mask=of_cached, other=0.0).to(tl.float32)
    is_value = (cached >= num_keys)[:, None]
    if NORM:
        weight_at = norm + head[:, None] * width + element[None, :]
        weight = tl.load(weight_at, mask=inside & (is_value == 0), other=0.0).to(tl.float32)
    y = x
    if NORM and not NORM_LAST:
        y = as_dtype(normed(y, weight, width, eps), kind).to(tl.float32)
    y = rotated(y, turns + token * turns_stride, num_pairs, HEADS, PAIRS)
    if NORM and NORM_LAST:
        y = normed(as_dtype(y, kind).to(tl.float32), weight, width, eps)
    y = tl.where(is_value, x, y)
    tl.store(q + at_q, as_dtype(y, kind), mask=of_query)
    slot = tl.load(slots + token)
    slot = tl.where(slot < 0, num_slots - 1, slot)  # padding rows write to the spare row
    at_cache = slot * slot_stride + cached[:, None] * width + element[None, :]
    if SCALED:
        y, by = quantised(y, cache.dtype.element_ty)
        is_cached = (cached >= 0) & (cached < num_cached)
        tl.store(scales + slot * scale_stride + cached, by, mask=is_cached)
    else:
        y = as_dtype(y, cache.dtype.element_ty)
    tl.store(cache + at_cache, y, mask=of_cached)


@triton.jit(do_not_specialize=["num_slots", "eps"])
def mla_rope_write_kernel(
    q, row, latent_norm, turns, slots, cache, scales, q_stride, head_stride, row_stride, slot_stride, scale_stride,
    num_slots, num_heads, nope, latent, turns_stride, eps, SCALED: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, NUM_PAIRS: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Program: (token, some query heads); the last one writes the token's cached row."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, 2 * PAIRS)
    rotates = (element < 2 * NUM_PAIRS)[None, :]
    turns_at = turns + token * turns_stride
    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        at = token * q_stride + head[:, None] * head_stride + nope + element[None, :]
        inside = (head < num_heads)[:, None] & rotates
        query = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
        turned = rotated(query, turns_at, NUM_PAIRS, HEADS, PAIRS)
        tl.store(q + at, as_dtype(turned, q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        slot = tl.where(slot < 0, num_slots - 1, slot)
        to = cache + slot * slot_stride
        kind = cache.dtype.element_ty
        column = tl.arange(0, LATENT)
        values = tl.load(row + token * row_stride + column, mask=column < latent, other=0.0).to(tl.float32)
        weight = tl.load(latent_norm + column, mask=column < latent, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values) / latent + eps) * weight
        key_at = row + token * row_stride + latent + element[None, :]
        key = tl.load(key_at, mask=rotates, other=0.0).to(tl.float32)
        key = rotated(key, turns_at, NUM_PAIRS, 1, PAIRS)
        values = values[None, :]
        if SCALED:
            values, by = quantised(values, kind)
            key, key_by = quantised(key, kind)
            scales_at = scales + slot * scale_stride + tl.arange(0, 1)
            tl.store(scales_at, by)
            if NUM_PAIRS > 0:
                tl.store(scales_at + 1, key_by)
        else:
            values, key = as_dtype(values, kind), as_dtype(key, kind)
        tl.store(to + column[None, :], values, mask=(column < latent)[None, :])
        tl.store(to + latent + element[None, :], key, mask=rotates)
