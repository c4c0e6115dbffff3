"""Plans a migration from one placement to another: few bytes over slow links, in rounds that are each legal.

    plan = plan_migration(old, new, topology)
    for round in plan.rounds:          # within RoundLimits: by default a rank receives one expert per round
        old = apply_round(old, round)  # legal, and one version higher, after each of them
    # old now holds what plan.target holds

Three steps: `relabel_ranks` decides which rank takes which part of the new placement (relabel.py), `layer_writes` which
slot gets which expert and which writes must wait for others (writes.py), and `Schedule` in which round each write
happens and which replica it reads (rounds.py).

Shape words: L = MoE layers, P = slots, R = ranks.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.migration.limits import RoundLimits
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.eplb.migration.rounds import Schedule
from moe_serve.eplb.migration.writes import layer_writes
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel, relabel_ranks
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

ONE_PER_RANK = RoundLimits()


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """Rounds that lead from one placement to another.

    from_version: version of the placement that the first round starts from; round i leads to from_version + i + 1
    rounds:       in order; () where nothing has to move
    target:       the placement after the last round: the new one, with ranks and slots relabelled
    new_slot:     [L, P] int64: slot s of target holds what slot new_slot[l, s] of the new placement holds, so that
                  per-slot facts of a plan, such as shares, can follow
    num_transfers:  experts that cross from one rank to another, over all rounds
    num_off_node:   those that cross from one node to another
    """

    from_version: int
    rounds: tuple[MigrationRound, ...]
    target: Placement
    new_slot: NDArray[np.int64]
    num_transfers: int
    num_off_node: int

    @property
    def layer_rows(self) -> tuple[int, ...]:
        """The rows of the placement in which something moves, ascending."""
        return tuple(sorted({move.layer for moves in self.rounds for move in moves.moves}))

    def __str__(self) -> str:
        layers, rounds = len(self.layer_rows), len(self.rounds)
        return (
            f"{layers} layer{'s' * (layers != 1)}, {self.num_transfers} expert{'s' * (self.num_transfers != 1)} in "
            f"{rounds} round{'s' * (rounds != 1)}"
        )


def plan_migration(
    old: Placement,
    new: Placement,
    topology: Topology,
    limits: RoundLimits = ONE_PER_RANK,
    relabel: Relabel = "nodes",
) -> MigrationPlan:
    """Returns the rounds that lead from old to new.

    limits:       what one round may move
    relabel:      what may be exchanged because the new placement is equally good after it:
                  "ranks"  any two ranks, for placements without a node structure
                  "nodes"  whole nodes, and ranks inside a node: what shares a node still does
                  "none"   only the slots of one rank
                  "exact"  nothing: the target is `new`, slot for slot
    Raises PlacementError when the two do not fit each other or the topology, or an expert has no replica to move from.
    """
    _check_fit(old, new, topology)
    old_rows, new_rows = old.physical_to_logical, new.physical_to_logical
    new_slot = relabel_ranks(old, new, topology, relabel)
    wanted = np.take_along_axis(new_rows, new_slot, axis=1)
    schedule = Schedule(topology, old.slots_per_rank, limits)
    target = old_rows.copy()
    for layer in np.flatnonzero((wanted != old_rows).any(axis=1)).tolist():
        row = old_rows[layer].tolist()
        writes = layer_writes(row, wanted[layer].tolist(), old.slots_per_rank, topology, exact=relabel == "exact")
        for write in writes:
            target[layer, write.slot] = write.expert
        schedule.add_layer(layer, row, writes)
    rounds = tuple(MigrationRound(moves) for moves in schedule.rounds())
    if relabel != "exact":
        new_slot = _follow_slots(target, new_rows, new_slot, old.slots_per_rank)
    placement = replace(old, physical_to_logical=target, version=old.version + len(rounds), allow_lost=False)
    node_of = topology.node_of
    crossing = [m for r in rounds for m in r.moves if m.src_rank not in (m.dst_rank, -1)]
    off_node = sum(node_of(m.src_rank) != node_of(m.dst_rank) for m in crossing)
    return MigrationPlan(old.version, rounds, placement, new_slot, len(crossing), off_node)


def migration_to(request: PlanRequest, plan: Plan, limits: RoundLimits, relabel: Relabel) -> MigrationPlan:
    """Returns the migration from the placement of a request to a plan for it; arguments and errors as plan_migration.

    Its layers are those of the request.
    """
    if request.current is None:
        raise PlacementError("the request names no current placement, so there is nothing to migrate from")
    return plan_migration(request.current, plan.placement, request.topology, limits, relabel)


def _follow_slots(
    target: NDArray[np.int32], new_rows: NDArray[np.int32], new_slot: NDArray[np.int64], slots_per_rank: int
) -> NDArray[np.int64]:
    """Returns, for each slot of target, the slot of new on its rank that holds the same expert: [L, P]."""
    num_layers = len(target)
    wanted = np.take_along_axis(new_rows, new_slot, axis=1)
    of_target = np.argsort(target.reshape(num_layers, -1, slots_per_rank), axis=2, kind="stable")
    of_wanted = np.argsort(wanted.reshape(num_layers, -1, slots_per_rank), axis=2, kind="stable")
    out = np.empty_like(of_target)
    np.put_along_axis(out, of_target, np.take_along_axis(new_slot.reshape(of_wanted.shape), of_wanted, axis=2), axis=2)
    return out.reshape(target.shape)


def _check_fit(old: Placement, new: Placement, topology: Topology) -> None:
    shape_old = (old.num_layers, old.num_logical, old.num_ranks, old.num_slots)
    shape_new = (new.num_layers, new.num_logical, new.num_ranks, new.num_slots)
    if shape_old != shape_new:
        raise PlacementError(
            f"old has (layers, experts, ranks, slots) = {shape_old}, new {shape_new}; a migration keeps the shape, so "
            "plan for the one in use"
        )
    if topology.num_ranks != old.num_ranks:
        raise PlacementError(f"topology has {topology.num_ranks} ranks, the placements {old.num_ranks}; give its own")
    unreachable = (old.replica_count == 0) & (new.replica_count > 0)
    if unreachable.any():
        row, expert = np.argwhere(unreachable)[0]
        raise PlacementError(
            f"expert {expert} of row {row} has no replica to move from; load it from the checkpoint first"
        )
    gone = (old.replica_count > 0) & (new.replica_count == 0)
    if gone.any():
        row, expert = np.argwhere(gone)[0]
        raise PlacementError(f"expert {expert} of row {row} has no slot in new; give every expert one")
