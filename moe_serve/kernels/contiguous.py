"""Packed rows as DeepGEMM wants them: each slot's rows begin at a multiple of an alignment.

`m_indices` names the slot of every row, -1 for padding. Padding rows are zero, so that a kernel which multiplies them
adds nothing. rows_per_slot is on the host already, so nothing is read back from an accelerator.

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
    source:    [M] int64 where each packed row lies in x
    """

    x: Tensor
    m_indices: Tensor
    source: Tensor

    def packed(self, out: Tensor) -> Tensor:
        """Returns the results of real rows: out [A, N] -> [M, N], in the order of the packed rows."""
        return out.index_select(0, self.source)


def align_rows(packed: Tensor, rows_per_slot: Tensor, alignment: int = DEEPGEMM_ALIGNMENT) -> ContiguousRows:
    """Returns packed rows [M, H] in the contiguous layout, on their device. rows_per_slot: [S] int64 on the host"""
    counts, device, num_rows = rows_per_slot, packed.device, packed.shape[0]
    sizes = (counts + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    num_aligned = int(sizes.sum())
    source = torch.arange(num_rows) + shift.repeat_interleave(counts, output_size=num_rows)
    m_indices = torch.full((num_aligned,), -1, dtype=torch.int32)
    m_indices[source] = torch.arange(counts.shape[0], dtype=torch.int32).repeat_interleave(counts, output_size=num_rows)
    source = source.to(device)
    x = packed.new_zeros(num_aligned, packed.shape[1]).index_copy_(0, source, packed)
    return ContiguousRows(x, m_indices.to(device), source)
