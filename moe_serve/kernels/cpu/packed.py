"""Weights in the order in which the compiled kernels read them (gemm.h).

A weight [n, k] lies in panels of 64 rows of the weight, k outermost inside a panel: [panel][k][64]. n is padded with
zeros to a multiple of 32, and the last panel is 32 wide where that is enough; k is padded to an even number. In
bfloat16 two neighbours in k lie side by side, [panel][k / 2][64][2], as products of pairs want them. Weights in groups
lie in the same panels, with their scales beside them, as bytes (groups.h). The layout is the same for every processor,
so machines can exchange packed weights byte for byte.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.forms import GroupForm
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


def gate_up_size(width: int, k: int, stacks: int = 2) -> int:
    """Returns the elements of a packed weight of gate and up, [2 x width, k]; stacks: 1: of up alone."""
    return packed_size(stacks * padded(width), k)


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


def pack_gate_up(weight: Tensor, out: Tensor, stacks: int = 2) -> None:
    """Writes the weight of gate above up [2 x width, k] to `out` [gate_up_size]: each panel is 32 rows of both.

    stacks: 1: it is up alone, which is packed as any other weight
    """
    if stacks == 1:
        pack(weight, out)
        return
    width, k = weight.shape[0] // 2, weight.shape[1]
    bits = weight.view(_BITS[weight.itemsize])
    both = bits.view(2, width, k)
    if padded(width) != width:
        both = pad(both, (0, 0, 0, padded(width) - width))
    panels = both.view(2, padded(width) // HALF, HALF, k).transpose(0, 1).reshape(2 * padded(width), k)
    pack(panels.view(weight.dtype), out)


# ---- weights in groups

_SCALES = ("float32", "float16", "bfloat16", "two_levels")  # in the order of groups.h


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
    _pack_groups(weight, False, out)


def pack_groups_gate_up(weight: GroupQuantised, out: Tensor, stacks: int = 2) -> None:
    """Writes the weight of gate above up [2 x width, k] in groups to `out`; stacks: as for pack_gate_up."""
    _pack_groups(weight, stacks == 2, out)


def _pack_groups(weight: GroupQuantised, is_gate_up: bool, out: Tensor) -> None:
    form, (n, k), codes = weight.form, weight.codes.shape, weight.codes.contiguous()
    of_supers = [weight.super_scale, weight.super_minimum]
    found = [*of_supers, weight.scale, weight.minimum, weight.zero]  # in the order in which groups.h has them
    fields = [
        (numbers.contiguous(), numbers.shape[1], numbers.itemsize, at < len(of_supers))
        for at, numbers in enumerate(found)
        if numbers is not None
    ]
    facts = torch.tensor([[numbers.data_ptr(), *rest] for numbers, *rest in fields])
    rows, row_bytes = 2 * padded(n // 2) if is_gate_up else padded(n), form.row_bytes(k)
    assert out.is_contiguous(), "packed weights have gaps"
    assert out.nbytes == rows * row_bytes, f"{out.nbytes} bytes for {rows} rows of {row_bytes}"
    addresses = facts.data_ptr(), len(fields), row_bytes, out.data_ptr()
    cpu_library().call.pack_groups(codes.data_ptr(), n, k, form.bits, form.group, is_gate_up, *addresses)
