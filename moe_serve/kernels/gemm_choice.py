"""Chooses the library that multiplies the experts' matrices on a GPU, from a table of measurements.

A row of the table names the fastest library for a kind of GPU, an operation and a number of rows per expert.
`benchmarks/gpu.py` prints the rows. Where nothing was measured, our Triton kernel runs.
"""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from moe_serve.kernels.contiguous import align_rows
from moe_serve.kernels.numerics import FAST, Numerics

Library = Literal["triton", "torch", "deep_gemm"]
Operation = Literal["packed", "slab"]

# (compute capability, operation, largest rows per expert, library); the first match wins. Empty: not measured yet.
MEASURED: tuple[tuple[int, Operation, float, Library], ...] = ()
MODULE_OF = {"triton": "triton", "torch": "torch", "deep_gemm": "deep_gemm"}


def choose_library(
    operation: Operation, rows_per_expert: float, capability: int,
    measured: tuple[tuple[int, Operation, float, Library], ...] = MEASURED,
) -> Library:  # fmt: skip
    """Returns the fastest installed library according to the table. capability: 90 for sm_90"""
    for row_capability, row_operation, most_rows, library in measured:
        fits = (row_capability, row_operation) == (capability, operation) and rows_per_expert <= most_rows
        if fits and find_spec(MODULE_OF[library]) is not None:
            return library
    return "triton" if find_spec("triton") is not None else "torch"


def packed_gemm_on_gpu(
    x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST, library: Library | None = None
) -> Tensor:
    """Returns the product of each group's rows with its matrix, [rows, n].

    x: [rows, k], weight: [groups, n, k], rows_per_group: [groups] int64; library: None = from the table
    batch_invariant always takes Triton: the other libraries choose their tiles by the number of rows.
    """
    if library is None:
        library = _library("packed", x, x.shape[0] / weight.shape[0], numerics)
    match library:
        case "triton":
            from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

            return grouped_gemm_triton(x, weight, rows_per_group, numerics)
        case "torch":
            ends = rows_per_group.cumsum(0).to(device=x.device, dtype=torch.int32, non_blocking=True)
            y: Tensor = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
            return y
        case "deep_gemm":
            from deep_gemm import m_grouped_bf16_gemm_nt_contiguous

            rows = align_rows(x, rows_per_group)
            product = rows.x.new_empty(rows.x.shape[0], weight.shape[1])
            m_grouped_bf16_gemm_nt_contiguous(rows.x, weight, product, rows.m_indices)
            return rows.packed(product)


def slab_gemm_on_gpu(
    x: Tensor, weight: Tensor, rows_per_slot: Tensor, numerics: Numerics = FAST, expected_rows: int = 16,
    library: Library | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each slab with its matrix, [slots, capacity, n].

    x: [slots, capacity, k], weight: [slots, n, k], rows_per_slot: [slots] int64
    expected_rows: a guess of the rows per slot, for the choice of library and tile only
    """
    if library is None:
        library = _library("slab", x, expected_rows, numerics)
    match library:
        case "triton":
            from moe_serve.kernels.triton.grouped_gemm import slab_gemm_triton

            return slab_gemm_triton(x, weight, rows_per_slot, numerics, expected_rows)
        case "torch":
            return torch.bmm(x, weight.transpose(1, 2))
        case "deep_gemm":
            from deep_gemm import m_grouped_bf16_gemm_nt_masked

            y = torch.empty(*x.shape[:2], weight.shape[1], dtype=x.dtype, device=x.device)
            m_grouped_bf16_gemm_nt_masked(x, weight, y, rows_per_slot.int(), expected_rows)
            return y


def _library(operation: Operation, x: Tensor, rows_per_expert: float, numerics: Numerics) -> Library:
    if numerics.invariant:
        return "triton"
    major, minor = torch.cuda.get_device_capability(x.device)
    return choose_library(operation, rows_per_expert, 10 * major + minor)
