# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/grouped_gemm_fp8.py, packed rows and masked slabs, by the kernel of grouped_gemm.py here."""

import torch
from torch import Tensor

from moe_serve.kernels.block_scales import BlockScaled
from moe_serve.kernels.gemm_tiles import GemmTile, fp8_tile
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.triton.grouped_gemm import Scales, launch, on_device


def grouped_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor, dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST, tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as grouped_gemm_fp8_reference; rows_per_group on the host or on the device.

    tile, described: as in grouped_gemm_triton
    """
    groups, n, _ = weight.q.shape
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(x.shape[0] // groups, numerics.invariant)
        scales = Scales(x_scale, weight.scale, weight.parts)
        launch(x, weight.q, on_device(rows_per_group, x.device), y, 0, tile, described, scales)
    return y


def slab_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_slot: Tensor, dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST, expected_rows: int = 16, tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each slab with its matrix, [slots, capacity, n] dtype.

    x: [slots, capacity, k] float8_e4m3fn, x_scale: [slots, capacity, ceil(k / 128)] float32, rows_per_slot: [slots]
    int64; rows beyond it are neither read nor written
    expected_rows: a guess, for the choice of the tile only
    """
    slots, capacity, k = x.shape
    y = torch.empty(slots, capacity, weight.q.shape[1], dtype=dtype, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(expected_rows, numerics.invariant)
        rows, out = x.view(slots * capacity, k), y.view(slots * capacity, -1)
        scales = Scales(x_scale.view(slots * capacity, -1), weight.scale, weight.parts)
        launch(rows, weight.q, on_device(rows_per_slot, x.device), out, capacity, tile, described, scales)
    return y
