"""One rebalance for an engine: its load and placement in, its next placement out. All adapters end here.

Every rank of an engine plans for itself, so the same input gives the same output: no clock, no random state, no memory
of earlier calls.

Shape words: L = layers, E = logical experts, R = ranks, P = slots of all ranks, K = P / R slots of one rank.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.policies.problem import keep_slots_of
from moe_serve.eplb.rebalance.gate import expected_maximum
from moe_serve.eplb.relabel import relabel_ranks
from moe_serve.eplb.repair import fill_empty_slots
from moe_serve.errors import PlacementError
from moe_serve.log import get_logger
from moe_serve.topology import Topology

Ints = NDArray[np.int64]
logger = get_logger(__name__)


@dataclass(frozen=True)
class Cluster:
    """An engine's ranks and its model's router, as the engine describes them.

    num_groups:   expert groups of the router, 0 or None = none
    hierarchical: experts of a group stay on one node, as the engine's own hierarchical planner keeps them
    excluded:     lost ranks; their slots stay empty (-1)
    """

    num_ranks: int
    num_nodes: int = 1
    num_slots: int = 0
    num_groups: int | None = None
    hierarchical: bool = False
    excluded: tuple[int, ...] = ()

    @property
    def topology(self) -> Topology:
        """Ranks and nodes; one node where the ranks cannot be divided."""
        nodes = self.num_nodes if self.num_nodes > 0 and self.num_ranks % self.num_nodes == 0 else 1
        return Topology(nodes, self.num_ranks // nodes)


def replan(
    load: NDArray[np.number],
    cluster: Cluster,
    old: NDArray[np.integer] | None,
    policy: str,
    start: Placement | None = None,
    max_rank_moves: int | None = None,
    min_gain: float = 0.0,
) -> Ints:
    """Returns the expert of every slot, [L, P] int64; experts that stay on a rank keep their slot.

    load:  [L, E] tokens;  old: [L, P'] expert of each slot in use, -1 = empty; P' may differ after ranks came or went
    start: a placement to edit instead of `old`: the one that a system without history starts with
    max_rank_moves: experts that one rank may receive in a layer; None = as `default_rank_moves` says, for incremental
           where groups need not stay on nodes. It is not kept from `old` to `start`, nor where ranks have come or gone
           and slots must be filled
    min_gain: a layer keeps what it has, unless a plan saves this share of its time for each expert that the busiest
           rank receives; likewise not kept where slots must be filled
    A load of zeros changes nothing. Only slots of excluded ranks are -1 in the result.
    Raises PlacementError where no placement is possible, e.g. with fewer slots than experts.
    """
    load = np.asarray(load, dtype=np.float64)
    num_logical = load.shape[1]
    by_node = cluster.hierarchical and cluster.topology.num_nodes > 1
    request = PlanRequest(
        load,
        cluster.topology,
        cluster.num_slots,
        num_groups=cluster.num_groups if by_node else None,
        off_home=0.0 if by_node else 1.0,
        excluded_ranks=cluster.excluded,
    )
    same_ranks = old is not None and old.shape[1] == cluster.num_slots and bool((old >= 0).all())
    if old is not None and same_ranks and not cluster.excluded and not load.any():
        return old.astype(np.int64)
    current = None
    if old is not None:
        rows = np.full((len(old), cluster.num_slots), -1, dtype=np.int32)
        width = min(old.shape[1], cluster.num_slots)
        rows[:, :width] = old[:, :width]
        current = Placement(rows, num_logical, cluster.num_ranks, allow_lost=True)
    if current is not None and start is None:
        if max_rank_moves is None and policy == "incremental" and same_ranks and not by_node:
            max_rank_moves = default_rank_moves(cluster)
        request = replace(request, current=current, max_rank_moves=max_rank_moves)
    elif start is not None:
        request = replace(request, current=start)
    plan = make_policy(policy).plan(request)
    for unkept in plan.unkept:
        logger.warning("%s", unkept)
    placement, nodes = plan.placement, cluster.topology.num_nodes if by_node else 1
    if start is not None and current is not None:
        slots = relabel_ranks(current, placement, cluster.topology, "nodes" if by_node else "ranks")
        rows = np.take_along_axis(placement.physical_to_logical, slots, axis=1)
        placement = replace(placement, physical_to_logical=rows)
    new = fill_empty_slots(placement, load, nodes, cluster.excluded, current).physical_to_logical
    if current is None:
        logger.info("first placement: balancedness %.4f, %.0f ms", plan.balancedness.mean(), 1e3 * plan.elapsed_s)
        return new.astype(np.int64)
    before = current.by_rank
    table = keep_slots_of(before, new.reshape(before.shape))
    kept = 0
    if same_ranks and not cluster.excluded and current.replica_count.all():
        pays = layers_that_pay(load, current, table, min_gain)
        if by_node:
            pays |= ~groups_at_home(current, cluster)
        table = np.where(pays[:, None, None], table, before)
        kept = int((~pays).sum())
        placement = replace(placement, physical_to_logical=table.reshape(new.shape))
    reached = balancedness(rank_load(load, current), request.live_ranks).mean() if current.replica_count.all() else 0.0
    logger.info(
        "balancedness %.4f -> %.4f, %d of %d slots receive an expert, %d of %d layers stay, planned in %.0f ms",
        reached, balancedness(rank_load(load, placement), request.live_ranks).mean(),
        count_moves(before, table).sum(), new.size, kept, len(table), 1e3 * plan.elapsed_s,
    )  # fmt: skip
    return table.reshape(new.shape).astype(np.int64)


def default_rank_moves(cluster: Cluster) -> int | None:
    """Returns a quarter of a rank's slots: vLLM and SGLang move a layer at once, as fast as its busiest rank.

    None with fewer than four slots: experts that move from rank to rank are then all that can level a layer.
    """
    return cluster.num_slots // cluster.num_ranks // 4 or None


def groups_at_home(placement: Placement, cluster: Cluster) -> NDArray[np.bool_]:
    """Returns the layers [L] in which each router group is on one node."""
    assert cluster.num_groups
    node = np.arange(placement.num_slots) * cluster.topology.num_nodes // placement.num_slots
    group = placement.physical_to_logical * cluster.num_groups // placement.num_logical
    found = np.zeros((placement.num_layers, cluster.num_groups, cluster.topology.num_nodes), dtype=bool)
    found[np.arange(placement.num_layers)[:, None], group, node] = True
    at_home: NDArray[np.bool_] = (found.sum(axis=2) == 1).all(axis=1)
    return at_home


def layers_that_pay(
    load: NDArray[np.number], current: Placement, table: NDArray[np.int32], min_gain: float
) -> NDArray[np.bool_]:
    """Returns the layers [L] in which a plan saves min_gain of the time for each expert its busiest rank receives.

    load: [L, E];  table: [L, R, K] of the plan. A layer's time is the load of its busiest rank. What chance alone
    would show of a gain is taken off: a plan levels the tokens that were counted, others exceed that level by as much
    as the largest of as many draws as there are ranks, and the busiest rank in use has one standard error too many.
    """
    planned = replace(current, physical_to_logical=table.reshape(len(table), -1))
    has, gets = (rank_load(load, placement).max(axis=1) for placement in (current, planned))
    mean = np.maximum(load.sum(axis=1) / current.num_ranks, 1.0)
    gain = (has - np.sqrt(has)) - np.maximum(gets, mean + expected_maximum(current.num_ranks) * np.sqrt(mean))
    received = (~(table[:, :, :, None] == current.by_rank[:, :, None, :]).any(axis=3)).sum(axis=2).max(axis=1)
    pays: NDArray[np.bool_] = gain > np.maximum(min_gain * received * has, 0.0)
    return pays


def fitting_start(start: Placement | None, shape: tuple[int, int], cluster: Cluster) -> Placement | None:
    """Returns the placement of a file if it is for a model of (L, E) = shape on these ranks; None, and says so, if not.

    An engine may serve several models, such as a draft model beside the main one; a file is for one of them.
    """
    if start is None:
        return None
    have = (start.num_layers, start.num_logical, start.num_ranks, start.num_slots)
    want = (*shape, cluster.num_ranks, cluster.num_slots)
    if have == want:
        return start
    logger.warning(
        "the placement file is for (layers, experts, ranks, slots) = %s, this model has %s; it is not used here",
        have,
        want,
    )
    return None


def old_or_raise(error: PlacementError, old: NDArray[np.integer] | None, num_slots: int) -> Ints:
    """Returns the placement in use after a plan failed, and logs the reason; raises where there is none to keep."""
    if old is None or old.shape[1] != num_slots or (old < 0).any():
        raise error
    logger.error("no new placement, the one in use stays: %s", error)
    return old.astype(np.int64)
