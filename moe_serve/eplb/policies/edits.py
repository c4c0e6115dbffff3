"""The cheapest edits of a placement in use: overwriting a redundant replica, and swapping two replicas.

Edits lower a smooth maximum, the sum over ranks of exp(steepness x load / mean). The heaviest rank dominates it, and it
also holds down the next ones, which could become the heaviest when the load drifts. One edit changes it in closed form:
- a swap of slots a and b changes it by rest_a * size_b + rest_b * size_a - peak_a - peak_b, where size = exp of the
  slot's load, peak = exp of its rank's load, rest = peak / size;
- overwriting one of c replicas of f on rank d with a replica of e makes f's other replicas heavier by one known factor,
  e's lighter by another, both where a rank holds both, and replaces f's share of d's load by e's.
Edits are compared by gain per expert that a rank must receive, counted against the placement in use. Ties: the first in
the order in which edits are listed wins, and the arithmetic is repeatable
(`repeatable_exp`, `sum_in_order`), so that edits.c decides alike.

Shape words: L = layers, E = experts, R = ranks, K = slots per rank, P = R x K.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import replicas_in

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]
Bools = NDArray[np.bool_]
MAX_EXPONENT = 600.0  # exp stays finite in float64
# Of the heaviest rank, at most: under heavier skew the maximum gets smoother. Products of two exps stay finite.
MAX_STEEP_LOAD = 500.0
# By cost 0, 1, 2, -2, -1: what a gain is multiplied by. An edit that costs nothing (or takes moves back) counts as a
# quarter of a move, so that small gains do not win.
_PER_MOVE = np.array([4.0, 1.0, 0.5, 4.0, 4.0])
LEAST_EXPONENT, MOST_EXPONENT = -700.0, 700.0  # results stay normal numbers
LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
TO_INTEGER = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer, half to even
TERMS = tuple(1.0 / float(math.factorial(power)) for power in range(13, -1, -1))


@dataclass(eq=False)
class EditState:
    """Layers being edited. `refresh` recomputes everything from `table` and `count`; arrays are changed in place.

    unit:      [L, E] load in mean rank loads
    table:     [L, R, K] int32
    was_here:  [L, R, E] whether the rank holds the expert in the placement in use
    steepness: of the smooth maximum, per mean rank load
    fixed:     [L, E] cost of each replica on its own, or None
    min_replicas: an expert with no more of them keeps them all
    max_rank_moves: experts that edits may make one rank receive; None = no limit
    """

    unit: Floats
    table: Ids
    was_here: Bools
    steepness: float
    fixed: Floats | None = None
    min_replicas: int = 1
    max_rank_moves: int | None = None

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Recomputes what follows from the table."""
        num_layers, num_ranks, _ = self.table.shape
        num_experts = self.unit.shape[1]
        layer = np.arange(num_layers)[:, None, None]
        self.safe = np.where(self.table < 0, num_experts, self.table)  # the column of empty slots
        self.count = replicas_in(self.table, num_experts)
        self.each = np.concatenate([self.size_of(np.maximum(self.count, 1)), np.zeros((num_layers, 1))], axis=1)
        self.load = self.each[layer, self.safe]
        self.rank_load = sum_in_order(self.load, axis=2)
        # Relative to the heaviest rank, so that exp cannot overflow and gains of layers compare.
        self.peak_load = self.rank_load.max(axis=1)
        self.steep = np.minimum(self.steepness, MAX_STEEP_LOAD / np.maximum(self.peak_load, 1e-9))
        self.peak = repeatable_exp(self.steep[:, None] * (self.rank_load - self.peak_load[:, None]))
        held = np.zeros((num_layers, num_ranks, num_experts + 1), dtype=bool)
        held[layer, np.arange(num_ranks)[None, :, None], self.safe] = True
        self.held = held[:, :, :num_experts]
        self.moved = (self.table >= 0) & ~np.take_along_axis(_with_empty(self.was_here, True), self.safe, axis=2)
        most = self.table.shape[2] if self.max_rank_moves is None else self.max_rank_moves
        self.full = self.moved.sum(axis=2) >= most

    def rows(self, which: NDArray[np.integer]) -> "EditState":
        """Returns the state of some layers, with copies of their tables."""
        fixed = None if self.fixed is None else self.fixed[which]
        return replace(self, unit=self.unit[which], table=self.table[which], was_here=self.was_here[which], fixed=fixed)

    def size_of(self, count: NDArray[np.int64]) -> Floats:
        """Returns the size of one replica of each expert with `count` [L, E] replicas of it."""
        return self.unit / count + (0.0 if self.fixed is None else self.fixed)

    @property
    def num_moved(self) -> NDArray[np.int64]:
        num: NDArray[np.int64] = self.moved.sum(axis=(1, 2))
        return num


