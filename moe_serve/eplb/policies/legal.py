"""Makes the placement in use a legal start for edits, and keeps edits inside the node hierarchy.

A start can be illegal because a rank was excluded, an expert was lost or is on fewer than min_replicas ranks, or a rank
holds one twice; under a hierarchy also because a home node lacks one of its experts or drift has put too much load on
replicas off home.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.edits import Bools, EditState
from moe_serve.eplb.policies.hierarchy import plan_by_node
from moe_serve.eplb.policies.packing import duplicate_slots
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, part_of, replicas_per_node
from moe_serve.eplb.policies.repeatable import sum_in_order
from moe_serve.eplb.policies.replication import replicas_in
from moe_serve.eplb.repair import give_ranks

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HomeRule:
    """The edits that a node hierarchy allows: every expert keeps a replica on its home node, and the share of the load
    served off home stays within the budget.

    homes: [L, E] home node; node_of: [R]; budget: share of the load
    """

    homes: Ints
    node_of: Ints
    budget: float

    def rows(self, which: Ints) -> "HomeRule":
        """Returns the rule of some layers."""
        return HomeRule(self.homes[which], self.node_of, self.budget)

    def home_replicas(self, state: EditState) -> Ints:
        """Returns the replicas of each expert on its home node, [L, E]."""
        num_nodes = int(self.node_of[-1]) + 1
        by_node = np.stack([state.held[:, self.node_of == n].sum(axis=1) for n in range(num_nodes)], axis=1)
        at_home: Ints = np.take_along_axis(by_node, self.homes[:, None], axis=1)[:, 0]
        return at_home

    def may_receive(self, state: EditState) -> Bools:
        """Returns whether one more replica of an expert on a rank keeps the rule, [L, R, E].

        With a budget of 0 not even an idle expert may leave its node: the next window may bring it load.
        """
        count, home = np.maximum(state.count, 1), self.home_replicas(state)
        away = state.unit * (1 - home / count)
        total = np.maximum(sum_in_order(state.unit, axis=1), 1e-300)[:, None]
        after = sum_in_order(away, axis=1)[:, None] - away + state.unit * (1 - home / (count + 1))
        local = self.homes[:, None, :] == self.node_of[None, :, None]
        may: Bools = local | ((self.budget > 0) & (after <= self.budget * total))[:, None, :]
        return may

    def must_stay(self, state: EditState) -> Bools:
        """Returns the slots that may not be overwritten, [L, R, K].

        These hold the last replica on a home node, or one whose loss would raise the share served off home too far.
        """
        flat = np.maximum(state.table, 0).reshape(len(state.table), -1)
        home, count = self.home_replicas(state), state.count
        pinned = (home <= 1) | (home < count)
        node = np.repeat(self.node_of, state.table.shape[2])
        at_home = np.take_along_axis(self.homes, flat, axis=1) == node
        stays: Bools = (at_home & np.take_along_axis(pinned, flat, axis=1)).reshape(state.table.shape)
        stays &= state.table >= 0
        return stays


def make_legal(problem: Problem) -> tuple[Ids, HomeRule | None]:
    """Returns a legal table [L, R, K] close to the one in use, and the rule that edits must keep (None = global).

    A repeated replica is emptied; a lost expert takes an empty slot or overwrites a redundant replica on the lightest
    rank; then experts on too few ranks get further ones, with few changed slots. Layers whose home nodes the placement
    in use does not show are planned anew.
    """
    assert problem.current is not None
    table = problem.current.copy()
    table[duplicate_slots(table)] = -1
    rule = None
    if not problem.is_global:
        rule = _read_homes(problem, table)
    num_experts = problem.weight.shape[1]
    for layer in np.flatnonzero((replicas_in(table, num_experts) == 0).any(axis=1)):
        _place_lost(problem.weight[layer], table[layer], None if rule is None else rule.homes[layer], problem.node_of)
    if rule is None and problem.min_replicas > 1:
        for rows in table:
            give_ranks(rows, range(problem.num_ranks), problem.min_replicas)
    return table, rule


def _read_homes(problem: Problem, table: Ids) -> HomeRule:
    """Returns the home nodes that the table already respects; plans layers without such homes anew, in place."""
    request = problem.request
    num_layers, num_experts = problem.weight.shape
    groups = request.num_groups or num_experts
    replicas = replicas_per_node(problem, table)  # [L, N, E]
    present = (replicas > 0).reshape(num_layers, problem.num_nodes, groups, -1)
    complete = present.all(axis=3)
    by_group = np.where(complete, replicas.reshape(present.shape).sum(axis=3), -1)
    homes = np.repeat(by_group.argmax(axis=1), num_experts // groups, axis=1)
    wrong = ~np.all(np.any(complete, axis=1), axis=1)
    at_home = np.take_along_axis(replicas, homes[:, None], axis=1)[:, 0]
    if problem.min_replicas > 1:
        wrong |= (at_home < problem.min_replicas).any(axis=1)
    away = (problem.weight * (1 - at_home / np.maximum(replicas.sum(axis=1), 1))).sum(axis=1)
    wrong |= away > request.off_home * problem.weight.sum(axis=1) * (1 + 1e-9)
    rows = np.flatnonzero(wrong)
    if len(rows):
        fresh, fresh_homes, _ = plan_by_node(part_of(problem, rows), sweeps=0)
        table[rows], homes[rows] = fresh, fresh_homes
    return HomeRule(homes, problem.node_of, request.off_home)


def _place_lost(weight: Floats, table: Ids, homes: Ints | None, node_of: Ints) -> None:
    """Gives a slot to every expert of one layer that has none, in place: table [R, K]."""
    num_experts = len(weight)
    count = replicas_in(table[None], num_experts)[0]
    for expert in sorted(np.flatnonzero(count == 0), key=lambda e: -weight[e]):
        each = weight / np.maximum(count, 1)
        load = np.where(table < 0, 0.0, each[np.maximum(table, 0)])
        spare = (table < 0) | (count[np.maximum(table, 0)] > 1)
        if homes is not None and spare[node_of == homes[expert]].any():
            spare &= (node_of == homes[expert])[:, None]
        after = np.where(spare, load.sum(axis=1, keepdims=True) - load, np.inf)
        rank, slot = np.unravel_index(after.argmin(), table.shape)
        if table[rank, slot] >= 0:
            count[table[rank, slot]] -= 1
        table[rank, slot] = expert
        count[expert] += 1
