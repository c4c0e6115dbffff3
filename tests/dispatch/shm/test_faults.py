"""A rank that dies or stops in any phase is named, the survivors go on without a wrong row, and it can come back."""

import mmap
import os
import signal

import pytest

from moe_serve.dispatch.shm.memory import Mappings
from moe_serve.errors import PeerError
from tests.dispatch.shm.faults import (
    PHASES,
    end_in,
    make_transport,
    meet,
    regions,
    run_fault,
    run_forked,
    run_step,
    run_steps,
)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_survivors_of_a_killed_rank_name_it_and_go_on(num_ranks: int, phase: str) -> None:
    reports = run_fault(num_ranks, victim=1, phase=phase, sign=signal.SIGKILL, deadline_s=20)
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
def test_a_stopped_rank_is_masked_and_rejoins_through_the_same_mapping(num_ranks: int, phase: str) -> None:
    reports = run_fault(num_ranks, victim=0, phase=phase, sign=signal.SIGSTOP, deadline_s=1.2)
    survivors = tuple(range(1, num_ranks))
    assert set(reports) == set(survivors)
    for report in reports.values():
        assert report.missed == 0
        assert report.members == survivors
        assert report.overruns == 0


def lose_two(rank: int, mappings: Mappings, board: mmap.mmap) -> list[int]:
    """Rank 1 dies while it dispatches, rank 3 steps later while it waits for results; every row is checked."""
    transport = make_transport(rank, mappings, deadline_s=20)
    members = [0, 1, 2, 3]
    for victim, phase in ((1, "dispatch send"), (3, "combine receive")):
        first = 100 * victim
        run_steps(transport, rank, range(first, first + 2), members)
        meet(board, victim, rank, members)
        if rank == victim:
            end_in(transport, phase, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerError) as missed:
            run_steps(transport, rank, range(first + 2, first + 5), members)
        assert missed.value.rank == victim
        members = transport.membership.regroup({victim})
        run_step(transport, rank, first + 50, members)
    return members


def test_one_rank_after_the_other_may_be_lost() -> None:
    assert run_forked(4, lose_two, regions(4), mmap.mmap(-1, 4096), dies=(1, 3)) == {0: [0, 2], 2: [0, 2]}
