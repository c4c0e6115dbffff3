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


@pytest.mark.parametrize("load", [[19, 0, 9, 62, 0, 0, 29, 0], [0, 0, 0, 0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("policy", ["refined", "incremental", "greedy"])
def test_slots_that_are_filled_keep_router_groups_on_one_node(load: list[int], policy: str) -> None:
    cluster = Cluster(4, num_nodes=2, num_slots=20, num_groups=4, hierarchical=True)
    first, second = (set(node) for node in replan(np.array([load]), cluster, None, policy).reshape(2, 10).tolist())
    assert not first & second
    assert all({2 * group, 2 * group + 1} <= first or {2 * group, 2 * group + 1} <= second for group in range(4))
