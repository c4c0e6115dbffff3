"""The experts' own work: SwiGLU over the rows that arrived at this rank's slots."""

from torch import Tensor

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.kernels.grouped_gemm import group_rows, slab_gemm
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.silu_mul import silu_mul


def expert_ffn(rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics = FAST) -> Tensor:
    """Returns down(silu(gate(x)) * up(x)) of each row with its slot's weights, in the shape of rows.x.

    In masked rows what lies beyond a slot's count is undefined, before and after. In batch_invariant a row's bits
    depend on that row and its slot's weights only.
    """
    gate_up, down = experts.matrix("gate_up"), experts.matrix("down")
    if isinstance(rows, PackedRows):
        grouped = group_rows(rows.rows_per_slot, rows.x, numerics)
        return grouped.gemm(silu_mul(grouped.gemm(rows.x, gate_up)), down)
    between = silu_mul(slab_gemm(rows.x, gate_up, rows.rows_per_slot, numerics))
    return slab_gemm(between, down, rows.rows_per_slot, numerics)
