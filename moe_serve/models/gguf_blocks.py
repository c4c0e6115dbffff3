"""The blocks of numbers in a GGUF file, read into groups of codes with their scales (`kernels/group_quantised.py`).

A row is a sequence of blocks, each with its own float16 scale (ggml's ggml-common.h). Blocks of "K" types hold 256
numbers in groups of 16 or 32, whose scales and minimums are small whole numbers times one or two float16 of the block.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_serve.kernels.forms import GroupForm
from moe_serve.kernels.group_quantised import GroupQuantised
from moe_serve.models.checkpoint import BLOCK_DTYPES


def groups_of(raw: Tensor, dtype_name: str) -> GroupQuantised:
    """Returns what the bytes of rows mean. raw: [rows, bytes of a row] uint8;  dtype_name: of BLOCK_DTYPES"""
    form, read = _TYPES[dtype_name]
    rows = raw.shape[0]
    parts = read(raw.view(rows, -1, BLOCK_DTYPES[dtype_name][1]))
    return GroupQuantised(form, **{name: part.reshape(rows, -1) for name, part in parts.items()})


def dequantise_blocks(raw: Tensor, dtype_name: str) -> Tensor:
    """Returns the numbers of rows of blocks. raw: [.., bytes of a row] uint8 -> [.., k] float32"""
    values = groups_of(raw.reshape(-1, raw.shape[-1]), dtype_name).values()
    return values.view(*raw.shape[:-1], values.shape[-1])


def group_form(dtype_name: str) -> GroupForm:
    """Returns the form of a type of blocks."""
    return _TYPES[dtype_name][0]


def mxfp4_blocks(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in MXFP4 as gpt-oss's own checkpoint has them: neighbours share a byte, the first in its low half.

    raw: [rows, bytes of a row] uint8 -> codes [rows, k / 2] uint8, exponents of scales [rows, k / 32] uint8
    """
    blocks = raw.view(raw.shape[0], -1, BLOCK_DTYPES["MXFP4"][1])
    codes = _nibbles(blocks[..., 1:])
    return (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(1), blocks[..., 0].contiguous()


# ---- one reader for each type: blocks [rows, blocks, bytes] uint8 -> the tensors of GroupQuantised, [rows, blocks, ..]

_Parts = dict[str, Tensor]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at a place of each block, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Returns codes of four bits: those of the low halves, then those of the high ones. [.., n] -> [.., 2 n] uint8"""
    half = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], 2 * half)
    torch.bitwise_and(packed, 15, out=codes[..., :half])
    torch.bitwise_right_shift(packed, 4, out=codes[..., half:])
    return codes


def _bits(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """Returns a few bits of each byte, those at each shift in turn. [.., n] -> [.., shifts x n] uint8"""
    return torch.cat([packed >> shift & mask for shift in shifts], -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Returns 16 where bit i of 4 bytes is set, for 32 codes: [rows, blocks, 32] uint8"""
    places = torch.arange(32, dtype=torch.uint8) % 8
    return (blocks[..., at : at + 4].repeat_interleave(8, -1) >> places & 1) << 4


def _q4_0(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 2:]), "scale": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 4:]), "scale": _half(blocks, 0), "minimum": -_half(blocks, 2)}


def _q5_0(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2), "scale": _half(blocks, 0)}


def _q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return {"codes": codes, "scale": _half(blocks, 0), "minimum": -_half(blocks, 2)}


def _q8_0(blocks: Tensor) -> _Parts:
    return {"codes": blocks[..., 2:] ^ 128, "scale": _half(blocks, 0)}  # of int8: 128 more


def _two_levels(blocks: Tensor) -> _Parts:
    """Returns scales and minimums of 8 groups, with which a block of Q4_K or Q5_K begins.

    12 bytes hold 16 numbers of six bits: the upper two bits of each kind's last four lie in the bytes of its first.
    """
    first, second, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = torch.cat((first & 63, (both & 15) | (first >> 2 & 48)), -1)
    minimum = torch.cat((second & 63, (both >> 4) | (second >> 2 & 48)), -1)
    return {
        "scale": scale.view(torch.int8),
        "minimum": minimum,
        "super_scale": _half(blocks, 0),
        "super_minimum": _half(blocks, 2),
    }


def _q4_k(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)), **_two_levels(blocks)}


def _q5_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).flatten(-2)
    return {"codes": low | _bits(blocks[..., 16:48], range(8), 1) << 4, **_two_levels(blocks)}


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), range(0, 8, 2), 3)
    scale = blocks[..., 192:208].contiguous().view(torch.int8)
    return {"codes": low | high << 4, "scale": scale, "super_scale": _half(blocks, 208)}


_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the numbers


def _mxfp4(blocks: Tensor) -> _Parts:
    codes = (_E2M1[_nibbles(blocks[..., 1:]).long()] + 12).to(torch.uint8)
    exponents = blocks[..., :1].int() - 128  # of half the scale
    return {"codes": codes, "scale": torch.ldexp(torch.ones(exponents.shape), exponents)}


_TYPES: Mapping[str, tuple[GroupForm, Callable[[Tensor], _Parts]]] = {
    "Q4_0": (GroupForm(4, 32, "float16", zero=8), _q4_0),
    "Q4_1": (GroupForm(4, 32, "float16", zero=0, has_minimum=True), _q4_1),
    "Q5_0": (GroupForm(6, 32, "float16", zero=16), _q5_0),
    "Q5_1": (GroupForm(6, 32, "float16", zero=0, has_minimum=True), _q5_1),
    "Q8_0": (GroupForm(8, 32, "float16", zero=128), _q8_0),
    "Q4_K": (GroupForm(4, 32, "two_levels", zero=0, has_minimum=True), _q4_k),
    "Q5_K": (GroupForm(6, 32, "two_levels", zero=0, has_minimum=True), _q5_k),
    "Q6_K": (GroupForm(6, 16, "two_levels", zero=32), _q6_k),
    "MXFP4": (GroupForm(6, 32, "float32", zero=12), _mxfp4),
}
