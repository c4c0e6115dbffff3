"""silu(gate) * up, the elementwise middle of a gated MLP."""

import torch
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 n], gate first -> [..., n] same dtype"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor, rows_per_slot: Tensor | None = None) -> Tensor:
    """Same contract as the reference; Triton on CUDA. A row's bits depend on that row only, for any n.

    rows_per_slot: [slots], for slabs gate_up [slots, capacity, 2 n] of which only the first rows are filled; the others
                   need not be computed

    On CPU the halves are strided views, so the loop runs row by row: its ragged tail, which uses other instructions,
    hits the same elements of every row.
    """
    if gate_up.is_cuda:
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        return silu_mul_triton(gate_up.contiguous(), rows_per_slot)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
