"""Rows aligned for DeepGEMM: padding is zero, every slot begins at the alignment, and rows come back."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.kernels.contiguous import align_rows
from moe_serve.kernels.gemm_choice import packed_gemm_on_gpu
from moe_serve.kernels.grouped_gemm import grouped_gemm_reference


def test_one_hand_worked_layout() -> None:
    aligned = align_rows(torch.arange(1.0, 6)[:, None], torch.tensor([3, 0, 2]), alignment=4)
    assert aligned.x[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert aligned.m_indices.tolist() == [0, 0, 0, -1, 2, 2, -1, -1]
    assert aligned.m_indices.dtype == torch.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from([1, 4, 16, 128]))
def test_slots_begin_at_the_alignment_and_rows_come_back(counts: list[int], alignment: int) -> None:
    x = torch.randn(sum(counts), 3)
    aligned = align_rows(x, torch.tensor(counts), alignment)
    assert aligned.x.shape[0] % alignment == 0
    assert torch.equal(aligned.packed(aligned.x), x)
    assert not aligned.x[aligned.m_indices < 0].any(), "padding is zero"
    assert torch.bincount(aligned.m_indices[aligned.m_indices >= 0].long(), minlength=len(counts)).tolist() == counts
    starts = [int((aligned.m_indices == slot).nonzero()[0]) for slot, count in enumerate(counts) if count]
    assert all(start % alignment == 0 for start in starts)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0]], ids=str)
def test_no_rows_at_all(counts: list[int]) -> None:
    aligned = align_rows(torch.empty(0, 5), torch.tensor(counts))
    assert aligned.x.shape == (0, 5)
    assert aligned.m_indices.shape == (0,)


def test_deep_gemm_gets_aligned_rows_and_gives_packed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double with the contract of DeepGEMM's contiguous kernel; the library itself needs a GPU, and was not run."""

    def multiply(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor) -> None:
        assert a.shape[0] % 128 == 0
        assert grouped_layout.dtype == torch.int32
        for first in range(0, a.shape[0], 128):
            groups = set(grouped_layout[first : first + 128].tolist()) - {-1}
            assert len(groups) == 1, "a tile belongs to one group"
            d[first : first + 128] = a[first : first + 128] @ b[groups.pop()].T

    double = types.ModuleType("deep_gemm")
    double.m_grouped_bf16_gemm_nt_contiguous = multiply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", double)
    counts = torch.tensor([3, 0, 130, 1])
    x, weight = torch.randn(134, 8), torch.randn(4, 5, 8)
    expected = grouped_gemm_reference(x, weight, counts)
    torch.testing.assert_close(packed_gemm_on_gpu(x, weight, counts, library="deep_gemm"), expected)
