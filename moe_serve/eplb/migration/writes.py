"""Which slots of a layer are written, and which write must not happen before which.

An expert that keeps a slot can be read at any time and is never lost. For one that keeps none, one write is its
carrier: it copies from a slot that the expert leaves, so whoever overwrites that slot must not be earlier than the
carrier. Every write waits for at most one other and is waited for by at most one, so the writes of a layer fall into
chains and rings. A ring has to happen in one round.

Where slots of a rank are alike we choose which leaving expert makes room for which arriving one, so that there are
few rings, and none that passes a rank twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.topology import Topology


@dataclass(slots=True)
class SlotWrite:
    """One slot to be written.

    expert: what it will hold; -1 = it becomes empty
    source: slot to read, for the carrier of an expert that keeps no slot; -1 = any copy
    after:  slot whose write must not be later than this one; -1 = none. It is the carrier that reads this slot
    """

    slot: int
    expert: int
    source: int = -1
    after: int = -1


@dataclass(slots=True)
class _Changes:
    """A layer's changes. leaving: slots to be written; rank, expert: of each arrival; carrier: of an expert that keeps
    no slot, (arrival that carries it, slot it reads)."""

    leaving: list[int]
    rank: list[int]
    expert: list[int]
    carrier: dict[int, tuple[int, int]]


def layer_writes(
    old: Sequence[int], wanted: Sequence[int], slots_per_rank: int, topology: Topology, exact: bool
) -> list[SlotWrite]:
    """Returns the writes that turn old [P] into wanted [P], ascending by slot, at most one per slot.

    exact: False lets the experts of a rank take any of its slots; those that stay keep theirs
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
    """Compares what each rank holds with what it should hold, whatever the order of slots."""
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
    """Picks the carrier of each expert that keeps no slot: the arrival and leaving slot with the shortest way."""
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
            way = 0 if other == rank else 1 if topology.node_of(other) == topology.node_of(rank) else 2
            if expert not in best or way < best[expert][0]:
                best[expert] = (way, arrival, source)
    changes.carrier = {expert: (arrival, source) for expert, (_, arrival, source) in best.items()}


def _pair_slots(old: Sequence[int], changes: _Changes, slots_per_rank: int) -> list[int]:
    """Returns the slot of each arrival, one of those that are left on its rank."""
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
    # A carrier on a loose slot ends a chain, and an arrival that any copy can serve may wait on a held slot. Only what
    # is left over has to put a carrier on a held slot, which is where rings can come from.
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
    """Walks over held slots from rank to rank and closes a ring whenever it meets its own path: rings stay simple."""
    path: list[int] = []  # held slots, each on the rank to which the carrier of the one before goes
    place = {start: 0}
    rank = start
    while through[rank]:
        path.append(through[rank].pop())
        rank = rank_of[held_by[path[-1]]]
        if rank not in place:
            place[rank] = len(path)
            continue
        ring = path[place[rank] :]
        del path[place[rank] :]
        for slot, following in zip(ring, ring[1:] + ring[:1], strict=True):
            slot_of[held_by[slot]] = following
        place = {r: at for r, at in place.items() if at <= len(path)}
