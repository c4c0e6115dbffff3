"""Rows aligned for grouped GEMM libraries: both forms say the same, padding is zero, and the way back is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.base import PackedRows
from moe_serve.dispatch.contiguous import align_rows, m_indices_from_psum


def test_one_hand_worked_layout() -> None:
    rows = PackedRows(torch.arange(1.0, 6)[:, None], torch.tensor([3, 0, 2]))
    aligned = align_rows(rows, alignment=4)
    assert aligned.x[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert aligned.m_indices.tolist() == [0, 0, 0, -1, 2, 2, -1, -1]
    assert aligned.psum.tolist() == [3, 4, 6]  # slot 1 is empty and begins where it ends
    assert aligned.m_indices.dtype == aligned.psum.dtype == torch.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from([1, 4, 16, 128]))
def test_both_forms_agree_and_rows_come_back(counts: list[int], alignment: int) -> None:
    x = torch.randn(sum(counts), 3)
    aligned = align_rows(PackedRows(x, torch.tensor(counts)), alignment)
    assert aligned.x.shape[0] % alignment == 0
    assert torch.equal(aligned.packed(aligned.x), x)
    assert not aligned.x[aligned.m_indices < 0].any(), "padding is zero"
    assert torch.bincount(aligned.m_indices[aligned.m_indices >= 0].long(), minlength=len(counts)).tolist() == counts
    assert torch.equal(m_indices_from_psum(aligned.psum, alignment), aligned.m_indices)
    starts = [end - count for end, count in zip(aligned.psum.tolist(), counts, strict=True)]
    assert all(start % alignment == 0 for start in starts)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0]], ids=str)
def test_no_rows_at_all(counts: list[int]) -> None:
    aligned = align_rows(PackedRows(torch.empty(0, 5), torch.tensor(counts)))
    assert aligned.x.shape == (0, 5)
    assert aligned.m_indices.shape == (0,)
