"""Makes the placement in use a legal start for edits, and keeps edits inside the node hierarchy.

A start can be illegal because a rank was excluded, an expert was lost or is on fewer than min_replicas ranks, or a rank
holds one twice. These are repaired even beyond the limits of moves. Under a hierarchy a home node can also lack one of
its experts, or drift can have put too much load on replicas off home: these are mended one slot at a time, within the
limits of moves, and the next plan goes on where a limit ended it.

Shape words: L = layers, E = experts, R = ranks that take part, K = slots per rank, N = nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.anew import relabelled
from moe_serve.eplb.policies.edits import Bools, EditState, repeatable_exp, sum_in_order
from moe_serve.eplb.policies.hierarchy import (
    SHARE_NOISE,
    has_single_homes,
    is_over_budget,
    num_homeless,
    plan_by_node,
    read_homes,
    share_off_home,
)
from moe_serve.eplb.policies.packing import duplicate_slots, replicas_in
from moe_serve.eplb.policies.policy import Unkept
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, holds, part_of
from moe_serve.eplb.repair import give_ranks

Ints = NDArray[np.int64]
Writes = tuple[tuple[int, int, int], ...]  # (rank, slot, expert), to different ranks
STEEPNESS = 30.0  # of the smooth maximum that chooses what takes the place of a replica off home


@dataclass(frozen=True, eq=False)
class HomeRule:
    """The edits that a node hierarchy allows: every expert keeps a replica on its home node, and the share of the load
    served off home stays within the budget.

    homes: [L, E] home node; node_of: [R]; budget: share of the load
    singles: experts have homes of their own, not with their group: one that has a single replica may swap places with
             another such one on any node, and its home goes with it
    """

    homes: Ints
    node_of: Ints
    budget: float
    singles: bool

    def rows(self, which: Ints) -> "HomeRule":
        """Returns the rule of some layers, with a copy of their homes."""
        return HomeRule(self.homes[which], self.node_of, self.budget, self.singles)

    def may_change_node(self, state: EditState) -> Bools:
        """Returns which experts may swap places with one of another node, [L, E]."""
        may: Bools = (state.count == 1) & self.singles
        return may

    def follow(self, layers: Ints, tables: Ids, slot: Ints, other: Ints) -> None:
        """Makes the new nodes of swapped experts their homes, in place: tables [n, R, K] after an edit of each layer.

        slot, other: [n] as in `Edits`; the same where it was no swap
        """
        num_slots = tables.shape[2]
        ends = np.stack([slot, other], axis=1)
        nodes = self.node_of[ends // num_slots]
        x = np.flatnonzero(nodes[:, 0] != nodes[:, 1])
        expert = np.take_along_axis(tables.reshape(len(tables), len(self.node_of) * num_slots), ends, axis=1)
        for side in range(2):
            held = x[expert[x, side] >= 0]
            self.homes[layers[held], expert[held, side]] = nodes[held, side]

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


@dataclass(frozen=True, eq=False)
class LegalStart:
    """The start of edits.

    table:   [L, R, K];  rule: None without a hierarchy
    foreign: [L] whether experts were missing at home, or any off home under a hard hierarchy, which no drift brings
             about: homes may have been others, or none
    """

    table: Ids
    rule: HomeRule | None
    foreign: Bools


def make_legal(problem: Problem) -> LegalStart:
    """Returns a legal table close to the one in use, and the rule that edits must keep.

    A repeated replica is emptied; a lost expert takes an empty slot or overwrites a redundant replica on the lightest
    rank; then experts on too few ranks get further ones, with few changed slots. Under a hierarchy missing experts come
    home and replicas off home give way to others while the limits of moves allow it.
    """
    assert problem.current is not None
    table = problem.current.copy()
    table[duplicate_slots(table)] = -1
    if not problem.is_global:
        rule = HomeRule(
            read_homes(problem, table), problem.node_of, problem.request.off_home, has_single_homes(problem)
        )
        return LegalStart(table, rule, _mend(problem, table, rule))
    num_experts = problem.weight.shape[1]
    for layer in np.flatnonzero((replicas_in(table, num_experts) == 0).any(axis=1)):
        _place_lost(problem.weight[layer], table[layer])
    if problem.min_replicas > 1:
        node_of = problem.node_of.tolist() if problem.request.two_nodes else ()
        for rows in table:
            give_ranks(rows, range(problem.num_ranks), problem.min_replicas, node_of)
    return LegalStart(table, None, np.zeros(len(table), dtype=bool))


def _mend(problem: Problem, table: Ids, rule: HomeRule) -> Bools:
    """Makes the table keep the rule, in place, as far as the limits of moves allow. Returns `LegalStart.foreign`.

    The layers furthest from it come first, since they may share a limit. Where nothing limits the moves and single
    slots do not lead there, or more of them would be needed than a rank has, or where an expert would be without a
    slot, the layer is planned anew.
    """
    assert problem.current is not None
    request = problem.request
    missing = num_homeless(problem, table, rule.homes)
    over = is_over_budget(problem, table, rule.homes)
    foreign: Bools = (missing > 0) | (over & (request.off_home == 0))
    share, num_guests = share_off_home(problem, table, rule.homes)
    misplaced = missing + num_guests * (request.off_home == 0)
    # What no lost rank explains is another's placement: single slots would take long to a poor one.
    anew = (misplaced > problem.slots_per_rank) & (not problem.limits_moves)
    todo = np.flatnonzero(((missing > 0) | over) & ~anew)
    left = problem.num_slots * len(table) if request.max_total_moves is None else request.max_total_moves
    layers = {int(row): _Mending(problem, int(row), table[row], rule.homes[row]) for row in todo}
    forced = [*np.flatnonzero(anew), *(row for row, layer in layers.items() if not layer.rescue())]
    left -= sum(layer.num_moves for layer in layers.values())
    for row in sorted(layers, key=lambda row: (-missing[row], -share[row])):
        layer = layers[row]
        before = layer.num_moves
        layer.most = min(layer.most, before + max(left, 0))
        if not layer.mend() and not problem.limits_moves:
            forced.append(row)
        left -= layer.num_moves - before
    if forced:
        rows = np.unique(forced)
        part = part_of(problem, rows)
        table[rows], rule.homes[rows] = relabelled(part, *plan_by_node(part, sweeps=0)[:2])
    return foreign


def unkept_homes(problem: Problem, table: Ids, homes: Ints) -> tuple[Unkept, ...]:
    """Returns the rules of the hierarchy that a table [L, R, K] does not keep: limits of moves ended its mending."""
    found = []
    because = "the limits of moves leave no room to mend it in one plan; the next ones go on"
    missing = num_homeless(problem, table, homes)
    if missing.any():
        rule = "a replica of every expert on its home node"
        found.append(Unkept(rule, float(missing.max()), int((missing > 0).sum()), because))
    over = is_over_budget(problem, table, homes)
    if over.any():
        share = share_off_home(problem, table, homes)[0]
        found.append(Unkept(f"off_home {problem.request.off_home:g}", float(share.max()), int(over.sum()), because))
    return tuple(found)


class _Mending:
    """One layer of a hierarchy on its way to a legal table, slot by slot.

    most: moves that it may make;  num_moves: made so far
    """

    def __init__(self, problem: Problem, row: int, table: Ids, home: Ints) -> None:
        """table: [R, K], edited in place;  home: [E]"""
        assert problem.current is not None
        request, num_experts = problem.request, problem.weight.shape[1]
        self._table, self._node_of = table, problem.node_of
        self._least, self._budget = problem.min_replicas, request.off_home
        self._weight = problem.weight[row]
        self._own = np.zeros(num_experts) if problem.fixed is None else problem.fixed[row]
        self._was = holds(problem.current[row][None], num_experts)[0]
        self._held = holds(table[None], num_experts)[0]
        self._local = home == self._node_of[:, None]  # [R, E]
        self._count, self._at_home = self._held.sum(axis=0), (self._held & self._local).sum(axis=0)
        self._arrived = (self._held & ~self._was).sum(axis=1)
        self.most = problem.num_slots if request.max_moves is None else request.max_moves
        self._rank_most = problem.slots_per_rank if request.max_rank_moves is None else request.max_rank_moves

    @property
    def num_moves(self) -> int:
        return int(self._arrived.sum())

    def rescue(self) -> bool:
        """Puts experts onto min_replicas ranks, even beyond the limits of moves. Returns whether all are."""
        short = np.flatnonzero(self._count < self._least).tolist()
        return all(self._until(self._count, expert, forced=True) for expert in short)

    def mend(self) -> bool:
        """Brings missing experts home, the heaviest first, then lowers the share off home. Returns whether it could."""
        missing = np.flatnonzero(self._at_home < self._least)
        missing = missing[np.argsort(-self._weight[missing], kind="stable")].tolist()
        done = [self._until(self._at_home, expert, forced=False) for expert in missing]
        while is_over := self._is_over():
            if not self._give_way():
                break
        return all(done) and not is_over

    def _until(self, count: Ints, expert: int, forced: bool) -> bool:
        """Brings an expert home until `count` of it, which follows, is min_replicas. Returns whether it is."""
        while count[expert] < self._least:
            if not self._bring_home(expert, forced):
                return False
        return True

    def _is_over(self) -> bool:
        away = self._weight * (1 - self._at_home / np.maximum(self._count, 1))
        over = _total(away) > (self._budget + SHARE_NOISE) * _total(self._weight)
        return bool(over or (self._budget == 0 and (self._count > self._at_home).any()))

    def _bring_home(self, expert: int, forced: bool) -> bool:
        """Gives an expert one more replica on its home node: in a slot that can be spared, else in that of a guest,
        which takes the slot of the expert elsewhere, else by moving another expert inside the node."""
        node = self._local[:, expert]
        spare = self._spare()
        here = node & ~self._held[:, expert]
        options: list[Writes] = [((rank, slot, expert),) for rank, slot in np.argwhere(spare & here[:, None])]
        if not options:
            away = np.flatnonzero(self._held[:, expert] & ~node)
            guests = (self._table >= 0) & ~np.take_along_axis(self._local, np.maximum(self._table, 0), axis=1)
            for rank, slot in np.argwhere(guests & here[:, None]):
                guest = self._table[rank, slot]
                for other in away[~self._held[away, guest]]:
                    place = int((self._table[other] == expert).argmax())
                    options.append(((rank, slot, expert), (other, place, guest)))
        if not options:
            for rank, slot in np.argwhere(spare & (node & self._held[:, expert])[:, None]):
                for other, place in np.argwhere(here[:, None] & (self._table >= 0)):
                    kept = self._table[other, place]
                    if not self._held[rank, kept]:
                        options.append(((rank, slot, kept), (other, place, expert)))
        load, each, best, best_key = self._load(), self._each(np.maximum(self._count, 1)), None, (np.inf, np.inf)
        for writes in options:
            if not forced and not self._within(writes):
                continue
            rank, slot, _ = writes[0]
            old = self._table[rank, slot]
            key = (float(self._cost(writes)), load[rank] - (each[old] if old >= 0 else 0.0))
            if best is None or key < best_key:
                best, best_key = writes, key
        if best is None:
            return False
        for rank, slot, new in best:
            self._put(rank, slot, new)
        return True

    def _spare(self) -> Bools:
        """Returns the slots [R, K] whose expert has replicas enough without them: at home, and in all."""
        expert = np.maximum(self._table, 0)
        at_home = np.take_along_axis(self._local, expert, axis=1)
        enough = (self._count > self._least)[expert] & (~at_home | (self._at_home > self._least)[expert])
        return np.asarray((self._table < 0) | enough)

    def _give_way(self) -> bool:
        """Overwrites one replica off home with an expert of the node; empties it where the rank holds all of these.

        Of the replicas that bring the share within the budget, the one whose loss weighs least on the others; without
        such, the one that lowers the share most.
        """
        expert = np.maximum(self._table, 0)
        guest = (self._table >= 0) & ~np.take_along_axis(self._local, expert, axis=1)
        guest &= (self._at_home >= self._least)[expert]
        count, at_home = np.maximum(self._count, 1), self._at_home
        away = self._weight * (1 - at_home / count)
        excess = _total(away) - self._budget * _total(self._weight)
        fewer = np.maximum(count - 1, 1)
        places = np.argwhere(guest)
        there = self._table[places[:, 0], places[:, 1]]
        lowered = (away - self._weight * np.maximum(1 - at_home / fewer, 0.0))[there]
        harm = (self._weight / fewer - self._weight / count)[there]
        order = np.lexsort((np.where(lowered < excess, -lowered, harm), lowered < excess))
        for rank, slot in places[order]:
            mine = np.flatnonzero(self._local[rank] & ~self._held[rank])
            if not len(mine):
                self._put(rank, slot, -1)
                return True
            more = (~self._was[rank, mine]).astype(np.int64) - (not self._was[rank, self._table[rank, slot]])
            left = min(self._rank_most - self._arrived[rank], self.most - self.num_moves)
            mine = mine[more <= max(left, 0)]
            if len(mine):
                self._put(rank, slot, int(mine[self._peaks(rank, slot, mine).argmin()]))
                return True
        return False

    def _peaks(self, rank: int, slot: int, new: Ints) -> Floats:
        """Returns the smooth maximum over ranks after each of these experts has taken a slot, [n]."""
        old = self._table[rank, slot]
        each, fewer = (self._each(np.maximum(self._count - less, 1)) for less in (0, 1))
        more = self._each(self._count + 1)
        load = self._load() + np.where(self._held[:, old], fewer[old] - each[old], 0.0)
        load[rank] -= fewer[old]
        after = load[:, None] - self._held[:, new] * (each[new] - more[new])
        after[rank] += more[new]
        mean = max(_total(load) / len(load), 1e-300)
        return sum_in_order(repeatable_exp(STEEPNESS / mean * (after - after.max())), axis=0)

    def _each(self, count: Ints) -> Floats:
        return np.asarray(self._weight / count + self._own)

    def _load(self) -> Floats:
        each = np.append(self._each(np.maximum(self._count, 1)), 0.0)
        return sum_in_order(each[self._table], axis=1)  # -1: the 0 at the end

    def _cost(self, writes: Writes) -> int:
        """Returns the moves that some writes add."""
        return sum(self._arrivals(*write) for write in writes)

    def _arrivals(self, rank: int, slot: int, new: int) -> int:
        old = self._table[rank, slot]
        return int(new >= 0 and not self._was[rank, new]) - int(old >= 0 and not self._was[rank, old])

    def _within(self, writes: Writes) -> bool:
        """Returns whether the limits of moves allow these writes."""
        added = [(rank, self._arrivals(rank, slot, new)) for rank, slot, new in writes]
        if any(more > 0 and self._arrived[rank] + more > self._rank_most for rank, more in added):
            return False
        more = sum(more for _, more in added)
        return more <= 0 or self.num_moves + more <= self.most

    def _put(self, rank: int, slot: int, new: int) -> None:
        old = self._table[rank, slot]
        self._arrived[rank] += self._arrivals(rank, slot, new)
        self._table[rank, slot] = new
        for expert, one in ((old, -1), (new, 1)):
            if expert >= 0:
                self._held[rank, expert] = one > 0
                self._count[expert] += one
                self._at_home[expert] += one * int(self._local[rank, expert])


def _total(values: Floats) -> float:
    """Returns the sum, added from the first to the last, as `sum_in_order` and faster."""
    return float(np.cumsum(values)[-1])


def _place_lost(weight: Floats, table: Ids) -> None:
    """Gives a slot to every expert of one layer that has none, in place: table [R, K]."""
    num_experts = len(weight)
    count = replicas_in(table[None], num_experts)[0]
    for expert in sorted(np.flatnonzero(count == 0), key=lambda e: -weight[e]):
        each = weight / np.maximum(count, 1)
        load = np.where(table < 0, 0.0, each[np.maximum(table, 0)])
        spare = (table < 0) | (count[np.maximum(table, 0)] > 1)
        after = np.where(spare, load.sum(axis=1, keepdims=True) - load, np.inf)
        rank, slot = np.unravel_index(after.argmin(), table.shape)
        if table[rank, slot] >= 0:
            count[table[rank, slot]] -= 1
        table[rank, slot] = expert
        count[expert] += 1
