"""What every engine gets: a full placement, whatever our planners leave empty."""

import numpy as np

from moe_serve.adapters.replan import Cluster, replan


def test_slots_in_which_no_replica_pays_are_filled_without_an_expert_twice_on_a_rank() -> None:
    for load in ([[100, 0, 0, 0]], [[0, 0, 0, 0]], [[7, 7, 7, 7]]):
        for policy in ("greedy", "incremental"):
            table = replan(np.array(load), Cluster(4, num_slots=12), None, policy)
            assert all(len(set(rank)) == 3 for rank in table.reshape(4, 3).tolist())
    assert (
        replan(np.array([[5, 1]]), Cluster(2, num_slots=6), None, "greedy").min() == 0
    )  # a rank holds all, and repeats
