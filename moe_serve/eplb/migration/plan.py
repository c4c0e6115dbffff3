"""Plans a migration from one placement to another: few bytes over slow links, in rounds that are each legal.

    plan = plan_migration(old, new, topology)
    for round in plan.rounds:          # within RoundLimits: by default a rank receives one expert per round
        old = apply_round(old, round)  # legal, and one version higher, after each of them
    # old now holds what plan.target holds

Three steps: `relabel_ranks` decides which rank takes which part of the new placement, `_layer_writes` which slot gets
which expert and which writes must wait for others, and `_Schedule` in which round each write happens and which replica
it reads.

Shape words: L = MoE layers, P = slots, R = ranks.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits, SlotMove
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel, relabel_ranks
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

ONE_PER_RANK = RoundLimits()
_Hop = tuple[int, int]  # an expert's way from one rank to another; (r, r): one that waits in a staging slot of rank r


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """Rounds that lead from one placement to another.

    rounds:         in order; () where nothing has to move
    target:         the placement after the last round: the new one, with ranks and slots relabelled
    num_transfers:  experts that cross from one rank to another, over all rounds
    """

    rounds: tuple[MigrationRound, ...]
    target: Placement
    num_transfers: int

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
    old_rows = old.physical_to_logical
    wanted = np.take_along_axis(new.physical_to_logical, relabel_ranks(old, new, topology, relabel), axis=1)
    schedule = _Schedule(topology, old.slots_per_rank, limits)
    target = old_rows.copy()
    for layer in np.flatnonzero((wanted != old_rows).any(axis=1)).tolist():
        row = old_rows[layer].tolist()
        writes = _layer_writes(row, wanted[layer].tolist(), old.slots_per_rank, topology, exact=relabel == "exact")
        for write in writes:
            target[layer, write.slot] = write.expert
        schedule.add_layer(layer, row, writes)
    rounds = tuple(MigrationRound(moves) for moves in schedule.rounds())
    placement = replace(old, physical_to_logical=target, version=old.version + len(rounds), allow_lost=False)
    num_transfers = sum(m.src_rank not in (m.dst_rank, -1) for r in rounds for m in r.moves)
    return MigrationPlan(rounds, placement, num_transfers)


def migration_to(request: PlanRequest, plan: Plan, limits: RoundLimits, relabel: Relabel) -> MigrationPlan:
    """Returns the migration from the placement of a request to a plan for it; arguments and errors as plan_migration.

    Its layers are those of the request.
    """
    if request.current is None:
        raise PlacementError("the request names no current placement, so there is nothing to migrate from")
    return plan_migration(request.current, plan.placement, request.topology, limits, relabel)


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


@dataclass(slots=True)
class _SlotWrite:
    """One slot to be written.

    expert: what it will hold; -1 = it becomes empty
    source: slot to read, for the carrier of an expert that keeps no slot; -1 = any replica
    after:  slot whose write, the carrier that reads this slot, must not be later than this one; -1 = none
    """

    slot: int
    expert: int
    source: int = -1
    after: int = -1


class _Schedule:
    """Collects the writes of all layers, then schedules them. Use once: add_layer for each layer, then rounds().

    List scheduling on bit masks: bit t of a rank's mask says that the rank is full in round t, so the first round in
    which several ranks are free takes a few integer operations. Pairs of ranks and nodes have masks of their own where
    they are limited. Rings come first, since they need several ranks at once; then chains; writes that any replica can
    serve fill the gaps. A rank also sends at most as many experts per round as it may receive, since a round is as slow
    as its busiest rank, and new replicas of a hot expert soon serve as sources too. (Measured: 10 % more rounds and a
    third less time than with unlimited sending.)"""

    def __init__(self, topology: Topology, slots_per_rank: int, limits: RoundLimits) -> None:
        self._topology = topology
        self._slots_per_rank = slots_per_rank
        self._links = _Links(topology, limits)
        self._moves: dict[int, list[SlotMove]] = {}
        self._rings: list[tuple[int, list[tuple[int, int]]]] = []  # (layer, [(slot, expert it holds)])
        self._chains: list[tuple[int, list[_SlotWrite]]] = []
        # (layer, expert) -> replicas that stay: (slot, first round in which it can be read)
        self._replicas: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def add_layer(self, layer: int, old: Sequence[int], writes: Sequence[_SlotWrite]) -> None:
        """Adds the writes of one layer (see _layer_writes) to its row old [P]."""
        by_slot = {write.slot: write for write in writes}
        wanted = {write.expert for write in writes}
        for slot, expert in enumerate(old):
            if slot not in by_slot and expert in wanted:
                self._replicas.setdefault((layer, expert), []).append((slot, 0))
        done: set[int] = set()
        for write in writes:
            if write.after < 0:
                chain = [write]  # each waits for the one before: the carrier that reads the next one's slot
                while chain[-1].source >= 0:
                    chain.append(by_slot[chain[-1].source])
                done.update(w.slot for w in chain)
                self._chains.append((layer, chain))
        for write in writes:
            if write.slot not in done:
                ring = [write.slot]  # each slot's content goes to the next one
                while by_slot[ring[-1]].after != ring[0]:
                    ring.append(by_slot[ring[-1]].after)
                done.update(ring)
                self._rings.append((layer, [(slot, old[slot]) for slot in ring]))

    def rounds(self) -> list[tuple[SlotMove, ...]]:
        """Returns the moves of each round, in order."""
        for layer, ring in sorted(self._rings, key=lambda item: -len(item[1])):
            self._place_ring(layer, ring)
        waiting: list[tuple[int, _SlotWrite, int]] = []
        for layer, chain in sorted(self._chains, key=lambda item: -len(item[1])):
            earliest = 0
            for write in chain:
                if write.source < 0:
                    waiting.append((layer, write, earliest))
                else:
                    earliest = self._place_from(layer, write, write.source, earliest)
        for layer, write, earliest in waiting:
            self._place_from_any(layer, write, earliest)
        return [_in_order(self._moves[t]) for t in sorted(self._moves)]

    def _place_ring(self, layer: int, ring: list[tuple[int, int]]) -> None:
        """Schedules a ring, in which each slot takes what the one before holds.

        Where the ring passes a rank more often than the rank can receive, one arc is moved and its last expert parked
        in its first slot, which stays in the ring.
        """
        earliest = 0
        while len(ring) > 1:
            length, hops = self._arc(ring)
            arc = ring[:length]
            t = self._links.take_first(hops, earliest)
            for (source, expert), (slot, _) in zip(arc, arc[1:] + arc[:1], strict=True):
                self._add(t, layer, source, slot)
                if slot != arc[0][0] or length == len(ring):
                    self._replicas.setdefault((layer, expert), []).append((slot, t + 1))
            ring = [] if length == len(ring) else [(arc[0][0], arc[-1][1]), *ring[length:]]
            earliest = t + 1

    def _arc(self, ring: list[tuple[int, int]]) -> tuple[int, list[_Hop]]:
        """Returns the length of the longest arc that can move at once, at least 2, and the hops of its experts."""
        ranks = [slot // self._slots_per_rank for slot, _ in ring]
        length, hops = 2, _hop(ranks[0], ranks[1]) + _hop(ranks[1], ranks[0])
        open_hops = _hop(ranks[0], ranks[1])
        for longer in range(3, len(ring) + 1):
            open_hops += _hop(ranks[longer - 2], ranks[longer - 1])
            if not self._links.go_at_once(open_hops):
                break
            closed = open_hops + _hop(ranks[longer - 1], ranks[0])
            if self._links.go_at_once(closed):
                length, hops = longer, closed
        return length, hops or [(ranks[0], ranks[0])]  # all on one rank: one expert waits while the others move

    def _place_from(self, layer: int, write: _SlotWrite, source: int, earliest: int) -> int:
        """Schedules a write that reads this slot, as early as possible; returns the round."""
        src, dst = source // self._slots_per_rank, write.slot // self._slots_per_rank
        t = earliest
        if src != dst:
            t = self._links.take_first([(src, dst)], earliest)
        self._add(t, layer, source, write.slot)
        self._replicas.setdefault((layer, write.expert), []).append((write.slot, t + 1))
        return t

    def _place_from_any(self, layer: int, write: _SlotWrite, earliest: int) -> None:
        """Schedules a write that reads the nearest replica; among equally near ones the one that is ready first."""
        if write.expert < 0:
            self._moves.setdefault(earliest, []).append(
                SlotMove(layer, -1, -1, write.slot // self._slots_per_rank, write.slot)
            )
            return
        dst = write.slot // self._slots_per_rank
        node = self._topology.node_of(dst)
        by_distance: tuple[list[tuple[int, int]], ...] = ([], [], [])  # same rank, same node, other node
        for slot, ready in self._replicas[layer, write.expert]:
            src = slot // self._slots_per_rank
            distance = 0 if src == dst else 1 if self._topology.node_of(src) == node else 2
            by_distance[distance].append((slot, max(ready, earliest)))
        if by_distance[0]:
            slot, t = min(by_distance[0], key=lambda item: item[1])
            self._add(t, layer, slot, write.slot)
            self._replicas[layer, write.expert].append((write.slot, t + 1))
            return
        near = by_distance[1] or by_distance[2]
        t, slot = min((self._links.first([(s // self._slots_per_rank, dst)], ready), s) for s, ready in near)
        self._links.take([(slot // self._slots_per_rank, dst)], t)
        self._add(t, layer, slot, write.slot)
        self._replicas[layer, write.expert].append((write.slot, t + 1))

    def _add(self, t: int, layer: int, source: int, slot: int) -> None:
        move = SlotMove(layer, source // self._slots_per_rank, source, slot // self._slots_per_rank, slot)
        self._moves.setdefault(t, []).append(move)


class _Links:
    """The capacity that ranks, pairs of ranks and nodes have left in each round."""

    def __init__(self, topology: Topology, limits: RoundLimits) -> None:
        self._limits = limits
        self._node_of = [topology.node_of(rank) for rank in range(topology.num_ranks)]
        self._full: dict[Hashable, int] = {}  # bit t: full in round t
        self._count: dict[tuple[Hashable, int], int] = {}  # by round
        self._known: dict[_Hop, tuple[tuple[Hashable, int], ...]] = {}

    def go_at_once(self, hops: Sequence[_Hop]) -> bool:
        """Returns whether these hops of a ring may share a round: each enters another rank, and another node."""
        if len({dst for _, dst in hops}) < len(hops):
            return False
        if self._limits.per_node is None:
            return True
        entered = [self._node_of[dst] for src, dst in hops if self._node_of[src] != self._node_of[dst]]
        return len(set(entered)) == len(entered)

    def first(self, hops: Iterable[_Hop], earliest: int) -> int:
        """Returns the first round, not before earliest, in which all hops have room."""
        full = 0
        for hop in hops:
            for key, _ in self._passed(hop):
                full |= self._full.get(key, 0)
        full >>= earliest
        return earliest + ((full + 1) & ~full).bit_length() - 1  # the lowest bit that is not set

    def take(self, hops: Iterable[_Hop], t: int) -> None:
        for hop in hops:
            for key, limit in self._passed(hop):
                count = self._count[key, t] = self._count.get((key, t), 0) + 1
                if count >= limit:
                    self._full[key] = self._full.get(key, 0) | 1 << t

    def take_first(self, hops: Sequence[_Hop], earliest: int) -> int:
        t = self.first(hops, earliest)
        self.take(hops, t)
        return t

    def _passed(self, hop: _Hop) -> tuple[tuple[Hashable, int], ...]:
        """Returns what a hop passes that has a limit, and the limit."""
        passed = self._known.get(hop)
        if passed is None:
            passed = self._known[hop] = tuple(self._limited(*hop))
        return passed

    def _limited(self, src: int, dst: int) -> Iterator[tuple[Hashable, int]]:
        limits = self._limits
        yield ("into rank", dst), limits.per_rank
        if src == dst:
            return
        yield ("out of rank", src), limits.per_rank
        if limits.per_pair is not None:
            yield ("pair", src, dst), limits.per_pair
        if limits.per_node is not None and self._node_of[src] != self._node_of[dst]:
            yield ("into node", self._node_of[dst]), limits.per_node
            yield ("out of node", self._node_of[src]), limits.per_node


def _hop(src: int, dst: int) -> list[_Hop]:
    return [] if src == dst else [(src, dst)]


def _in_order(moves: list[SlotMove]) -> tuple[SlotMove, ...]:
    """Returns moves inside a rank first, each before the one that overwrites what it reads; then the others by slot."""
    local = {(m.layer, m.dst_slot): m for m in moves if m.src_rank == m.dst_rank}
    readers: dict[tuple[int, int], list[SlotMove]] = {}
    for move in local.values():
        readers.setdefault((move.layer, move.src_slot), []).append(move)
    ordered: list[SlotMove] = []
    seen: set[tuple[int, int]] = set()

    def visit(move: SlotMove) -> None:
        key = (move.layer, move.dst_slot)
        if key not in seen:  # a closed ring may start anywhere
            seen.add(key)
            for reader in readers.get(key, ()):
                visit(reader)
            ordered.append(move)

    for key in sorted(local):
        visit(local[key])
    rest = (m for m in moves if m.src_rank != m.dst_rank)
    return (*ordered, *sorted(rest, key=lambda m: (m.layer, m.dst_slot)))


@dataclass(slots=True)
class _Changes:
    """A layer's changes.

    leaving:      slots to be written
    rank, expert: of each arrival
    carrier:      expert that keeps no slot -> (arrival that carries it, slot it reads)
    """

    leaving: list[int]
    rank: list[int]
    expert: list[int]
    carrier: dict[int, tuple[int, int]]


def _layer_writes(
    old: Sequence[int], wanted: Sequence[int], slots_per_rank: int, topology: Topology, exact: bool
) -> list[_SlotWrite]:
    """Returns the writes that turn old [P] into wanted [P], ascending by slot, at most one per slot.

    An expert that keeps a slot can be read at any time and is never lost. For an expert that keeps none, one write is
    its carrier: it copies from a slot that the expert leaves, so the write to that slot must not happen before the
    carrier. Each write waits for at most one other, and at most one other waits for it, so the writes of a layer form
    chains and rings. A ring has to happen in one round.

    Where the slots of a rank are interchangeable, arriving experts are paired with slots so that there are few rings,
    and none that passes a rank twice.

    exact: False lets arriving experts take any free slot of their rank; those that stay keep theirs
    """
    if exact:
        slots = [slot for slot, (have, want) in enumerate(zip(old, wanted, strict=True)) if have != want]
        changes = _Changes(slots, [s // slots_per_rank for s in slots], [wanted[s] for s in slots], {})
    else:
        changes = _arrivals(old, wanted, slots_per_rank)
    _choose_carriers(old, changes, slots_per_rank, topology)
    if not exact:
        slots = _pair_slots(old, changes, slots_per_rank)
    writes = {slot: _SlotWrite(slot, expert) for slot, expert in zip(slots, changes.expert, strict=True)}
    for arrival, source in changes.carrier.values():
        writes[slots[arrival]].source = source
        writes[source].after = slots[arrival]
    return [writes[slot] for slot in sorted(writes)]


def _arrivals(old: Sequence[int], wanted: Sequence[int], slots_per_rank: int) -> _Changes:
    """Returns the differences between what each rank holds and should hold, whatever the order of its slots."""
    changes = _Changes([], [], [], {})
    for first in range(0, len(old), slots_per_rank):
        slots = range(first, first + slots_per_rank)
        missing: dict[int, int] = {}
        for slot in slots:
            missing[wanted[slot]] = missing.get(wanted[slot], 0) + 1
        for slot in slots:
            if missing.get(old[slot], 0):
                missing[old[slot]] -= 1
            else:
                changes.leaving.append(slot)
        for expert, times in missing.items():
            changes.rank += [first // slots_per_rank] * times
            changes.expert += [expert] * times
    return changes


def _choose_carriers(old: Sequence[int], changes: _Changes, slots_per_rank: int, topology: Topology) -> None:
    """Picks the carrier of each expert that keeps no slot: the nearest pair of arrival and leaving slot."""
    leaving = set(changes.leaving)
    kept = {expert for slot, expert in enumerate(old) if slot not in leaving}
    sources: dict[int, list[int]] = {}
    for slot in changes.leaving:
        if old[slot] >= 0 and old[slot] not in kept:
            sources.setdefault(old[slot], []).append(slot)
    best: dict[int, tuple[int, int, int]] = {}
    for arrival, (rank, expert) in enumerate(zip(changes.rank, changes.expert, strict=True)):
        for source in sources.get(expert, ()):
            other = source // slots_per_rank
            distance = 0 if other == rank else 1 if topology.node_of(other) == topology.node_of(rank) else 2
            if expert not in best or distance < best[expert][0]:
                best[expert] = (distance, arrival, source)
    changes.carrier = {expert: (arrival, source) for expert, (_, arrival, source) in best.items()}


def _pair_slots(old: Sequence[int], changes: _Changes, slots_per_rank: int) -> list[int]:
    """Returns the slot of each arrival, among those that experts leave on its rank."""
    num_ranks = len(old) // slots_per_rank
    held_by = {source: arrival for arrival, source in changes.carrier.values()}  # slot -> carrier that reads it
    loose: list[list[int]] = [[] for _ in range(num_ranks)]
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for slot in changes.leaving:
        (held if slot in held_by else loose)[slot // slots_per_rank].append(slot)
    carried: list[list[int]] = [[] for _ in range(num_ranks)]
    others: list[list[int]] = [[] for _ in range(num_ranks)]
    carrying = {arrival for arrival, _ in changes.carrier.values()}
    for arrival, rank in enumerate(changes.rank):
        (carried if arrival in carrying else others)[rank].append(arrival)

    slot_of = [-1] * len(changes.rank)
    # A carrier that writes a loose slot ends a chain, and an arrival that any replica can serve may wait for a held
    # slot. Only the remaining carriers have to write held slots, and only these can form rings.
    through: list[list[int]] = []
    for rank in range(num_ranks):
        num_through = max(0, len(carried[rank]) - len(loose[rank]))
        through.append(held[rank][:num_through])
        for slot in held[rank][num_through:]:
            slot_of[others[rank].pop()] = slot
    in_chain = {slot for slots in through for slot in slots}
    for rank in range(num_ranks):
        for first in carried[rank]:
            if changes.carrier[changes.expert[first]][1] in in_chain:
                continue
            arrival = first
            while through[changes.rank[arrival]]:  # a chain: on through held slots to the first loose one
                slot_of[arrival] = through[changes.rank[arrival]].pop()
                arrival = held_by[slot_of[arrival]]
            slot_of[arrival] = loose[changes.rank[arrival]].pop()
    for start in range(num_ranks):
        _close_rings(start, through, held_by, changes.rank, slot_of)
    for rank in range(num_ranks):
        for arrival in others[rank]:
            slot_of[arrival] = loose[rank].pop()
    return slot_of


def _close_rings(
    start: int, through: list[list[int]], held_by: dict[int, int], rank_of: Sequence[int], slot_of: list[int]
) -> None:
    """Follows held slots from rank to rank and closes a ring whenever the path meets itself, so rings stay simple."""
    path: list[int] = []  # held slots, each on the rank to which the carrier of the one before goes
    position = {start: 0}
    rank = start
    while through[rank]:
        path.append(through[rank].pop())
        rank = rank_of[held_by[path[-1]]]
        if rank not in position:
            position[rank] = len(path)
            continue
        ring = path[position[rank] :]
        del path[position[rank] :]
        for slot, following in zip(ring, ring[1:] + ring[:1], strict=True):
            slot_of[held_by[slot]] = following
        position = {r: at for r, at in position.items() if at <= len(path)}
