"""What ranks conclude from the hosts that all of them gather."""

import pytest

from moe_serve.launcher.groups import count_nodes


@pytest.mark.parametrize(
    ("hosts", "num_nodes"),
    [("a", 1), ("aaaa", 1), ("aabb", 2), ("abcd", 4), ("abab", 4), ("aaab", 4), ("aabbb", 5)],
)
def test_nodes_are_equal_runs_of_ranks_else_each_rank_is_one(hosts: str, num_nodes: int) -> None:
    assert count_nodes([host.encode() for host in hosts]) == num_nodes
