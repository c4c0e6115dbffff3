"""Decides which slots of a layer are written, and which writes must wait for others.

An expert that keeps a slot can be read at any time and is never lost. For an expert that keeps none, one write is its
carrier: it copies from a slot that the expert leaves, so the write to that slot must not happen before the carrier.
Each write waits for at most one other, and at most one other waits for it, so the writes of a layer form chains and
rings. A ring has to happen in one round.

Where the slots of a rank are interchangeable, arriving experts are paired with slots so that there are few rings, and
none that passes a rank twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.topology import Topology


@dataclass(slots=True)
class SlotWrite:
    """One slot to be written.

    expert: what it will hold; -1 = it becomes empty
    source: slot to read, for the carrier of an expert that keeps no slot; -1 = any replica
    after:  slot whose write, the carrier that reads this slot, must not be later than this one; -1 = none
    """

    slot: int
    expert: int
    source: int = -1
    after: int = -1


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


def layer_writes(
    old: Sequence[int], wanted: Sequence[int], slots_per_rank: int, topology: Topology, exact: bool
) -> list[SlotWrite]:
    """Returns the writes that turn old [P] into wanted [P], ascending by slot, at most one per slot.

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
    writes = {slot: SlotWrite(slot, expert) for slot, expert in zip(slots, changes.expert, strict=True)}
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
