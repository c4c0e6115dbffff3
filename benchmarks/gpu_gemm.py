"""The grouped GEMMs of benchmarks/gpu_kernels.py: packed and slab, bf16 and FP8."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_timing import (
    BF16,
    DEVICE,
    HIDDEN,
    Ceilings,
    Row,
    check_close,
    numbers,
    time_us,
)


def packed_gemm(limits: Ceilings) -> list[Row]:
    from moe_serve.kernels.forms import BlockScaled
    from moe_serve.kernels.quantised import quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton, grouped_gemm_triton
    from moe_serve.kernels.triton.quantize import quantize_triton

    groups, each, n, k = 8, 4096, 4096, HIDDEN
    x = torch.randn(groups * each, k, dtype=BF16, device=DEVICE)
    weight = torch.randn(groups, n, k, dtype=BF16, device=DEVICE)
    counts = torch.full((groups,), each, device=DEVICE)
    ends = counts.cumsum(0).int()
    flop = 2 * groups * each * n * k
    exact = x[each : each + 64].float() @ weight[1].float().T
    check_close(grouped_gemm_triton(x, weight, counts)[each : each + 64], exact, 4e-3, "bf16 grouped GEMM")
    ours = flop / time_us([lambda: grouped_gemm_triton(x, weight, counts)]) / 1e6
    library = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
    torchs = flop / time_us([lambda: library(x, weight.transpose(1, 2), offs=ends)]) / 1e6
    conditions = f"{groups} x {each} rows, N {n}, K {k}, random data"
    rows = [
        Row(
            "bf16 grouped GEMM", ours, "TFLOP/s", ">= 600, > torch", ours >= 600 and ours > torchs, conditions,
            limits.of_bf16(ours),
        ),
        Row("  torch grouped_mm", torchs, "TFLOP/s", "", None, conditions, limits.of_bf16(torchs)),
    ]  # fmt: skip
    x8, scale = quantize_triton(x)
    weight8 = quantize_weight(weight.cpu())
    weight8 = BlockScaled(weight8.q.to(DEVICE), weight8.scale.to(DEVICE))
    got = grouped_gemm_fp8_triton(x8, scale, weight8, counts)[each : each + 64]
    check_close(got, exact, 6e-2, "FP8 grouped GEMM")  # against unquantised operands
    rate = flop / time_us([lambda: grouped_gemm_fp8_triton(x8, scale, weight8, counts)]) / 1e6
    return [
        *rows,
        Row("FP8 block-scaled grouped GEMM", rate, "TFLOP/s", ">= 800", rate >= 800, conditions, limits.of_fp8(rate)),
    ]


def slab_gemm(limits: Ceilings) -> list[Row]:
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    slots, filled, capacity, n, k = 32, 20, 1024, 4096, HIDDEN
    weight = torch.randn(slots, n, k, dtype=BF16, device=DEVICE)  # 1.9 GB: far larger than any cache
    x = torch.randn(slots, capacity, k, dtype=BF16, device=DEVICE)
    counts = torch.full((slots,), filled, device=DEVICE)
    got = grouped_gemm_triton(x, weight, counts, expected_rows=filled)
    check_close(got[3, :filled], x[3, :filled].float() @ weight[3].float().T, 4e-3, "masked GEMM")
    rows = []
    for guess in (16, 64):  # both tiles that could serve this, so that the table can be filled
        micros = time_us([lambda guess=guess: grouped_gemm_triton(x, weight, counts, expected_rows=guess)])
        share = weight.numel() * 2 / micros / 1e3 / limits.read_gb_s * 100
        goal = (">= 75 % of read", share >= 75) if guess == 64 else ("", None)
        rows.append(
            Row(f"masked bf16 GEMM, tile for {guess} rows", share, "%", *goal, f"{slots} experts x {filled} rows")
        )
    return [*rows, *slab_gemm_fp8(limits, x, weight, counts)]


def slab_gemm_fp8(limits: Ceilings, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> Iterator[Row]:
    """x: [slots, capacity, k], weight: [slots, n, k] bfloat16, counts: [slots]"""
    from moe_serve.kernels.forms import BlockScaled
    from moe_serve.kernels.quantised import quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton
    from moe_serve.kernels.triton.quantize import quantize_triton

    pieces = [quantize_weight(one[None], parts=2) for one in weight]  # one by one: it widens to float32
    values = torch.cat([piece.q.view(torch.uint8) for piece in pieces]).view(torch.float8_e4m3fn)
    quantised = BlockScaled(values, torch.cat([piece.scale for piece in pieces]), parts=2)
    x8, scale = quantize_triton(x, counts)
    filled = int(numbers(counts)[3])
    got = grouped_gemm_fp8_triton(x8, scale, quantised, counts, expected_rows=filled)
    check_close(got[3, :filled], x[3, :filled].float() @ weight[3].float().T, 6e-2, "masked FP8 GEMM")
    for guess in (16, 64):
        micros = time_us([partial(grouped_gemm_fp8_triton, x8, scale, quantised, counts, expected_rows=guess)])
        share = quantised.q.numel() / micros / 1e3 / limits.read_gb_s * 100
        yield Row(
            f"masked FP8 GEMM, tile for {guess} rows", share, "%", "", None, f"{len(counts)} experts x {filled} rows"
        )
