"""The policies that balancers are compared with: the placement in use, kept, and DeepSeek's EPLB.

DeepSeek's EPLB gives the same output as the original on inputs without ties, all layers at once.

The algorithm as published: with a node hierarchy, expert groups are packed onto nodes, and every node replicates its
own experts and packs the replicas onto its ranks; without one, the whole cluster counts as a single node. Packing puts
each item, heaviest first, into the lightest pack with room; replication gives the next replica to the heaviest one.

It computes in float32 as the original does, so counts above 2^24 lose digits, and it may put two replicas of an expert
on one rank. The other policies do neither.

Shape words: X = rows planned at once, n = items of a row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.anew import PLANS_ANEW
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Ids, Problem, as_table, finish, holds, problem_of, unkept_limits
from moe_serve.eplb.repair import give_ranks
from moe_serve.errors import PlacementError

Singles = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the current placement, or experts in order where there is none."""

    name: str = "static"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the current placement; without one, the trivial placement over the ranks that take part.

        With min_replicas above 1, slots of the trivial placement are changed where an expert is on too few ranks.
        Raises PlacementError when the current placement uses an excluded rank for an expert's only slot, or has an
        expert on fewer than min_replicas ranks.
        """
        problem = problem_of(request)
        if problem.current is not None:
            if request.current is not None and request.excluded_ranks:
                lost = request.current.without_ranks(request.excluded_ranks)[1]
                if lost:
                    raise PlacementError(
                        f"the static policy keeps the current placement, but without ranks {request.excluded_ranks} "
                        f"expert {lost[0][1]} of row {lost[0][0]} (and {len(lost) - 1} more) has no slot; use another "
                        "policy"
                    )
            _check_ranks(problem, problem.current)
            return finish(problem, problem.current, keep_slots=False)
        num_layers, num_logical = problem.weight.shape
        trivial = Placement.trivial(num_layers, num_logical, problem.num_ranks, problem.num_slots - num_logical)
        table = as_table(trivial, problem.ranks * 0 + range(problem.num_ranks))
        if problem.min_replicas > 1:
            for ranks in table:
                give_ranks(ranks, range(problem.num_ranks), problem.min_replicas)
        return finish(problem, table)


def _check_ranks(problem: Problem, table: Ids) -> None:
    """Raises PlacementError when an expert of the table [L, R, K] is on fewer than min_replicas ranks."""
    least = problem.min_replicas
    num_ranks = holds(table, problem.weight.shape[1]).sum(axis=1)
    if least > 1 and (num_ranks < least).any():
        row, expert = np.argwhere(num_ranks < least)[0]
        raise PlacementError(
            f"the static policy keeps the current placement, in which expert {expert} of row {row} is on "
            f"{num_ranks[row, expert]} of the ranks that take part and min_replicas is {least}; use another policy"
        )


@dataclass(frozen=True)
class DeepSeekPolicy:
    """EPLB as DeepSeek published it.

    `num_groups` chooses the method: hierarchical where it is given and divides over the nodes, else global.
    Beyond the original: off_home = 0 without groups treats every expert as a group; 0 < off_home < 1 is our soft
    hierarchy with fast packing; with excluded ranks that leave unequal nodes the method is global. min_replicas above 1
    is met by changing slots of the finished placement, on the nodes that the experts are on.
    """

    name: str = "deepseek"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns EPLB's placement, which ignores `current`, limits of moves, `seed` and `time_budget_s`.

        Raises PlacementError where a node has too few ranks for min_replicas of its experts.
        """
        problem = problem_of(request)
        if not problem.is_global and request.off_home > 0:
            from moe_serve.eplb.policies.hierarchy import plan_by_node

            table, homes, _ = plan_by_node(problem, sweeps=0)
            return finish(problem, table, homes=homes, unkept=unkept_limits(request, problem, table, PLANS_ANEW))
        num_layers = len(problem.weight)
        num_groups, num_nodes = self._hierarchy(problem)
        flat = rebalance(problem.weight, problem.num_slots, num_groups, num_nodes, problem.num_ranks)
        table = flat.reshape(num_layers, problem.num_ranks, problem.slots_per_rank).astype(np.int32)
        if problem.min_replicas > 1:
            _spread_replicas(table, num_nodes, problem.min_replicas)
        return finish(problem, table, keep_slots=False, unkept=unkept_limits(request, problem, table, PLANS_ANEW))

    def _hierarchy(self, problem: Problem) -> tuple[int, int]:
        nodes = problem.num_nodes
        groups = problem.request.num_groups
        if groups is None and problem.request.off_home == 0:
            groups = problem.weight.shape[1]
        equal_nodes = len(set(np.bincount(problem.node_of).tolist())) == 1
        return (groups, nodes) if groups is not None and groups % nodes == 0 and equal_nodes else (1, 1)


