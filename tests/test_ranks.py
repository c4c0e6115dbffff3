"""The test helper itself: results come in rank order; failures and hangs are shown and do not poison the next run."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from moe_serve.dispatch.base import EpGroup
from tests.ranks import RankFailure, run_ranks, run_virtual_ranks


def add_ranks(rank: int, group: EpGroup, start: torch.Tensor) -> torch.Tensor:
    total = start + rank
    dist.all_reduce(total, group=group.process_group)
    return total


def fail_on(rank: int, group: EpGroup, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {bad} is unhappy")
    dist.barrier(group=group.process_group)


def sleep_on(rank: int, group: EpGroup, bad: int) -> None:
    if rank == bad:
        time.sleep(60)


def die_on(rank: int, group: EpGroup, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier(group=group.process_group)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_runs_in_one_group_and_results_come_in_rank_order(num_ranks):
    results = run_ranks(num_ranks, add_ranks, torch.tensor([1.0, 2.0]))
    expected = num_ranks * torch.tensor([1.0, 2.0]) + sum(range(num_ranks))
    assert all(torch.equal(result, expected) for result in results)


def test_a_failing_rank_shows_its_traceback_and_the_next_run_works():
    with pytest.raises(RankFailure, match="rank 1 is unhappy"):
        run_ranks(2, fail_on, 1)
    assert run_ranks(2, sleep_on, -1) == [None, None]


def test_a_dead_rank_is_named_with_its_exit_code():
    with pytest.raises(RankFailure, match=r"rank 0 of 2(.|\n)*exit code 7"):
        run_ranks(2, die_on, 0)


def test_a_hang_ends_by_the_timeout_and_names_the_rank():
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 hang"):
        run_ranks(2, sleep_on, 1, timeout_s=0.5)


def test_a_function_that_ranks_cannot_name_is_refused():
    with pytest.raises(TypeError, match="top of its module"):
        run_ranks(2, lambda rank, group: None)


def test_virtual_ranks_raise_the_first_error():
    assert run_virtual_ranks(3, lambda rank: rank) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        run_virtual_ranks(2, lambda rank: 1 // rank)
