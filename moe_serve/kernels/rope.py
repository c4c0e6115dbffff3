"""Rotary position embedding of adjacent pairs: (x[2i], x[2i+1]) is rotated by the angle of (position, i).

Adjacent pairs are complex numbers, so a rotation is one complex product, in place. Checkpoints that pair i with
i + dim/2 have their projection rows reordered at load (`pair_order`): queries and keys get the same order, so every dot
product keeps its value.

`rope_write` and `mla_rope_write` prepare the rows of one layer for attention: queries are normed and rotated in place,
keys and values go to the cache; on CUDA one launch of Triton does it.
"""

import torch
from torch import Tensor

from moe_serve.kernels.forms import MlaWidths
from moe_serve.kernels.quantised import write_cached
from moe_serve.kernels.rows import rms_norm, rms_norm_heads_


def rotate_reference(x: Tensor, turns: Tensor) -> Tensor:
    """x: [tokens, heads, dim], turns: [tokens, dim / 2] complex64 (cos + i sin) -> like x"""
    cos, sin = turns.real[:, None], turns.imag[:, None]
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Rotates x in place; same contract as the reference. x is a slice of wider rows, contiguous in its last dimension.

    It must be a slice, so that the CPU loop ends with every head. Over adjacent rows the loop would run on, and its
    ragged end, which uses other instructions, would hit a row according to its position in the batch.
    """
    rotated = x
    # Pairs are complex numbers in place where each begins at an even number of floats, which odd ranks of MLA prevent.
    if x.dtype != torch.float32 or any(n % 2 for n in (x.storage_offset(), *x.stride()[:-1])):
        rotated = torch.empty((*x.shape[:-1], x.shape[-1] + 2), device=x.device)[..., : x.shape[-1]]
        rotated.copy_(x)
    torch.view_as_complex(rotated.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(turns[:, None])
    if rotated is not x:
        x.copy_(rotated)


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
    scales: Tensor | None = None,
) -> None:
    """Norms and rotates queries and keys in place, and writes keys and values into the cache.

    qkv:         [T, (num_heads + 2 num_kv_heads) * head_dim] of queries, keys and values, may be a slice of rows
    head_norm:   [num_heads + num_kv_heads, head_dim], or None;  eps: of the norm
    turns:       [T, n / 2] complex64, for the first n <= head_dim elements of a head
    slots:       [T] int64, -1 = the spare row, which is never read
    cache_layer: [slots, 2 num_kv_heads, head_dim], keys first
    norm_last:   the norm comes behind the rotation
    scales:      [slots, 2 num_kv_heads, 1] float32, of a cache in 8 bits (kernels/quantised.py); else None
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, cache_layer.shape[2])
    if qkv.is_cuda:
        from moe_serve.kernels.triton.rope import rope_write_triton

        q, k = heads[:, :num_heads], heads[:, num_heads:]
        return rope_write_triton(q, k, head_norm, eps, turns, slots, cache_layer, norm_last, scales)
    rotated = heads[:, : num_heads + num_kv_heads]
    if head_norm is not None and not norm_last:
        rms_norm_heads_(rotated, head_norm, eps)
    rotate_(rotated[..., : 2 * turns.shape[1]], turns)
    if head_norm is not None and norm_last:
        rms_norm_heads_(rotated, head_norm, eps)
    write_cached(cache_layer, scales, slots, heads[:, num_heads:])
    return None


def mla_rope_write(
    q: Tensor,
    row: Tensor,
    latent_norm: Tensor,
    eps: float,
    turns: Tensor,
    slots: Tensor,
    cache_layer: Tensor,
    widths: MlaWidths,
    scales: Tensor | None = None,
) -> None:
    """Rotates the last part of every query head in place, and writes normed latents and rotated keys into the cache.

    q:           [T, heads, nope + rope];  row: [T, latent + rope], used up; both may be slices of rows
    latent_norm: [latent];  turns, slots: as in rope_write
    cache_layer: [slots, 1, latent + rope];  scales: of a cache in 8 bits [slots, 1, 2] float32, for latent and rope
    """
    if q.is_cuda:
        from moe_serve.kernels.triton.rope import mla_rope_write_triton

        return mla_rope_write_triton(q, row, latent_norm, eps, turns, slots, cache_layer, widths, scales)
    row = row[:, None]
    rotate_(q[..., widths.nope :], turns)
    rotate_(row[..., widths.latent :], turns)
    latent = row[..., : widths.latent]
    latent.copy_(rms_norm(latent, latent_norm, eps))
    write_cached(cache_layer, scales, slots, row, widths.latent)
    return None


def pair_order(dim: int, device: torch.device) -> Tensor:
    """Returns the half-split index at each position, [dim] int64: 0, dim/2, 1, dim/2 + 1, ..

    device: of the weights that it reorders; for meta on the CPU, where vectors beside such weights may be real
    """
    device = torch.device("cpu") if device.type == "meta" else device
    return torch.arange(dim, device=device).view(2, -1).T.reshape(-1)