@dataclass(frozen=True, eq=False)
class Edits:
    """The best edit of each layer: its gain in the smooth maximum, its cost in moves, and its slots.

    gain [L] (-inf = none), cost [L]; slot, other: [L] flat slots r * K + k; expert: [L] the expert that overwrites
    `slot`, or -1 for a swap of `slot` with `other`
    """

    gain: Floats
    cost: NDArray[np.int64]
    slot: NDArray[np.int64]
    other: NDArray[np.int64]
    expert: NDArray[np.int64]


def best_swaps(
    state: EditState,
    room: NDArray[np.int64],
    num_heavy: int,
    nodes: tuple[NDArray[np.int64], Bools] | None = None,
) -> Edits:
    """Returns the swap with the most gain per move of each layer, from the `num_heavy` heaviest ranks to any rank.

    room: [L] moves left for the layer; nodes: as in `all_swaps`
    """
    num_layers, num_ranks, slots = state.table.shape
    heavy = np.argsort(-state.rank_load, axis=1, kind="stable")[:, : min(num_heavy, num_ranks)]
    x, num_slots = np.arange(num_layers), num_ranks * slots
    gain, cost = all_swaps(state, heavy, nodes)
    best = _best_per_move(gain, cost, room)
    first, other = best // num_slots, best % num_slots
    slot = heavy[x, first // slots] * slots + first % slots
    return Edits(gain[x, best], cost[x, best].astype(np.int64), slot, other, np.full(num_layers, -1))


def all_swaps(
    state: EditState, heavy: NDArray[np.int64], nodes: tuple[NDArray[np.int64], Bools] | None = None
) -> tuple[Floats, NDArray[np.int8]]:
    """Returns gain and cost of swapping any slot of the heavy ranks with any slot: [L, H x K x P]; -inf = illegal.

    heavy: [L, H] ranks
    nodes: ([R] node of each rank, [L, E] whether an expert may go to another node); None = all may
    """
    num_layers, num_ranks, slots = state.table.shape
    x = np.arange(num_layers)
    rows, num_slots = x[:, None], num_ranks * slots
    exponent = state.steep[:, None] * state.each
    size = repeatable_exp(exponent)[x[:, None, None], state.safe]
    rest = state.peak[:, :, None] * repeatable_exp(-exponent)[x[:, None, None], state.safe]
    my_table, my_peak = state.table[rows, heavy], state.peak[rows, heavy][:, :, None, None]
    my_size, my_rest = size[rows, heavy][..., None], rest[rows, heavy][..., None]
    # [L, H, K, P]: the slots of the heavy ranks against all slots
    gain = np.broadcast_to(my_peak, (*my_table.shape, num_slots)) + np.repeat(state.peak, slots, axis=1)[:, None, None]
    product = my_rest * size.reshape(num_layers, 1, 1, -1)
    gain -= product
    gain -= np.multiply(my_size, rest.reshape(num_layers, 1, 1, -1), out=product)
    # Neither rank may end with an expert twice. Looked up once for each rank, not for each pair of slots.
    held, was = _with_empty(state.held, False), _with_empty(state.was_here, True)
    table = state.table.reshape(num_layers, -1)
    safe, my_safe = np.where(table < 0, -1, table), np.where(my_table < 0, -1, my_table)
    at_mine = x[:, None, None], heavy[:, :, None], safe[:, None]  # [L, H, P]: theirs on my rank
    at_theirs = x[:, None, None, None], np.arange(num_ranks), my_safe[..., None]  # [L, H, K, R]: mine on their rank
    gain += np.where(held[at_mine], -np.inf, 0.0)[:, :, None]
    gain += np.repeat(np.where(held[at_theirs], -np.inf, 0.0), slots, axis=3)
    if nodes is not None:
        node_of, may_go = nodes[0], _with_empty(nodes[1][:, None], True)[:, 0]
        same = np.repeat(node_of[heavy][..., None] == node_of, slots, axis=2)  # [L, H, P]
        both = may_go[x[:, None, None], my_safe][..., None] & may_go[rows, safe][:, None, None]
        gain += np.where(same[:, :, None] | both, 0.0, -np.inf)
    # A rank that may receive no more takes what it had before, or overwrites what it has received.
    if state.full.any():
        here, there = ~was[at_mine] & state.full[rows, heavy][..., None], ~was[at_theirs] & state.full[:, None, None]
        gain += np.where(here[:, :, None] & ~state.moved[rows, heavy][..., None], -np.inf, 0.0)
        gain += np.where(np.repeat(there, slots, axis=3) & ~state.moved.reshape(num_layers, 1, 1, -1), -np.inf, 0.0)
    moved = state.moved.astype(np.int8)
    mine = (~was[at_theirs]).astype(np.int8) - moved[rows, heavy][..., None]
    theirs = (~was[at_mine]).astype(np.int8) - moved.reshape(num_layers, 1, -1)
    cost = np.repeat(mine, slots, axis=3) + theirs[:, :, None]
    return gain.reshape(num_layers, -1), cost.reshape(num_layers, -1)


@dataclass(frozen=True, eq=False)
class Overwrites:
    """All overwrites of redundant replicas and empty slots.

    gain, cost: [L, D, E], gain -inf = illegal; slot, old: [L, D] the flat slot and the expert in it
    """

    gain: Floats
    cost: NDArray[np.int8]
    slot: NDArray[np.int64]
    old: NDArray[np.int64]


def all_overwrites(state: EditState, allowed: Bools | None = None, must_stay: Bools | None = None) -> Overwrites:
    """Returns gain and cost of putting any expert into any redundant slot; D = most such slots of a layer.

    allowed: [L, R, E] which experts may have a replica on which rank, None = all
    must_stay: [L, R, K] slots that may not be overwritten, None = none
    """
    num_layers, _, slots = state.table.shape
    num_experts = state.unit.shape[1]
    x = np.arange(num_layers)
    table = state.table.reshape(num_layers, -1)
    spare = (table < 0) | (np.take_along_axis(state.count, np.maximum(table, 0), axis=1) > state.min_replicas)
    if must_stay is not None:
        spare &= ~must_stay.reshape(num_layers, -1)
    width = int(spare.sum(axis=1).max(initial=0))
    slot = np.argsort(~spare, axis=1, kind="stable")[:, :width]  # redundant slots first
    usable = np.take_along_axis(spare, slot, axis=1)
    old = np.take_along_axis(table, slot, axis=1)
    safe = np.where(old < 0, num_experts, old)
    rank = slot // slots
    steep = state.steep[:, None]
    over = _peaks_of_holders(state)
    each = state.each[:, :num_experts]
    fewer = state.size_of(np.maximum(state.count - 1, 1))
    more = state.size_of(state.count + 1)
    peak = np.take_along_axis(state.peak, rank, axis=1)
    growth = np.zeros((num_layers, num_experts + 1))  # 0: overwriting an empty slot adds load to no replica
    growth[:, :-1] = repeatable_exp(np.minimum(steep * (fewer - each), MAX_EXPONENT)) - 1
    raised = (np.take_along_axis(over, safe, axis=1) - peak) * np.take_along_axis(growth, safe, axis=1)
    shrinks = repeatable_exp(steep * (more - each)) - 1
    lowered = over[:, :-1] * shrinks
    rest = peak * np.take_along_axis(repeatable_exp(-steep * state.each), safe, axis=1)
    gain = (peak - raised)[:, :, None] - lowered[:, None, :]
    gain -= rest[:, :, None] * repeatable_exp(np.minimum(steep * more, MAX_EXPONENT))[:, None, :]
    # A rank that holds both grows by f and shrinks by e: (1 + grows) (1 + shrinks) - 1.
    grows = np.take_along_axis(growth, safe, axis=1)
    gain += -(_peaks_of_both(state, safe, rank) * (grows[:, :, None] * shrinks[:, None, :]))
    illegal = state.held[x[:, None], rank] | ~usable[:, :, None]
    if allowed is not None:
        illegal |= ~allowed[x[:, None], rank]
    moved = np.take_along_axis(state.moved.reshape(num_layers, -1), slot, axis=1).astype(np.int8)
    cost = (~state.was_here[x[:, None], rank]).astype(np.int8) - moved[:, :, None]
    illegal |= (cost > 0) & np.take_along_axis(state.full, rank, axis=1)[:, :, None]
    np.copyto(gain, -np.inf, where=illegal)
    return Overwrites(gain, cost, slot, old.astype(np.int64))


def best_overwrites(
    state: EditState, room: NDArray[np.int64], allowed: Bools | None = None, must_stay: Bools | None = None
) -> Edits:
    """Returns, for each layer, the overwrite of a redundant replica (or empty slot) with the most gain per move."""
    num_layers, num_experts = state.unit.shape
    options = all_overwrites(state, allowed, must_stay)
    if options.slot.shape[1] == 0:
        zeros = np.zeros(num_layers, dtype=np.int64)
        return Edits(np.full(num_layers, -np.inf), zeros, zeros, zeros, zeros)
    gain, cost = options.gain.reshape(num_layers, -1), options.cost.reshape(num_layers, -1)
    best = _best_per_move(gain, cost, room)
    x = np.arange(num_layers)
    slot = options.slot[x, best // num_experts]
    return Edits(gain[x, best], cost[x, best].astype(np.int64), slot, slot, best % num_experts)


def apply_edits(state: EditState, edits: Edits, which: Bools) -> None:
    """Makes the edits of the layers in `which` [L] and refreshes the state."""
    table = state.table.reshape(len(which), -1)
    rows = np.flatnonzero(which)
    slot, other, expert = edits.slot[rows], edits.other[rows], edits.expert[rows]
    is_swap = expert < 0
    kept = table[rows, slot].copy()
    table[rows, slot] = np.where(is_swap, table[rows, other], expert)
    table[rows[is_swap], other[is_swap]] = kept[is_swap]
    state.refresh()


def _peaks_of_holders(state: EditState) -> Floats:
    """Returns, for each expert, the sum of the peaks of the ranks that hold it, added by rank: [L, E + 1]."""
    width = state.unit.shape[1] + 1
    key = np.arange(len(state.table))[:, None, None] * width + state.safe
    peak = np.repeat(state.peak, state.table.shape[2])
    total: Floats = np.bincount(key.ravel(), peak, minlength=len(state.table) * width).astype(np.float64)
    return total.reshape(-1, width)


def _peaks_of_both(state: EditState, expert: NDArray[np.int64], rank: NDArray[np.int64]) -> Floats:
    """Returns the sum of the peaks of the ranks that hold `expert` and another, `rank` left out, added by rank.

    expert, rank: [L, D] -> [L, D, E]
    """
    num_layers, width = state.unit.shape[0], state.unit.shape[1] + 1
    held = _with_empty(state.held, False)
    x = np.arange(num_layers)[:, None]
    holds = held[x[..., None], np.arange(state.table.shape[1]), expert[..., None]]  # [L, D, R]
    holds[x, np.arange(expert.shape[1]), rank] = False
    layer, slot, other = np.nonzero(holds)
    key = ((layer * expert.shape[1] + slot) * width)[:, None] + state.safe[layer, other]
    peak = np.repeat(state.peak[layer, other], state.table.shape[2])
    total: Floats = np.bincount(key.ravel(), peak, minlength=num_layers * expert.shape[1] * width).astype(np.float64)
    return total.reshape(num_layers, expert.shape[1], width)[:, :, :-1]


def _best_per_move(gain: Floats, cost: NDArray[np.int8], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of the best gain per move among edits that fit into the moves left: [L, N] -> [L].

    Any index of a layer where nothing gains. cost: from -2 to 2
    """
    if room.min(initial=2) < 2:  # no edit costs more than two moves
        gain[cost > np.clip(room, -3, 2)[:, None].astype(np.int8)] = -np.inf
    rate = _PER_MOVE.take(cost)
    rate *= gain
    best: NDArray[np.int64] = rate.argmax(axis=1)
    return best


def _with_empty(table: Bools, value: bool) -> Bools:
    """Returns [L, R, E + 1]: a last column for the id -1."""
    return np.concatenate([table, np.full((*table.shape[:2], 1), value)], axis=2)


def repeatable_exp(x: Floats) -> Floats:
    """Returns e^x to two units in the last place, x clipped to +-700. edits.c has its twin.

    The bits are the same in numpy and in C, on every processor: no library's exp, and no sum in an order of its own.
    Plans compare gains, and gains that differ in the last bit decide ties differently, so both forms of a search use
    this and `sum_in_order`.
    """
    x = np.minimum(np.maximum(x, LEAST_EXPONENT), MOST_EXPONENT)
    power = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    rest = (x - power * LN_2_HIGH) - power * LN_2_LOW
    value = np.full_like(rest, TERMS[0])
    for term in TERMS[1:]:
        value = value * rest + term
    scale: Floats = ((power.astype(np.int64) + 1023) << 52).view(np.float64)
    return value * scale


def sum_in_order(values: Floats, axis: int) -> Floats:
    """Returns the sum along an axis, added from its first entry to its last; numpy's own sum adds in blocks."""
    total = np.zeros(np.delete(values.shape, axis))
    for part in np.moveaxis(values, axis, 0):
        total = total + part
    return total