def _spread_replicas(table: NDArray[np.int32], num_nodes: int, min_replicas: int) -> None:
    """Puts every expert on min_replicas ranks of its node, in place, with few changed slots: table [L, R, K]."""
    num_layers, num_ranks, slots = table.shape
    if num_ranks // num_nodes < min_replicas:
        raise PlacementError(
            f"policy deepseek: min_replicas is {min_replicas}, and all replicas of an expert are on the "
            f"{num_ranks // num_nodes} ranks of one node; use off_home 1 without num_groups, or another policy"
        )
    for ranks in table.reshape(num_layers * num_nodes, num_ranks // num_nodes, slots):
        give_ranks(ranks, range(len(ranks)), min_replicas)


def rebalance(weight: NDArray[np.number], num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> Ints:
    """Returns the expert of each slot: weight [L, E] -> [L, num_slots] int64. num_nodes = 1 is the global method.

    num_groups divides E and is a multiple of num_nodes; num_nodes divides num_ranks; num_ranks divides num_slots.
    """
    load = weight.astype(np.float32)
    num_layers, num_experts = load.shape
    group_size = num_experts // num_groups

    # Groups to nodes. `by_node` lists the experts in the order of their nodes.
    group_load = load.reshape(num_layers, num_groups, group_size).sum(axis=2)
    node, place = pack_balanced(group_load, num_nodes)
    new_group = node * (num_groups // num_nodes) + place
    group_at = np.empty_like(new_group)
    np.put_along_axis(group_at, new_group, np.arange(num_groups)[None, :], axis=1)
    by_node = (group_at[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, num_experts)

    # Replicas inside each node.
    per_node = num_experts // num_nodes
    local_load = np.take_along_axis(load, by_node, axis=1).reshape(-1, per_node)
    local_expert, count = replicate(local_load, num_slots // num_nodes)

    # Replicas to ranks.
    each: Singles = (local_load / count.astype(np.float32)).astype(np.float32)
    replica_load = np.take_along_axis(each, local_expert, axis=1)
    rank, place = pack_balanced(replica_load, num_ranks // num_nodes)
    slot = rank * (num_slots // num_ranks) + place
    at_slot = np.empty_like(local_expert)
    np.put_along_axis(at_slot, slot, local_expert, axis=1)

    at_slot = (
        at_slot.reshape(num_layers, num_nodes, num_slots // num_nodes)
        + (np.arange(num_nodes) * per_node)[None, :, None]
    )
    return np.take_along_axis(by_node, at_slot.reshape(num_layers, num_slots), axis=1)


def pack_balanced(load: Singles, num_packs: int) -> tuple[Ints, Ints]:
    """Returns the pack of each item and its position in it; each pack gets n / num_packs: load [X, n] -> 2 x [X, n].

    Heaviest first, to the lightest pack with room (the first of equals). One item per pack: item i goes to pack i.
    """
    num_rows, num_items = load.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros(load.shape, dtype=np.int64)
    order = np.argsort(-load, axis=1, kind="stable")
    pack, place = np.empty(load.shape, dtype=np.int64), np.empty(load.shape, dtype=np.int64)
    key = np.zeros((num_rows, num_packs), dtype=np.float32)  # load of the pack, infinity once full
    filled = np.zeros((num_rows, num_packs), dtype=np.int64)
    rows = np.arange(num_rows)
    for i in range(num_items):
        item = order[:, i]
        to = key.argmin(axis=1)
        pack[rows, item], place[rows, item] = to, filled[rows, to]
        filled[rows, to] += 1
        key[rows, to] = np.where(filled[rows, to] == room, np.float32(np.inf), key[rows, to] + load[rows, item])
    return pack, place


def replicate(load: Singles, num_replicas: int) -> tuple[Ints, Ints]:
    """Returns the expert of each replica [X, num_replicas] and the replicas of each expert: load [X, n] -> ..., [X, n].

    The first n replicas are the experts themselves; each further one goes to the expert with the heaviest replicas.
    """
    num_rows, num_experts = load.shape
    expert = np.tile(np.arange(num_replicas), (num_rows, 1))
    count = np.ones((num_rows, num_experts), dtype=np.int64)
    each = load.copy()
    rows = np.arange(num_rows)
    for i in range(num_experts, num_replicas):
        heaviest = each.argmax(axis=1)
        expert[:, i] = heaviest
        count[rows, heaviest] += 1
        each[rows, heaviest] = load[rows, heaviest] / count[rows, heaviest].astype(np.float32)
    return expert, count
