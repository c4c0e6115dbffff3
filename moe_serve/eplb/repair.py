"""Gives experts slots again after ranks were lost: a lost expert its first, any other a second against the next loss.

It also fills the slots that a plan leaves empty. All functions are pure, deterministic, and never change the slots of a
lost rank. Ranks are lost where no slot of any layer holds an expert, unless the caller names them.

Giving an expert one more rank is a flow problem: it takes a slot on another rank, whose expert goes on to a third, and
so on until a spare slot is found. Nearly always the first rank has a spare slot. Where it has not, the cheapest chain
is found by Bellman-Ford over ranks, so that as many experts as possible get their ranks with few changed slots.

Shape words: L = layers, E = experts, R = ranks, K = slots per rank.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Ints, Placement
from moe_serve.errors import PlacementError


@dataclass(frozen=True)
class ReloadedExpert:
    """An expert that lost all its slots, and the slot that it gets. slot: counted over all ranks"""

    layer_row: int
    expert: int
    slot: int


def with_second_slots(placement: Placement, num_nodes: int = 1) -> Placement:
    """Returns a placement in which as many experts as possible are on two ranks, with as few changed slots as possible.

    num_nodes: equal ones, numbered one by one; a second slot is on another node where one is spare there
    A slot is spare where it is empty, holds an expert that is on three or more ranks, or holds one that its rank has
    twice. No expert on two ranks is left with one. Returns the same object when nothing can be improved.
    """
    live, table = placement.live_ranks.tolist(), _by_rank(placement)
    node_of = [rank * num_nodes // placement.num_ranks for rank in range(placement.num_ranks)]
    if not sum(give_ranks(table[row], live, 2, node_of) for row in range(placement.num_layers)):
        return placement
    return replace(placement, physical_to_logical=_flat(table), version=placement.version + 1)


def give_ranks(table: Ints, live: Sequence[int], num_wanted: int, node_of: Sequence[int] = ()) -> int:
    """Gives the experts of one layer that have a slot further ranks until each is on num_wanted, in place.

    table: [R, K];  live: ranks that may hold experts;  node_of: of each rank, for a slot on another node where one is
    spare there; (): all on one
    A slot is spare where it is empty, holds an expert on more than num_wanted ranks, or repeats one of its rank.
    Returns the number of slots that changed, for two ranks the fewest possible.
    """
    holders = _Holders(table, live, num_wanted, node_of or [0] * len(table))
    return holders.write(table) if holders.give() else 0


def with_lost_experts(placement: Placement, lost_ranks: Collection[int]) -> tuple[Placement, list[ReloadedExpert]]:
    """Returns a placement in which every expert has a slot, and what has to be read from the checkpoint for it.

    A lost expert takes an empty slot, or else that of an expert with other slots: of a repeated one on the same rank,
    then of the one with the most. The experts to read are spread over the ranks, over all layers together.
    Raises PlacementError when the ranks that are left have fewer slots than there are experts.
    """
    live = [rank for rank in range(placement.num_ranks) if rank not in lost_ranks]
    num_slots = len(live) * placement.slots_per_rank
    if num_slots < placement.num_logical:
        raise PlacementError(
            f"the {len(live)} ranks that are left have {num_slots} slots per layer and there are "
            f"{placement.num_logical} experts; they need {-(-placement.num_logical // len(live))} slots each, and have "
            f"{placement.slots_per_rank}"
        )
    table = _by_rank(placement)
    reloads = np.zeros(placement.num_ranks, dtype=np.int64)  # of each rank
    found = []
    for row, expert in np.argwhere(placement.replica_count == 0).tolist():
        rank, slot = _slot_to_reload(table[row], live, reloads)
        table[row, rank, slot] = expert
        reloads[rank] += 1
        found.append(ReloadedExpert(row, expert, rank * placement.slots_per_rank + slot))
    version = placement.version + 1
    return replace(placement, physical_to_logical=_flat(table), version=version, allow_lost=False), found


def _by_rank(placement: Placement) -> Ints:
    """Returns a table of its own, [L, R, K]."""
    return placement.by_rank.copy()


def _flat(table: Ints) -> Ints:
    return table.reshape(len(table), -1)


def _slot_to_reload(table: Ints, live: list[int], reloads: np.ndarray) -> tuple[int, int]:
    """Returns rank and slot of the layer for one more expert: table [R, K], reloads [R]."""
    slots_of, ranks_of = _counts(table)
    best: tuple[tuple[int, ...], int, int] | None = None
    for rank in live:
        for slot, expert in enumerate(table[rank].tolist()):
            if expert < 0:
                key = (0, 0, int(reloads[rank]), rank, slot)
            elif slots_of[expert] > 1:
                is_repeated = (table[rank] == expert).sum() > 1
                leaves_one_rank = not is_repeated and ranks_of[expert] == 2
                key = (2 if leaves_one_rank else 1, -slots_of[expert], int(reloads[rank]), rank, slot)
            else:
                continue
            if best is None or key < best[0]:
                best = key, rank, slot
    assert best is not None, "as many slots as experts, so an expert without a slot leaves one empty or repeated"
    return best[1], best[2]


def _counts(table: Ints) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the slots of each expert of one layer, and the ranks that hold it: table [R, K]."""
    slots_of: dict[int, int] = {}
    ranks_of: dict[int, int] = {}
    for row in table.tolist():
        for expert in row:
            slots_of[expert] = slots_of.get(expert, 0) + 1
        for expert in set(row):
            ranks_of[expert] = ranks_of.get(expert, 0) + 1
    return slots_of, ranks_of


