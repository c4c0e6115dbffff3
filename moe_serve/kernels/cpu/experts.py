"""The experts' feed-forward by compiled kernels: gate and up, activation, down, in one call for all slots."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import KINDS
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size, padded

SILU = 0


@dataclass(frozen=True)
class PackedExperts:
    """The weights of S slots, packed.

    gate_up: [S, gate_up_size(width, hidden)], down: [S, packed_size(hidden, width)], float32 or bfloat16
    """

    gate_up: Tensor
    down: Tensor
    hidden: int
    width: int

    def __post_init__(self) -> None:
        assert self.gate_up.shape[1] == gate_up_size(self.width, self.hidden), tuple(self.gate_up.shape)
        assert self.down.shape[1] == packed_size(self.hidden, self.width), tuple(self.down.shape)
        assert self.gate_up.is_contiguous(), "packed weights with gaps"
        assert self.down.is_contiguous(), "packed weights with gaps"

    @cached_property
    def facts(self) -> Tensor:
        """Returns the block of int64 that experts.c reads."""
        kind = KINDS.index(self.gate_up.dtype)
        addresses = (self.gate_up.data_ptr(), self.down.data_ptr())
        return torch.tensor([self.gate_up.shape[0], self.hidden, self.width, kind, SILU, *addresses])


def packed_ffn(
    x: Tensor, rows_per_slot: Tensor, experts: PackedExperts, out: Tensor | None = None, slab_rows: int = 0
) -> Tensor:
    """Returns down(silu(gate(x)) * up(x)) of each row, by its slot's weights: like x, in `out` if given.

    x:             [rows, hidden] float32, of any row stride, sorted by slot
    rows_per_slot: [S] int64
    slab_rows:     > 0: slot s begins at row s * slab_rows, and rows beyond its count are left as they are
    """
    out = torch.empty_like(x) if out is None else out
    assert x.dtype == out.dtype == torch.float32, f"rows of {x.dtype} into {out.dtype}"
    assert rows_per_slot.dtype == torch.int64, f"counts of {rows_per_slot.dtype}"
    middle = torch.empty(x.shape[0], padded(experts.width))
    cpu_library().call.expert_ffn(
        experts.facts.data_ptr(), x.data_ptr(), x.stride(0), rows_per_slot.data_ptr(), slab_rows, middle.data_ptr(),
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out
