"""The experts' own work: a gated MLP over the rows that arrived at this rank's slots, in any form of weights.

Biases, and activations other than SiLU, are for CPUs.
"""

import torch
from torch import Tensor

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.kernels.activation import clamped_swiglu_, silu_mul, silu_mul_quantize
from moe_serve.kernels.cpu.experts import packed_ffn
from moe_serve.kernels.fp8 import grouped_gemm_fp8, quantize, slab_gemm_fp8
from moe_serve.kernels.grouped_gemm import group_rows, slab_gemm
from moe_serve.kernels.int8 import grouped_gemm_int8, quantize_int8
from moe_serve.kernels.numerics import FAST, Numerics

_MXFP4 = "only the compiled kernels multiply MXFP4"


def expert_ffn(
    rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics = FAST, out: Tensor | None = None
) -> Tensor:
    """Returns down(activation(gate(x), up(x))) of each row with its slot's weights, in the shape of rows.x.

    In masked rows what lies beyond a slot's count is undefined, before and after. In batch_invariant a row's bits
    depend on that row and its slot's weights only. Quantised experts quantise the rows of both products too, each row
    by itself.

    out: where packed results may be written, in the shape of rows.x; a product that cannot ignores it
    """
    if numerics.compiled:
        if isinstance(rows, PackedRows):
            return packed_ffn(rows.x, rows.rows_per_slot, experts.packed, out)
        out = None if out is None else out.flatten(0, 1)
        slab_rows = rows.x.shape[1]
        return packed_ffn(rows.x.flatten(0, 1), rows.rows_per_slot, experts.packed, out, slab_rows).view_as(rows.x)
    if isinstance(rows, PackedRows):
        return _packed_ffn(rows.x, rows.rows_per_slot, experts, numerics, out)
    if rows.x.device.type != "cpu":
        return _slab_ffn(rows.x, rows.rows_per_slot, experts, numerics)
    # Static sizes serve graphs; a CPU has none, and gathering the filled rows once is cheaper than computing all.
    filled = torch.arange(rows.x.shape[1]) < rows.rows_per_slot[:, None]
    slabs = torch.empty_like(rows.x)
    slabs[filled] = _packed_ffn(rows.x[filled], rows.rows_per_slot, experts, numerics)
    return slabs


def _packed_ffn(
    x: Tensor, counts: Tensor, experts: ExpertStore, numerics: Numerics, out: Tensor | None = None
) -> Tensor:
    """x: [rows, H], counts: [slots] int64 CPU -> [rows, H]"""
    match experts.form:
        case "dense":
            grouped = group_rows(counts, x, numerics)
            middle = _activate(grouped.gemm(x, experts.matrix("gate_up")), experts, counts)
            return _add_bias(grouped.gemm(middle, experts.matrix("down"), out), experts.bias("down"), counts)
        case "fp8":
            gate_up, down = experts.block_scaled("gate_up"), experts.block_scaled("down")
            between = grouped_gemm_fp8(*quantize(x), gate_up, counts, x.dtype, numerics)
            return grouped_gemm_fp8(*silu_mul_quantize(between), down, counts, x.dtype, numerics)
        case "int8":
            gate_up_q, gate_up_scale = experts.matrix("gate_up"), experts.scale("gate_up")
            between = grouped_gemm_int8(*quantize_int8(x), gate_up_q, gate_up_scale, counts, torch.float32)
            middle_q, middle_scale = quantize_int8(_activate(between, experts, counts))
            results = grouped_gemm_int8(
                middle_q, middle_scale, experts.matrix("down"), experts.scale("down"), counts, x.dtype
            )
            return _add_bias(results, experts.bias("down"), counts)
        case "mxfp4":
            raise AssertionError(_MXFP4)


def _activate(gate_up: Tensor, experts: ExpertStore, counts: Tensor) -> Tensor:
    """Returns what goes into the down projection. gate_up: [rows, 2 I] without biases, which is used up"""
    gate_up = _add_bias(gate_up, experts.bias("gate_up"), counts)
    match experts.activation.kind:
        case "silu":
            return silu_mul(gate_up)
        case "clamped_swiglu":
            return clamped_swiglu_(gate_up, experts.activation)


def _add_bias(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Adds each slot's bias to its rows, in place. rows: [rows, n], bias: [slots, n], counts: [slots] CPU"""
    if bias is not None:
        rows += bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])
    return rows


def _slab_ffn(x: Tensor, counts: Tensor, experts: ExpertStore, numerics: Numerics) -> Tensor:
    """x: [slots, capacity, H], counts: [slots] int64 on the accelerator, never read by the host -> like x"""
    match experts.form:
        case "dense":
            between = slab_gemm(x, experts.matrix("gate_up"), counts, numerics)
            return slab_gemm(silu_mul(between, counts), experts.matrix("down"), counts, numerics)
        case "fp8":
            gate_up, down = experts.block_scaled("gate_up"), experts.block_scaled("down")
            between = slab_gemm_fp8(*quantize(x, counts), gate_up, counts, x.dtype, numerics)
            return slab_gemm_fp8(*silu_mul_quantize(between, counts), down, counts, x.dtype, numerics)
        case "int8":
            raise AssertionError("int8 experts live on CPUs, where slabs are packed")
        case "mxfp4":
            raise AssertionError(_MXFP4)