class _Holders:
    """The experts that each live rank holds in one layer, each once; a repeated slot counts as an empty one."""

    def __init__(self, table: Ints, live: Sequence[int], num_wanted: int, node_of: Sequence[int]):
        """table: [R, K];  num_wanted: ranks that every expert should be on;  node_of: of each rank"""
        self._node_of = node_of
        self._slots = int(table.shape[1])
        self._live = live
        self._wanted = num_wanted
        self._on: dict[int, set[int]] = {
            rank: {expert for expert in table[rank].tolist() if expert >= 0} for rank in live
        }
        self._at: dict[int, set[int]] = {}  # expert -> its ranks
        for rank, experts in self._on.items():
            for expert in experts:
                self._at.setdefault(expert, set()).add(rank)
        self._was_on = {rank: frozenset(experts) for rank, experts in self._on.items()}
        # Kept up to date, so that where nothing is spare any more, as after most losses, an expert costs no search.
        self._can_leave = {expert for expert, ranks in self._at.items() if len(ranks) > num_wanted}
        self._num_free_in_all = sum(self._num_free(rank) for rank in live)

    def give(self) -> bool:
        """Gives every expert the wanted ranks, as far as spare slots go. Returns whether any got one."""
        missing = [expert for expert in sorted(self._at) for _ in range(self._wanted - len(self._at[expert]))]
        left = []
        for expert in missing:
            rank = self._rank_with_spare_slot(expert)
            if rank is None:
                left.append(expert)
            else:
                self._take_spare_slot(expert, rank)
        # Spare slots that are left now are on ranks that hold these experts already: chains lead to them.
        num_given = len(missing) - len(left)
        for expert in left:
            chain = self._cheapest_chain(expert)
            if chain:
                self._follow(expert, chain)
                num_given += 1
        return num_given > 0

    def write(self, table: Ints) -> int:
        """Writes new experts into empty slots, then repeated ones, then those that experts left; returns how many."""
        num_written = 0
        for rank in self._live:
            row = table[rank]
            new = sorted(self._on[rank] - self._was_on[rank])
            num_written += len(new)
            if not new:
                continue
            first = {expert: slot for slot, expert in reversed(list(enumerate(row.tolist())))}
            empty = [slot for slot, expert in enumerate(row.tolist()) if expert < 0]
            repeated = [slot for slot, expert in enumerate(row.tolist()) if expert >= 0 and first[expert] != slot]
            given_up = [first[expert] for expert in sorted(self._was_on[rank] - self._on[rank])]
            for slot, expert in zip([*empty, *repeated, *given_up], new, strict=False):
                row[slot] = expert
        return num_written

    @property
    def _has_spare_slots(self) -> bool:
        return bool(self._num_free_in_all or self._can_leave)

    def _num_free(self, rank: int) -> int:
        return self._slots - len(self._on[rank])

    def _donor(self, rank: int) -> int | None:
        """Returns the expert that can leave this rank: the one with the most ranks, of more than it needs."""
        candidates = self._on[rank] & self._can_leave
        return min(candidates, key=lambda e: (-len(self._at[e]), e), default=None)

    def _rank_with_spare_slot(self, expert: int) -> int | None:
        """Returns the rank without the expert with the most free slots, or else one with an expert to give up; of
        another node where there is such a rank."""
        if not self._has_spare_slots:
            return None
        others = [rank for rank in self._live if rank not in self._at[expert]]
        nodes = {self._node_of[rank] for rank in self._at[expert]}
        far = {rank: self._node_of[rank] not in nodes for rank in others}
        free = {rank: self._num_free(rank) for rank in others}
        emptiest = max(others, key=lambda rank: (free[rank] > 0, far[rank], free[rank], -rank), default=None)
        if emptiest is None or free[emptiest] > 0:
            return emptiest
        donors = {rank: donor for rank in others if (donor := self._donor(rank)) is not None}
        return min(donors, key=lambda rank: (not far[rank], -len(self._at[donors[rank]]), rank), default=None)

    def _take_spare_slot(self, expert: int, rank: int) -> None:
        if not self._num_free(rank):
            donor = self._donor(rank)
            assert donor is not None
            self._leave(donor, rank)
        self._enter(expert, rank)

    def _cheapest_chain(self, arriving: int) -> list[tuple[int, int]]:
        """Returns the way to one more slot for an expert that changes the fewest slots, [] where there is none.

        Links (rank, expert that leaves it for the rank of the next link), the last with -1: that rank has a spare slot.
        """
        if not self._has_spare_slots:
            return []
        ends = [rank for rank in self._live if self._num_free(rank) or self._donor(rank) is not None]
        cost = {rank: 0 for rank in self._live if rank not in self._at[arriving]}
        came: dict[int, tuple[int, int]] = {}  # rank -> (rank before, the expert that leaves that one)
        lower = True
        while lower:
            lower = False
            for rank in sorted(cost):
                for expert in sorted(self._on[rank]):
                    if expert in self._can_leave:
                        continue  # it can leave for nothing: the rank is an end
                    undone = int(expert not in self._was_on[rank])
                    for other in (other for other in self._live if other not in self._at[expert]):
                        total = cost[rank] - undone + int(expert not in self._was_on[other])
                        if total < cost.get(other, np.inf):
                            cost[other], came[other], lower = total, (rank, expert), True
        reached = [rank for rank in ends if rank in cost]
        if not reached:
            return []
        links = [(min(reached, key=lambda rank: (cost[rank], rank)), -1)]
        while links[0][0] in came:
            links.insert(0, came[links[0][0]])
        return links

    def _follow(self, expert: int, links: list[tuple[int, int]]) -> None:
        """Moves experts along a chain, from its end on, so that each finds a free slot."""
        arriving = [expert, *(leaving for _, leaving in links[:-1])]
        for (rank, leaving), comes in reversed(list(zip(links, arriving, strict=True))):
            if leaving >= 0:
                self._leave(leaving, rank)
                self._enter(comes, rank)
            else:
                self._take_spare_slot(comes, rank)

    def _enter(self, expert: int, rank: int) -> None:
        self._on[rank].add(expert)
        self._at[expert].add(rank)
        self._num_free_in_all -= 1
        if len(self._at[expert]) > self._wanted:
            self._can_leave.add(expert)

    def _leave(self, expert: int, rank: int) -> None:
        self._on[rank].remove(expert)
        self._at[expert].remove(rank)
        self._num_free_in_all += 1
        if len(self._at[expert]) <= self._wanted:
            self._can_leave.discard(expert)


