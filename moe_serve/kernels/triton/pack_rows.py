# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of pack_all_rows of kernels/rows.py, in two launches of static size: places, then rows.

Places come from counting, slot by slot, in the order of the entries: no sort, no atomics, the same rows in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import FP8_GROUP, num_groups
from moe_serve.kernels.triton.quantize import quantize_groups

ENTRIES_PER_STEP = 1024
GROUPS_PER_PROGRAM = 16  # 2048 values: two 16-byte loads of bf16 for each of 128 threads


def pack_all_rows_triton(
    x: Tensor, ids: Tensor, num_slots: int, quantised: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Same contract as pack_all_rows_reference. Rows of x may be strided; values of a row are contiguous."""
    (num_tokens, topk), width, device = ids.shape, x.shape[1], x.device
    num_entries, ids = ids.numel(), ids.contiguous()
    place, index = torch.empty_like(ids), torch.empty_like(ids)
    counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    rows = torch.empty(num_entries, width, dtype=torch.float8_e4m3fn if quantised else x.dtype, device=device)
    scale = torch.empty(num_entries, num_groups(width), device=device) if quantised else None
    place_rows_kernel[(num_slots,)](ids, place, counts, num_entries, STEP=ENTRIES_PER_STEP)
    if num_entries:
        grid = (num_tokens, triton.cdiv(num_groups(width), GROUPS_PER_PROGRAM))
        pack_rows_kernel[grid](
            x, ids, place, counts, rows, scale, index, x.stride(0), width, num_slots, num_groups(width),
            TOPK=topk, SLOTS=triton.next_power_of_2(num_slots), QUANTIZE=quantised, GROUPS=GROUPS_PER_PROGRAM,
            GROUP=FP8_GROUP,
        )  # fmt: skip
    return rows, scale, counts, index


@triton.jit(do_not_specialize=["num_entries"])
def place_rows_kernel(ids, place, counts, num_entries, STEP: tl.constexpr):
    """Program: a slot. place: [num_entries] int64, which row of its slot an entry is; counts: [num_slots] int64"""
    slot = tl.program_id(0)
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, num_entries, STEP):
        entry = start + tl.arange(0, STEP)
        mine = tl.load(ids + entry, mask=entry < num_entries, other=-1) == slot
        before = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(place + entry, total + before, mask=mine)
        total += tl.sum(mine.to(tl.int32))
    tl.store(counts + slot, total)


@triton.jit
def pack_rows_kernel(
    x, ids, place, counts, rows, scale, index, x_stride, width, num_slots, num_groups,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program: (token, some groups of its row), read once and written for each of its entries."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    values = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    if QUANTIZE:
        values, scales = quantize_groups(values.to(tl.float32))
    slots = tl.arange(0, SLOTS)
    rows_of_slot = tl.load(counts + slots, mask=slots < num_slots, other=0)
    for k in tl.static_range(TOPK):
        slot = tl.load(ids + token * TOPK + k)
        row = -1 + tl.zeros((), dtype=tl.int64)
        if slot >= 0:
            row = tl.sum(tl.where(slots < slot, rows_of_slot, 0)) + tl.load(place + token * TOPK + k)
            tl.store(rows + row * width + column, values, mask=inside)
            if QUANTIZE:
                tl.store(scale + row * num_groups + group, scales, mask=group < num_groups)
        if tl.program_id(1) == 0:
            tl.store(index + token * TOPK + k, row)
