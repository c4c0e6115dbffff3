"""Workers compute on a core of another rank only while that rank waits. Each test runs in a child, on two cores."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_serve.c_library import find_compiler, load_c_library

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))[:2]
pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler"),
    pytest.mark.skipif(len(CORES) < 2, reason="needs two cores"),
]


def in_child(succeeds: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            os.sched_setaffinity(0, CORES)
            os._exit(0 if succeeds() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(CORES[-1] > 62, reason="more words than ranks may share cores")
def test_workers_compute_where_a_rank_waits_and_nowhere_while_all_compute(tmp_path: Path) -> None:
    path = HERE / "shared_cores.c"
    jobs = load_c_library(path, {"run_jobs": 3}, ("-pthread",), tmp_path)[0]
    ranks = CORES[-1] + 1
    assert in_child(lambda: jobs.run_jobs(ranks, 0, 50_000_000) == 0)
    assert in_child(lambda: jobs.run_jobs(ranks, 1, 10_000_000_000) > 0)


def test_of_two_ranks_on_one_core_the_second_moves_and_may_run_anywhere_afterwards(tmp_path: Path) -> None:
    moves = load_c_library(HERE / "move_apart.c", {"moves_apart": 0}, (), tmp_path)[0]
    # The system may move the thread between two looks, so once in five is enough.
    assert in_child(lambda: any(moves.moves_apart() for _ in range(5)))
