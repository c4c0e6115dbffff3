"""Packed rows as grouped GEMM libraries want them: each slot's rows begin at a multiple of an alignment.

DeepGEMM's contiguous layout, in both its forms: `m_indices` names the group of every row, -1 for padding; the newer
prefix-sum form gives for each group where its real rows end (its aligned start + its count), which says the same in S
numbers. Padding rows are zero, so that a kernel which multiplies them adds nothing. Pure arithmetic; rows_per_slot is
on the host already, so nothing is read back from an accelerator.

Shape words: S slots, M rows, A aligned rows (the sum of counts, each rounded up).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DEEPGEMM_ALIGNMENT = 128  # rows of its largest tile


@dataclass(frozen=True)
class ContiguousRows:
    """x:         [A, H] rows, each slot's first row at a multiple of the alignment, padding zero
    m_indices: [A] int32 slot of each row, -1 = padding
    psum:      [S] int32 aligned start of a slot + its count
    source:    [M] int64 where each packed row lies in x
    """

    x: Tensor
    m_indices: Tensor
    psum: Tensor
    source: Tensor

    def packed(self, out: Tensor) -> Tensor:
        """Returns the results of real rows: out [A, N] -> [M, N], in the order of the packed rows."""
        return out.index_select(0, self.source)


def aligned_starts(rows_per_slot: Tensor, alignment: int) -> tuple[Tensor, int]:
    """Returns where each slot begins, [S] int64, and A. rows_per_slot: [S] int64 on the host"""
    assert alignment >= 1, "rows are aligned to one row at least"
    sizes = (rows_per_slot + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    return sizes.cumsum(0) - sizes, int(sizes.sum())


def align_rows(packed: Tensor, rows_per_slot: Tensor, alignment: int = DEEPGEMM_ALIGNMENT) -> ContiguousRows:
    """Returns packed rows [M, H] in the contiguous layout, on their device. rows_per_slot: [S] int64 on the host"""
    counts, device = rows_per_slot, packed.device
    starts, num_aligned = aligned_starts(counts, alignment)
    num_rows = packed.shape[0]
    shift = starts - (counts.cumsum(0) - counts)
    source = torch.arange(num_rows) + shift.repeat_interleave(counts, output_size=num_rows)
    m_indices = torch.full((num_aligned,), -1, dtype=torch.int32)
    m_indices[source] = torch.arange(counts.shape[0], dtype=torch.int32).repeat_interleave(counts, output_size=num_rows)
    source = source.to(device)
    x = packed.new_zeros(num_aligned, packed.shape[1]).index_copy_(0, source, packed)
    return ContiguousRows(x, m_indices.to(device), (starts + counts).to(torch.int32).to(device), source)


def m_indices_from_psum(psum: Tensor, alignment: int) -> Tensor:
    """Returns the older form from the newer one: [S] int32 -> [A] int32, A being what the last slot rounds up to.

    The start of slot i is the end of slot i - 1 rounded up, so an empty slot has psum equal to its start.
    """
    ends = psum.to(torch.int64).cpu()
    rounded = (ends + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    starts = torch.nn.functional.pad(rounded, (1, 0))[:-1]
    num_aligned = int(rounded[-1]) if len(ends) else 0
    row = torch.arange(num_aligned)
    inside = (row[:, None] >= starts) & (row[:, None] < ends)
    slot = torch.where(inside.any(1), inside.to(torch.int64).argmax(1) if len(ends) else row, -1)
    return slot.to(torch.int32).to(psum.device)
