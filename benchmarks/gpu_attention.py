"""Attention over the paged cache on one GPU, against the memory's rate and torch; a part of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu_attention [NAME ...]

Some rows of each form are checked against the plain formula before it is timed. Blocks lie in a random order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_timing import BF16, DEVICE, Ceilings, Row, check_close, numbers, run_benchmarks, time_us
from moe_serve.kernels.forms import AttendShape
from moe_serve.kernels.triton.attention import PagedRows, attend_triton
from tests.tolerance import BFLOAT16

BLOCK_SIZE = 16
GQA = AttendShape(heads=4, group=16, width=128, scale=128**-0.5)  # Qwen3-235B-A22B
MLA = AttendShape(heads=1, group=128, width=576, scale=192**-0.5, latent=512)  # DeepSeek-V3


@dataclass(frozen=True)
class Case:
    """num_seqs sequences with `cached` tokens before num_new new ones each, on one layer's cache."""

    shape: AttendShape
    num_seqs: int
    cached: int
    num_new: int = 1

    @property
    def num_keys(self) -> int:
        return self.cached + self.num_new

    @property
    def conditions(self) -> str:
        kind = "GQA 64/4 x 128" if self.shape.latent is None else "MLA absorbed, 128 heads"
        new = "decodes" if self.num_new == 1 else f"chunks of {self.num_new}"
        return f"{kind}, {self.num_seqs} {new} behind {self.cached} tokens, bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values that are read once, of queries and of results."""
        shape, rows = self.shape, self.num_seqs * self.num_new
        per_key = shape.row_shape[0] * shape.row_shape[1]
        per_row = shape.heads * shape.group * (shape.width + shape.value_width)
        return 2 * (self.num_seqs * self.num_keys * per_key + rows * per_row)

    @property
    def flop(self) -> float:
        """Products of queries with the keys up to their own, and of weights with values."""
        shape = self.shape
        seen = self.num_new * (self.cached + 1 + self.num_keys) / 2
        return 2.0 * self.num_seqs * seen * shape.heads * shape.group * (shape.width + shape.value_width)


def made(case: Case) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Returns queries, cache, results and rows of a case."""
    shape, rows = case.shape, case.num_seqs * case.num_new
    blocks = -(-case.num_keys // BLOCK_SIZE)
    cache = torch.randn(case.num_seqs * blocks * BLOCK_SIZE, *shape.row_shape, dtype=BF16, device=DEVICE)
    q = torch.randn(rows, shape.heads, shape.group, shape.width, dtype=BF16, device=DEVICE)
    out = torch.empty(rows, shape.heads, shape.group, shape.value_width, dtype=BF16, device=DEVICE)
    tables = torch.randperm(case.num_seqs * blocks, device=DEVICE).to(torch.int32).view(case.num_seqs, blocks)
    lens = torch.full((case.num_seqs,), case.num_keys, device=DEVICE)
    starts = None
    if case.num_new > 1:
        starts = torch.arange(0, rows + 1, case.num_new, dtype=torch.int32, device=DEVICE)
    return q, cache, out, PagedRows(starts, lens, tables, BLOCK_SIZE, rows, case.num_keys)


def plain(case: Case, q: Tensor, cache: Tensor, tables: Tensor, row: int) -> Tensor:
    """Returns the attention of a row in float32, [heads, group, value width]."""
    seq, new = divmod(row, case.num_new)
    num_seen = case.cached + new + 1
    place = torch.arange(num_seen, device=DEVICE)
    slots = tables[seq].long()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
    found, heads = cache[slots].float(), case.shape.heads
    keys, values = found[:, :heads], found[:, heads:]
    if case.shape.latent is not None:
        keys, values = found, found[..., : case.shape.latent]
    scores = torch.einsum("hgd,khd->hgk", q[row].float(), keys) * case.shape.scale
    return torch.einsum("hgk,khd->hgd", scores.softmax(-1), values)


def attention(case: Case, limits: Ceilings, library: Callable[[Tensor], object] | None = None) -> Iterator[Row]:
    """Checks and times one case. library: the same by torch, of contiguous keys"""
    q, cache, out, rows = made(case)

    def ours() -> None:
        attend_triton(q, cache, out, case.shape, rows)

    ours()
    for row in {0, q.shape[0] // 2, q.shape[0] - 1}:
        expected = plain(case, q, cache, rows.block_tables, row)
        check_close(out[row], expected, 2 * BFLOAT16, f"attention, row {row} of {case.conditions}")
    assert all(each == each for each in numbers(out[-1].float().sum())), "a result is no number"
    micros = time_us([ours])
    gb_s, tflop_s = case.num_bytes / micros / 1e3, case.flop / micros / 1e6
    by_memory = case.num_bytes / limits.read_gb_s / 1e9 > case.flop / limits.matrix_tflop_s / 1e12
    goal = gb_s >= 0.7 * limits.read_gb_s if by_memory else None
    yield Row("attention", micros, "us", "", None, case.conditions)
    yield Row(
        "  its bytes", gb_s, "GB/s", ">= 70 % of read" if by_memory else "", goal, case.conditions,
        limits.of_memory(gb_s),
    )  # fmt: skip
    yield Row("  its FLOP", tflop_s, "TFLOP/s", "", None, case.conditions, limits.of_bf16(tflop_s))
    if library is not None:
        yield Row("  speed over torch's fused attention", time_us([lambda: library(q)]) / micros, "x", "", None, "")


def decodes(limits: Ceilings) -> Iterator[Row]:
    for num_seqs, cached in ((1, 4095), (32, 4095), (128, 4095), (16, 32767)):
        yield from attention(Case(GQA, num_seqs, cached), limits)


def latent_decodes(limits: Ceilings) -> Iterator[Row]:
    for num_seqs, cached in ((1, 4095), (32, 4095), (128, 4095), (16, 32767)):
        yield from attention(Case(MLA, num_seqs, cached), limits)


def chunks(limits: Ceilings) -> Iterator[Row]:
    """Whole prompts, which torch computes as well, and chunks behind cached tokens."""
    whole = Case(GQA, 4, 0, 2048)
    keys, values = (torch.randn(4, 4, 2048, 128, dtype=BF16, device=DEVICE) for _ in "kv")

    def fused(q: Tensor) -> Tensor:
        rows = q.view(4, 2048, 64, 128).transpose(1, 2)
        return functional.scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)

    yield from attention(whole, limits, fused)
    yield from attention(Case(GQA, 4, 4096, 1024), limits)
    yield from attention(Case(MLA, 4, 4096, 128), limits)


BENCHMARKS = {"decodes": decodes, "latent_decodes": latent_decodes, "chunks": chunks}

if __name__ == "__main__":
    run_benchmarks(BENCHMARKS, __doc__ or "")
