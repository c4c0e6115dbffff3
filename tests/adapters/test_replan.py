"""What every engine gets: a full placement, whatever our planners leave empty."""

import numpy as np
import pytest

from moe_serve.adapters.replan import Cluster, replan


@pytest.mark.parametrize(
    ("load", "num_ranks", "per_rank"),
    [([1, 40, 68, 0, 8, 29], 2, 5), ([97, 17, 70, 29, 30, 99, 0, 0], 5, 6), ([0, 0, 0, 0], 4, 3)],
)
@pytest.mark.parametrize("policy", ["refined", "incremental", "greedy"])
def test_slots_in_which_no_replica_pays_are_filled_without_an_expert_twice_on_a_rank(
    load: list[int], num_ranks: int, per_rank: int, policy: str
) -> None:
    table = replan(np.array([load]), Cluster(num_ranks, num_slots=num_ranks * per_rank), None, policy)
    assert set(table.ravel().tolist()) == set(range(len(load)))
    assert all(len(set(rank)) == per_rank for rank in table.reshape(num_ranks, per_rank).tolist())


def test_a_rank_that_holds_all_experts_repeats_one() -> None:
    assert replan(np.array([[5, 1]]), Cluster(2, num_slots=6), None, "greedy").min() == 0
