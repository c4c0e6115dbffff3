"""Rotary position embedding of adjacent pairs: (x[2i], x[2i+1]) is rotated by the angle of (position, i).

Adjacent pairs are complex numbers, so a rotation is one complex product, in place. Checkpoints that pair i with
i + dim/2 have their projection rows reordered at load (`pair_order`): queries and keys get the same order, so every dot
product keeps its value.
"""

import torch
from torch import Tensor


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
    pairs = (*x.shape[:-1], x.shape[-1] // 2, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(pairs)).mul_(turns[:, None])
    else:
        wide = x.float()
        torch.view_as_complex(wide.view(pairs)).mul_(turns[:, None])
        x.copy_(wide)


def pair_order(dim: int, device: torch.device) -> Tensor:
    """Returns the half-split index at each position, [dim] int64: 0, dim/2, 1, dim/2 + 1, .."""
    return torch.arange(dim, device=device).view(2, -1).T.reshape(-1)
