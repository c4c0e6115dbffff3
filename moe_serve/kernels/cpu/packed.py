"""Weights in the order in which the compiled kernels read them (gemm.h).

A weight [n, k] lies in panels of 64 rows of the weight, k outermost inside a panel: [panel][k][64]. n is padded with
zeros to a multiple of 32, and the last panel is 32 wide where that is enough; k is padded to an even number. In
bfloat16 two neighbours in k lie side by side, [panel][k / 2][64][2], as products of pairs want them. Weights in groups
lie in the same panels, with their scales beside them, as bytes (groups.h). The layout is the same for every processor,
so machines can exchange packed weights byte for byte.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_serve.kernels.forms import GROUP_CHUNK, GROUP_SUPER, GroupForm
from moe_serve.kernels.group_quantised import Activations, GroupQuantised

PANEL = 64
HALF = 32  # rows of gate, then rows of up, in a panel of both
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # moved as whole numbers: float8 lacks most of torch's moves


def padded(n: int) -> int:
    """Returns n, padded to a multiple of 32."""
    return -(-n // HALF) * HALF


def packed_size(n: int, k: int) -> int:
    """Returns the elements of a packed weight [n, k]."""
    return padded(n) * (k + k % 2)


def gate_up_size(width: int, k: int) -> int:
    """Returns the elements of a packed weight of gate and up, [2 x width, k]."""
    return packed_size(2 * padded(width), k)


def pack(weight: Tensor, out: Tensor) -> None:
    """Writes a weight [n, k] of 1, 2 or 4 bytes per element to `out` [packed_size], of the same dtype."""
    assert weight.dtype == out.dtype, f"{weight.dtype} packed as {out.dtype}"
    n, k = weight.shape
    rows, panels = weight.view(_BITS[weight.itemsize]), out.view(_BITS[out.itemsize])
    if padded(n) != n or k % 2:
        rows = pad(rows, (0, k % 2, 0, padded(n) - n))
    if weight.itemsize == 2:  # pairs, as words
        rows, panels = rows.reshape(-1).view(torch.int32).view(padded(n), -1), panels.view(torch.int32)
    n, k = rows.shape
    full = n // PANEL * PANEL
    for first, last, width in ((0, full, PANEL), (full, n, HALF)):
        num = (last - first) // width
        panels[first * k : last * k].view(num, k, width).transpose(1, 2).copy_(rows[first:last].view(num, width, k))


def pack_gate_up(weight: Tensor, out: Tensor) -> None:
    """Writes the weight of gate above up [2 x width, k] to `out` [gate_up_size]: each panel is 32 rows of both."""
    width, k = weight.shape[0] // 2, weight.shape[1]
    bits = weight.view(_BITS[weight.itemsize])
    both = bits.view(2, width, k)
    if padded(width) != width:
        both = pad(both, (0, 0, 0, padded(width) - width))
    panels = both.view(2, padded(width) // HALF, HALF, k).transpose(0, 1).reshape(2 * padded(width), k)
    pack(panels.view(weight.dtype), out)


# ---- weights in groups

_SCALES = ("float32", "float16", "bfloat16", "two_levels")  # in the order of groups.h
_CODE_STEP = 32  # of k, to a multiple of which codes are padded


def group_packed_size(n: int, k: int, form: GroupForm) -> int:
    """Returns the bytes of a packed weight [n, k] in groups."""
    return padded(n) * form.row_bytes(k)


def group_facts(form: GroupForm, activations: Activations) -> Tensor:
    """Returns the block of int64 that groups.h reads. activations: what the weight is multiplied with"""
    zero = -1 if form.zero is None else form.zero
    scale = _SCALES.index(form.scale)
    return torch.tensor([form.bits, form.group, scale, zero, form.has_minimum, activations == "int8"])


def pack_groups(weight: GroupQuantised, out: Tensor) -> None:
    """Writes a weight [n, k] in groups to `out` [group_packed_size] uint8."""
    n = weight.codes.shape[0]
    _pack_groups(weight, lambda rows: pad(rows, (0, 0, 0, 0, 0, padded(n) - n)), out)


def pack_groups_gate_up(weight: GroupQuantised, out: Tensor) -> None:
    """Writes the weight of gate above up [2 x width, k] in groups to `out`: each panel is 32 rows of both."""
    width = weight.codes.shape[0] // 2

    def in_panels(rows: Tensor) -> Tensor:
        both = pad(rows.view(2, width, *rows.shape[1:]), (0, 0, 0, 0, 0, padded(width) - width))
        return both.view(2, -1, HALF, *rows.shape[1:]).transpose(0, 1).reshape(2 * padded(width), *rows.shape[1:])

    _pack_groups(weight, in_panels, out)


def _pack_groups(weight: GroupQuantised, in_panels: Callable[[Tensor], Tensor], out: Tensor) -> None:
    """in_panels: brings rows [n, ...] of bytes into the order of the panels, and pads them"""
    form, k, at = weight.form, weight.codes.shape[1], 0  # at: bytes of a column so far
    of_chunk = GROUP_CHUNK // form.group
    for chunk, start in enumerate(range(0, k, GROUP_CHUNK)):
        groups = slice(chunk * of_chunk, (chunk + 1) * of_chunk)
        above = slice(start // GROUP_SUPER, start // GROUP_SUPER + 1)
        fields = [
            *((tensor, above) for tensor in (weight.super_scale, weight.super_minimum)),
            *((tensor, groups) for tensor in (weight.scale, weight.minimum, weight.zero)),
        ]
        rows = [_bytes(tensor[:, columns]) for tensor, columns in fields if tensor is not None]
        rows.append(_words(weight.codes[:, start : start + GROUP_CHUNK], form.bits))
        for each in rows:
            _put_columns(in_panels(each), out, at, form.row_bytes(k))
            at += each.shape[1] * each.shape[2]
    assert at == form.row_bytes(k), f"{at} bytes of a row in {form}"


def _put_columns(rows: Tensor, out: Tensor, at: int, row_bytes: int) -> None:
    """Writes rows [n, m, bytes] to each panel, [m][column][bytes], from byte `at` of a column on."""
    n, m, size = rows.shape
    full = n // PANEL * PANEL
    for first, last, width in ((0, full, PANEL), (full, n, HALF)):
        panels = out[first * row_bytes : last * row_bytes].view(-1, width * row_bytes)
        wanted = panels[:, width * at : width * (at + m * size)].view(-1, m, width, size)
        wanted.copy_(rows[first:last].view(-1, width, m, size).transpose(1, 2))


def _bytes(numbers: Tensor) -> Tensor:
    """Returns numbers [n, m] as bytes, [n, m, itemsize]."""
    return numbers.contiguous().view(torch.uint8).view(*numbers.shape, numbers.itemsize)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Returns the words of codes [n, k], [n, words, 4] bytes: of four k each, or of eight, the first four below."""
    words = pad(codes, (0, -codes.shape[1] % _CODE_STEP)).view(len(codes), -1, 4)
    return words if bits == 8 else words[:, 0::2] | words[:, 1::2] << 4
