"""Turns a plan request into dense arrays, and a finished table into a Plan: the first and last step of every policy.

Inside, a placement is a table [L, R, K] of expert ids over the ranks that take part (excluded ranks are left out), and
an expert has two numbers: `weight`, which its replicas share evenly, and `fixed`, which each replica costs on its own.

Shape words: L = layers, E = experts, R = ranks that take part, K = slots per rank, N = nodes with such ranks.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_arrivals, count_moves
from moe_serve.eplb.policies.packing import Deadline, balancedness_bound
from moe_serve.eplb.policies.policy import Plan, PlanRequest, Unkept

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Problem:
    """A request as the packers see it.

    weight:   [L, E] load that the objective balances; in tokens for the objective "tokens"
    fixed:    [L, E] cost of each replica beside its share of weight, or None
    ranks:    [R] ids of the ranks that take part
    node_of:  [R] node of each, renumbered 0 .. N-1
    current:  [L, R, K] table in use, or None
    """

    request: PlanRequest
    weight: Floats
    fixed: Floats | None
    ranks: NDArray[np.int64]
    node_of: NDArray[np.int64]
    slots_per_rank: int
    current: Ids | None
    deadline: Deadline
    started: float = field(default_factory=time.perf_counter)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def min_replicas(self) -> int:
        return self.request.min_replicas

    @property
    def num_nodes(self) -> int:
        return int(self.node_of[-1]) + 1

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank

    @property
    def num_spare(self) -> int:
        """Slots beyond the replicas that experts have at least; with 0, replica counts are not free."""
        return self.num_slots - int(self.weight.shape[1]) * self.min_replicas

    @property
    def limits_moves(self) -> bool:
        """Whether the request limits moves."""
        request = self.request
        return (request.max_moves, request.max_total_moves, request.max_rank_moves) != (None, None, None)

    @property
    def is_global(self) -> bool:
        """Whether experts may live on any node."""
        return self.request.off_home >= 1.0 or self.num_nodes == 1


def problem_of(request: PlanRequest) -> Problem:
    """Returns the arrays of a request."""
    ranks = request.live_ranks
    nodes = ranks // request.topology.ranks_per_node
    weight, fixed = objective_weights(request)
    slots_per_rank = request.num_slots // request.topology.num_ranks
    current = None
    if request.current is not None:
        current = as_table(request.current, ranks)
    return Problem(
        request=request,
        weight=weight,
        fixed=fixed,
        ranks=ranks,
        node_of=np.unique(nodes, return_inverse=True)[1].astype(np.int64),
        slots_per_rank=slots_per_rank,
        current=current,
        deadline=Deadline.after(request.time_budget_s),
    )


def objective_weights(request: PlanRequest) -> tuple[Floats, Floats | None]:
    """Returns the weight that replicas share and the cost that each has on its own, both [L, E] (the latter or None).

    tokens:    the load itself
    activated: the share of batches in which an expert is active. One replica of it works in each of them (that is how
               the fewest-activated split serves it), so replicas share this number as they share tokens
    step_time: tokens cost their compute; streaming an expert's weights is paid by every replica that works, which under
               an even split is each of them
    off_node:  depends on where replicas are, not on how many: see `objectives.py`. On its own it balances tokens
    Several are brought to the same scale (their mean over experts) before they are added.
    """
    tokens = request.tokens.astype(np.float64)
    weights = request.objective_weights
    active = (tokens > 0).astype(np.float64) if request.activations is None else request.activations.astype(np.float64)
    balanced = {name: value for name, value in weights.items() if value > 0 and name != "off_node"}
    if set(balanced) <= {"tokens"}:
        return tokens, None
    if set(balanced) == {"activated"}:
        return active, None
    share, fixed = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for name, value in balanced.items():
        if name == "step_time":
            assert request.cost is not None
            part, own = request.cost.token_s * tokens, request.cost.activated_s * active
        else:
            part, own = (tokens if name == "tokens" else active), np.zeros(tokens.shape)
        scale = (part + own).mean(axis=1, keepdims=True)
        scale = np.where(scale > 0, scale, 1.0)
        share += value * part / scale
        fixed += value * own / scale
    return share, fixed if fixed.any() else None


def as_table(placement: Placement, ranks: NDArray[np.int64]) -> Ids:
    """Returns the table [L, R, K] of a placement over these ranks; ids as they are."""
    return placement.by_rank[:, ranks].copy()


def finish(
    problem: Problem,
    table: Ids,
    truncated: bool = False,
    homes: NDArray[np.int64] | None = None,
    keep_slots: bool = True,
    heaviest_replica: Floats | None = None,
    unkept: tuple[Unkept, ...] = (),
) -> Plan:
    """Returns the plan that a table [L, R, K] is: slots kept where an expert stays on its rank, and the measures.

    homes: [L, E] home node of each expert; None = the node with the most replicas
    heaviest_replica: [L] of minimax replication of the tokens, where it is known
    """
    request = problem.request
    num_moves = 0
    if problem.current is not None:
        if keep_slots:
            table = keep_slots_of(problem.current, table)
        num_moves = int(count_moves(problem.current, table).sum())
    full = np.full((len(table), request.topology.num_ranks, problem.slots_per_rank), -1, dtype=np.int32)
    full[:, problem.ranks] = table
    placement = Placement(
        full.reshape(len(table), request.num_slots),
        request.tokens.shape[1],
        request.topology.num_ranks,
        request.moe_layer_ids,
        version=0 if request.current is None else request.current.version + 1,
    )
    reached = balancedness(rank_load(request.tokens, placement), problem.ranks)
    bound = np.maximum(
        balancedness_bound(request.tokens, problem.num_ranks, problem.slots_per_rank, heaviest_replica), reached
    )
    return Plan(
        placement=placement,
        balancedness=reached,
        bound=bound,
        gap=bound - reached,
        truncated=truncated,
        num_moves=num_moves,
        elapsed_s=time.perf_counter() - problem.started,
        off_home=off_home_share(problem, table, homes),
        unkept=unkept,
    )


def unkept_limits(request: PlanRequest, problem: Problem, table: Ids, because: str) -> tuple[Unkept, ...]:
    """Returns the limits of moves of a request that a table [L, R, K] does not keep."""
    if problem.current is None:
        return ()
    arrived = count_arrivals(problem.current, table)
    found = []
    for name, moves in (("max_moves", arrived.sum(axis=1)), ("max_rank_moves", arrived.max(axis=1))):
        most = getattr(request, name)
        if most is not None and (moves > most).any():
            found.append(Unkept(f"{name} {most}", float(moves.max()), int((moves > most).sum()), because))
    most, total = request.max_total_moves, int(arrived.sum())
    if most is not None and total > most:
        found.append(Unkept(f"max_total_moves {most}", total, int(arrived.any(axis=1).sum()), because))
    return tuple(found)


def keep_slots_of(old: Ids, new: Ids) -> Ids:
    """Returns `new` with every expert that stays on its rank in the slot it has in `old`: both [L, R, K].

    The others fill the slots left in ascending order. Ranks with an expert twice stay as they are.
    """
    slots = new.shape[2]
    same = (new[:, :, :, None] == old[:, :, None, :]) & (new >= 0)[:, :, :, None]
    stays = same.any(axis=3)
    target = np.where(stays, same.argmax(axis=3), slots)
    taken = (target[:, :, :, None] == np.arange(slots)).any(axis=2)
    # The i-th arriving expert (in table order) takes the i-th free slot.
    free_first = np.argsort(taken, axis=2, kind="stable")
    arriving = np.cumsum(~stays, axis=2) - 1
    target = np.where(stays, target, np.take_along_axis(free_first, np.clip(arriving, 0, slots - 1), axis=2))
    out = np.empty_like(new)
    np.put_along_axis(out, target, new, axis=2)
    distinct = (np.sort(target, axis=2) == np.arange(slots)).all(axis=2)
    return np.where(distinct[:, :, None], out, new)


def holds(table: Ids, num_experts: int) -> NDArray[np.bool_]:
    """Returns which rank holds which expert: [L, R, K] -> [L, R, E] bool."""
    num_layers, num_ranks, _ = table.shape
    out = np.zeros((num_layers, num_ranks, num_experts + 1), dtype=bool)
    out[np.arange(num_layers)[:, None, None], np.arange(num_ranks)[None, :, None], table] = True  # -1: last column
    return out[:, :, :num_experts]


def off_home_share(problem: Problem, table: Ids, homes: NDArray[np.int64] | None) -> Floats:
    """Returns the share of each layer's load that replicas outside the home node serve, under an even split: [L]."""
    replicas = replicas_per_node(problem, table)
    if homes is None:
        homes = replicas.argmax(axis=1)
    at_home = np.take_along_axis(replicas, homes[:, None], axis=1)[:, 0]
    everywhere = np.maximum(replicas.sum(axis=1), 1)
    tokens = problem.request.tokens.astype(np.float64)
    total = tokens.sum(axis=1)
    away = (tokens * (1.0 - at_home / everywhere)).sum(axis=1)
    share: Floats = np.divide(away, total, out=np.zeros_like(total), where=total > 0)
    return share


def replicas_per_node(problem: Problem, table: Ids) -> NDArray[np.int64]:
    """Returns how many replicas of each expert each node holds: [L, R, K] -> [L, N, E] int64."""
    num_layers, num_experts = problem.weight.shape
    num_nodes = problem.num_nodes
    cell = (np.arange(num_layers)[:, None, None] * num_nodes + problem.node_of[None, :, None]) * num_experts + table
    flat = np.bincount(cell[table >= 0], minlength=num_layers * num_nodes * num_experts)
    return flat.reshape(num_layers, num_nodes, num_experts)


def part_of(problem: Problem, rows: NDArray[np.integer]) -> Problem:
    """Returns the problem of some layers, weights and current table alone (the request stays that of all)."""
    return replace(
        problem,
        weight=problem.weight[rows],
        fixed=None if problem.fixed is None else problem.fixed[rows],
        current=None if problem.current is None else problem.current[rows],
    )