def fill_empty_slots(
    placement: Placement,
    tokens: NDArray[np.number],
    num_nodes: int = 1,
    lost_ranks: Collection[int] = (),
    in_use: Placement | None = None,
) -> Placement:
    """Returns the placement with one more replica of an expert in every empty slot, except those of lost ranks.

    Our planners leave a slot empty where a replica brings nothing.

    tokens:    [L, E] load that the ranks shall be even under
    num_nodes: experts stay on the nodes that hold them; 1 = they may go anywhere
    in_use:    the placement that this one replaces, of the same shape; None = none
    Each slot takes the expert that leaves the layer's largest rank load lowest, of those that its rank does not hold
    yet (of all where it holds all). On a tie, one that the rank has in use, so that no rank sends it; then the lowest.
    """
    table = placement.physical_to_logical.copy()
    num_ranks, num_logical = placement.num_ranks, placement.num_logical
    old = (placement if in_use is None else in_use).by_rank
    for row in np.flatnonzero((table < 0).any(axis=1)).tolist():
        by_rank = table[row].reshape(num_ranks, -1)
        load = tokens[row].astype(np.float64)
        held = np.zeros((num_ranks, num_logical), dtype=np.int64)  # replicas
        ranks, slots = np.nonzero(by_rank >= 0)
        np.add.at(held, (ranks, by_rank[ranks, slots]), 1)
        for rank, slot in np.argwhere(by_rank < 0).tolist():
            if rank in lost_ranks:
                continue
            count = held.sum(axis=0)
            each, next_each = load / np.maximum(count, 1), load / (count + 1)
            now = _rank_load(by_rank, each)
            after = now[:, None] - held * (each - next_each)  # [R, E]: with one more replica of an expert
            after[rank] += next_each
            here = held.reshape(num_nodes, -1, num_logical)[rank * num_nodes // num_ranks].any(axis=0)
            choices = np.flatnonzero(here & (held[rank] == 0))
            if not len(choices):
                choices = np.flatnonzero(here) if here.any() else np.arange(num_logical)
            top = after.max(axis=0)[choices]
            choices = choices[top == top.min()]
            at_hand = choices[np.isin(choices, old[row, rank])]
            expert = (at_hand if len(at_hand) else choices)[0]
            by_rank[rank, slot] = expert
            held[rank, expert] += 1
    return replace(placement, physical_to_logical=table)


def _rank_load(by_rank: NDArray[np.int32], each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the load of each rank, [R].

    by_rank: [R, K] expert of each slot, -1 = empty;  each: [E] load of one replica
    Added in the order of the slots: each rank of an engine fills for itself, and a matrix product adds in an order that
    depends on the processor.
    """
    ranks, slots = np.nonzero(by_rank >= 0)
    return np.bincount(ranks, weights=each[by_rank[ranks, slots]], minlength=len(by_rank)).astype(np.float64)
