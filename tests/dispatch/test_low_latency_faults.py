"""A rank that dies or stops in any phase is named, the survivors go on without a wrong row, and it can come back."""

import signal

import pytest

from tests.dispatch.faults import PHASES, run_fault


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_survivors_of_a_killed_rank_name_it_and_go_on(num_ranks: int, phase: str) -> None:
    reports = run_fault(num_ranks, victim=1, phase=phase, sign=signal.SIGKILL, deadline_s=2)
    survivors = tuple(rank for rank in range(num_ranks) if rank != 1)
    assert set(reports) == set(survivors)
    for report in reports.values():
        assert report.missed == 1
        assert report.members == survivors
        assert report.phase.split()[0] in ("dispatch", "combine")
        assert report.sequence in (4, 5), "the number of the call in which it was missed"
        assert report.overruns == 0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_stopped_rank_is_left_out_and_comes_back_through_the_same_mapping(num_ranks: int, phase: str) -> None:
    reports = run_fault(num_ranks, victim=0, phase=phase, sign=signal.SIGSTOP, deadline_s=1.0)
    survivors = tuple(range(1, num_ranks))
    assert set(reports) == set(survivors)
    for report in reports.values():
        assert report.missed == 0
        assert report.members == survivors
        assert report.overruns == 0
