"""Operations on single rows by compiled kernels: norms, rotary embedding, weighted sums, packing rows by slot.

The contracts are those of kernels/norm.py, rope.py and rows.py. A row's bits depend on that row
only. All numbers are float32; a row's elements lie together, and the stride of rows is free where nothing else is said.
"""

import functools
import struct

import torch
from torch import Tensor

from moe_serve.kernels.cpu import checks
from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.rope import MlaWidths


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x: [rows, width], weight: [width] -> [rows, width], in `out` (contiguous) if given"""
    out = x.new_empty(x.shape) if out is None else out
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert dense(weight, torch.float32, x.shape[1]), f"weight {weight.dtype} {tuple(weight.shape)}"
    assert dense(out, torch.float32, *x.shape), f"out {out.dtype} {tuple(out.shape)}"
    _rms_norm(x, weight, eps, out)
    return out


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same in place. x: [rows, width], may be a slice of wider rows"""
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert dense(weight, torch.float32, x.shape[1]), f"weight {weight.dtype} {tuple(weight.shape)}"
    _rms_norm(x, weight, eps, x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    at = out.data_ptr(), out.stride(0)
    cpu_library().call.rms_norm(x.data_ptr(), *x.shape, x.stride(0), weight.data_ptr(), float_bits(eps), *at)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """Adds factor * delta to x in place, and returns the normed sum. x, delta: [rows, width], weight: [width]"""
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert checks.rows(delta, x.shape[1]), f"delta {delta.dtype} {tuple(delta.shape)}, strides {delta.stride()}"
    assert len(delta) == len(x), f"{len(delta)} rows of delta for {len(x)}"
    assert dense(weight, torch.float32, x.shape[1]), f"weight {weight.dtype} {tuple(weight.shape)}"
    out = x.new_empty(x.shape)
    cpu_library().call.add_rms_norm(
        x.data_ptr(), delta.data_ptr(), *x.shape, x.stride(0), delta.stride(0), weight.data_ptr(), float_bits(eps),
        float_bits(factor), out.data_ptr(),
    )  # fmt: skip
    return out


def rope_write(
    qkv: Tensor,
    head_norm: Tensor | None,
    eps: float,
    turns: Tensor,
    slots: Tensor,
    cache_layer: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_last: bool = False,
) -> None:
    """Norms and rotates queries and keys in place, and writes keys and values into the cache; nothing for slot -1."""
    width = cache_layer.shape[2]
    assert checks.rows(qkv, (num_heads + 2 * num_kv_heads) * width), f"{tuple(qkv.shape)}, strides {qkv.stride()}"
    assert dense(cache_layer, torch.float32, len(cache_layer), 2 * num_kv_heads, width), tuple(cache_layer.shape)
    assert head_norm is None or dense(head_norm, torch.float32, num_heads + num_kv_heads, width)
    rotated = 2 * turns.shape[1]
    assert rotated <= width, f"{rotated} of {width} elements of a head"
    assert dense(turns, torch.complex64, len(qkv), rotated // 2), f"turns {turns.dtype} {tuple(turns.shape)}"
    assert dense(slots, torch.int64, len(qkv)), f"slots {slots.dtype} {tuple(slots.shape)}"
    cpu_library().call.rope_write(
        rope_facts(num_heads, num_kv_heads, width, rotated, norm_last).data_ptr(),
        qkv.data_ptr(), qkv.shape[0], qkv.stride(0),
        0 if head_norm is None else head_norm.data_ptr(), float_bits(eps), turns.data_ptr(), slots.data_ptr(),
        cache_layer.data_ptr(),
    )  # fmt: skip


def scale_(x: Tensor, factor: float) -> None:
    """Multiplies x [rows, width] in place."""
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    cpu_library().call.scale_rows(x.data_ptr(), *x.shape, x.stride(0), float_bits(factor))


def multiply_rows(x: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x with row i multiplied by factors[i], in `out`, which may be x. factors: [rows, 1]"""
    out = x.new_empty(x.shape) if out is None else out
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert checks.rows(out, x.shape[1]), f"out {out.dtype}, strides {out.stride()}"
    assert dense(factors, torch.float32, len(x), 1), f"factors {factors.dtype} {tuple(factors.shape)}"
    cpu_library().call.multiply_rows(
        x.data_ptr(), *x.shape, x.stride(0), factors.data_ptr(), out.data_ptr(), out.stride(0)
    )
    return out


def clip_(x: Tensor, limit: float) -> None:
    """Brings x [rows, width] to between -limit and limit, in place; NaN stays."""
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    cpu_library().call.clip_rows(x.data_ptr(), *x.shape, x.stride(0), float_bits(limit))


def add_gated_(total: Tensor, x: Tensor, logits: Tensor) -> None:
    """Adds x times sigmoid(logits) to total in place. total, x: [rows, width], logits: [rows, 1]; all contiguous"""
    assert dense(total, torch.float32, *x.shape), f"total {total.dtype} {tuple(total.shape)}"
    assert dense(x, torch.float32), f"{x.dtype}, strides {x.stride()}"
    assert dense(logits, torch.float32, len(x), 1), f"logits {logits.dtype} {tuple(logits.shape)}"
    cpu_library().call.add_gated_rows(total.data_ptr(), x.data_ptr(), *x.shape, logits.data_ptr())


def weighted_sum(rows: Tensor, index: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns sum over k, in order, of weights[t, k] * rows[index[t, k]], in `out` if given; all contiguous.

    rows: [num_rows, width], index: [T, topk] int64, -1 = nothing, weights: [T, topk] -> [T, width]
    """
    num_tokens, topk = index.shape
    out = rows.new_empty(num_tokens, rows.shape[1]) if out is None else out
    assert dense(rows, torch.float32), f"{rows.dtype}, strides {rows.stride()}"
    assert dense(index, torch.int64), f"index {index.dtype}, strides {index.stride()}"
    assert dense(weights, torch.float32, num_tokens, topk), f"weights {weights.dtype} {tuple(weights.shape)}"
    assert dense(out, torch.float32, num_tokens, rows.shape[1]), f"out {out.dtype} {tuple(out.shape)}"
    cpu_library().call.weighted_sum(
        rows.data_ptr(), rows.shape[1], index.data_ptr(), num_tokens, topk, weights.data_ptr(), out.data_ptr()
    )
    return out


def pack_rows(x: Tensor, ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (rows, counts [num_slots], index [T, topk]) and raises IndexError as kernels/rows.py does."""
    num_tokens, topk = ids.shape
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert dense(ids, torch.int64), f"ids {ids.dtype}, strides {ids.stride()}"
    rows = x.new_empty(num_tokens * topk, x.shape[1])
    counts, index = ids.new_empty(num_slots), ids.new_empty(num_tokens, topk)
    num_rows = cpu_library().call.pack_rows(
        x.data_ptr(), x.stride(0), x.shape[1], ids.data_ptr(), num_tokens, topk, num_slots, rows.data_ptr(),
        counts.data_ptr(), index.data_ptr(),
    )  # fmt: skip
    if num_rows < 0:
        raise IndexError(f"an id is below -1 or not below {num_slots}")
    return rows[:num_rows], counts, index


@functools.lru_cache
def float_bits(number: float) -> int:
    """Returns the bits of a float64: the kernels take integers only."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


@functools.lru_cache
def rope_facts(num_heads: int, num_kv_heads: int, width: int, rotated: int, norm_last: bool) -> Tensor:
    """Returns the block of int64 that rows.c reads."""
    return torch.tensor([num_heads, num_kv_heads, width, rotated, int(norm_last)])


@functools.lru_cache
def mla_facts(num_heads: int, widths: MlaWidths) -> Tensor:
    """Returns the block of int64 that rows.c reads."""
    return torch.tensor([num_heads, widths.nope + widths.rope, widths.latent, widths.rope])
