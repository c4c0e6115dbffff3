"""Edits a placement one overwrite or swap at a time, the one with the most gain per move first.

A layer is edited until its target is met, its budget is spent, or no edit gains enough for its moves. The numpy form
edits all layers side by side and is the reference; edits.c edits one after the other and makes the same edits.

Gains are in mean rank loads of the layer: by how much an edit lowers the smooth maximum of its ranks.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import UNFUSED, find_c_library, processor_flags
from moe_serve.eplb.policies.edits import Edits, EditState, Ids, apply_edits, best_overwrites, best_swaps, sum_in_order
from moe_serve.eplb.policies.legal import HomeRule
from moe_serve.eplb.policies.packing import Deadline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MIN_GAIN = 3e-4  # per move, in mean rank loads; less is lost in the drift until the next plan
STEEPNESS = 30.0  # of the smooth maximum, per mean rank load
SMALL_SLACK = 0.003  # a layer this close to what it can reach is done, where moves are limited or do not count
NUM_HEAVY = 6  # of the heaviest ranks, at which swaps begin
LEAST_RATE = 1e-9
_EDITS_PER_LOOK = 16  # at the clock
_SOURCE = Path(__file__).with_name("edits.c")


@dataclass(frozen=True, eq=False)
class EditGoal:
    """The goal at which the edits of a layer end.

    target: [L] balancedness;  budget: [L] moves, those before the first edit included
    min_gain: least gain of an edit per move, in mean rank loads
    max_edits: of a layer
    """

    target: Floats
    budget: Ints
    min_gain: float
    max_edits: int


@dataclass(frozen=True, eq=False)
class EditLog:
    """The edits that were made; those of one layer in the order in which they were made.

    layer, slot, other, expert: [n], as in `Edits`;  moves: [n] of the layer so far;  gain: [n] in mean rank loads
    """

    layer: Ints
    slot: Ints
    other: Ints
    expert: Ints
    moves: Ints
    gain: Floats


def edit_layers(state: EditState, goal: EditGoal, rule: HomeRule | None, deadline: Deadline) -> tuple[EditLog, bool]:
    """Edits the table in place, and the rule's homes where single experts change nodes.

    Returns the edits, and whether the deadline ended them.
    """
    library = find_library()
    if library is None:
        return edit_layers_reference(state, goal, rule, deadline)
    native = _NativeEdits(library, state, rule, NUM_HEAVY, goal.min_gain)
    at_once = goal.max_edits if deadline.at is None else _EDITS_PER_LOOK
    active, lines, gains, layers = list(range(len(state.table))), [], [], []
    left = [goal.max_edits] * len(state.table)
    truncated = False
    while active and not truncated:
        unfinished = []
        for layer in active:
            if deadline.passed:
                truncated = True
                break
            number = min(at_once, left[layer])
            made, gained = native.edit(layer, float(goal.target[layer]), int(goal.budget[layer]), number)
            lines.append(made)
            gains.append(gained)
            layers.append(np.full(len(made), layer))
            left[layer] -= number
            if len(made) == number and left[layer]:
                unfinished.append(layer)
        active = unfinished
    state.refresh()
    line = np.concatenate([np.empty((0, 4), dtype=np.int64), *lines])
    layer_of = np.concatenate([np.empty(0, dtype=np.int64), *layers])
    return EditLog(layer_of, line[:, 0], line[:, 1], line[:, 2], line[:, 3], np.concatenate([[], *gains])), truncated


def edit_layers_reference(
    state: EditState, goal: EditGoal, rule: HomeRule | None, deadline: Deadline
) -> tuple[EditLog, bool]:
    """Same contract as `edit_layers`, in numpy; the order of edits of different layers differs."""
    active, work = np.arange(len(goal.target)), state.rows(np.arange(len(goal.target)))
    made = [(np.empty(0, dtype=np.int64),) * 5]
    gains: list[Floats] = []
    truncated = False
    for _ in range(goal.max_edits):
        truncated = deadline.passed
        if truncated:
            break
        going = (balance_reached(work) < goal.target[active]) & (work.num_moved < goal.budget[active])
        room = goal.budget[active] - work.num_moved
        if rule is None:
            overwrite, swap = best_overwrites(work, room), best_swaps(work, room, NUM_HEAVY)
        else:
            here = rule.rows(active)
            overwrite = best_overwrites(work, room, here.may_receive(work), here.must_stay(work))
            swap = best_swaps(work, room, NUM_HEAVY, (rule.node_of, here.may_change_node(work)))
        edit, rate = better_of(overwrite, swap)
        scale = work.steep * sum_in_order(work.peak, axis=1)
        going &= rate > np.maximum(goal.min_gain * scale, LEAST_RATE)
        apply_edits(work, edit, going)
        x = np.flatnonzero(going)
        if rule is not None:
            rule.follow(active[x], work.table[x], edit.slot[x], edit.other[x])
        made.append((active[x], edit.slot[x], edit.other[x], edit.expert[x], work.num_moved[x]))
        gains.append(edit.gain[x] / scale[x])
        if not going.all():
            state.table[active] = work.table
            if not going.any():
                break
            active, work = active[x], work.rows(x)
    state.table[active] = work.table
    state.refresh()
    layer, slot, other, expert, moves = (np.concatenate([column[i] for column in made]) for i in range(5))
    return EditLog(layer, slot, other, expert, moves, np.concatenate([[], *gains])), truncated


def better_of(first: Edits, second: Edits) -> tuple[Edits, Floats]:
    """Returns, layer by layer, the edit with the better gain per move, and that rate (-inf = no gain)."""
    rates = [np.where(e.gain > 0, e.gain / np.maximum(e.cost, 0.25), -np.inf) for e in (first, second)]
    take = rates[1] >= rates[0]
    fields = ("gain", "cost", "slot", "other", "expert")
    edit = Edits(*(np.where(take, getattr(second, name), getattr(first, name)) for name in fields))
    return edit, np.maximum(*rates)


def balance_reached(state: EditState) -> Floats:
    """Returns the balancedness of each layer: mean / max rank load."""
    share = state.unit / np.maximum(state.count, 1) + (0.0 if state.fixed is None else state.fixed)
    flat = state.table.reshape(len(share), -1)
    load = np.where(flat < 0, 0.0, np.take_along_axis(share, np.maximum(flat, 0), axis=1))
    rank = sum_in_order(load.reshape(state.table.shape), axis=2)
    top = rank.max(axis=1)
    mean = sum_in_order(rank, axis=1) / rank.shape[1]
    return np.where(top > 0, mean / np.where(top > 0, top, 1.0), 1.0)


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns edits.c, or None where it cannot be built, which the log says once."""
    otherwise = "plans are edited by numpy, about ten times slower"
    return find_c_library(_SOURCE, {"edit_layer": 1}, otherwise, (*processor_flags(), UNFUSED))


class _NativeEdits:
    """Edits the layers of one state, each in one call."""

    def __init__(
        self, library: ctypes.CDLL, state: EditState, rule: HomeRule | None, num_heavy: int, min_gain: float
    ) -> None:
        """num_heavy, min_gain: see `edit_layers`"""
        self._edit, self._state, self._rule = library.edit_layer, state, rule
        assert num_heavy <= 64, "edits.c keeps the heaviest ranks in an array of 64"
        self._num_heavy, self._min_gain = num_heavy, min_gain
        zeros = np.zeros(state.unit.shape[1])
        self._fixed = [zeros] * len(state.unit) if state.fixed is None else state.fixed

    def edit(self, layer: int, target: float, budget: int, max_edits: int) -> tuple[Ints, Floats]:
        """Edits one layer of the state's table in place, and the rule's homes; `refresh` the state afterwards.

        Returns one line for each edit, [n, 4] (slot, other slot, expert or -1 for a swap, moves so far), and gains [n].
        """
        state, rule = self._state, self._rule
        num_ranks, slots = state.table.shape[1:]
        log, gains = np.empty((max_edits, 4), dtype=np.int64), np.empty(max_edits)
        numbers = np.array([state.steepness, target, self._min_gain, 0.0 if rule is None else rule.budget])
        home = np.zeros(0, dtype=np.int64) if rule is None else rule.homes[layer]
        node_of = home if rule is None else np.ascontiguousarray(rule.node_of, dtype=np.int64)
        arrays = [numbers, np.ascontiguousarray(state.unit[layer]), np.ascontiguousarray(self._fixed[layer]),
                  state.table[layer], np.ascontiguousarray(state.was_here[layer]), home, node_of, log,
                  gains]  # fmt: skip
        assert state.table[layer].flags.c_contiguous
        assert state.table.dtype == np.int32
        assert home.flags.c_contiguous
        assert home.dtype == np.int64
        sizes = [state.unit.shape[1], num_ranks, slots, self._num_heavy, state.min_replicas, budget, max_edits]
        most = slots if state.max_rank_moves is None else state.max_rank_moves
        kind = 0 if rule is None else 1 + rule.singles
        call = np.array([*sizes, kind, most, *(array.ctypes.data for array in arrays)], dtype=np.int64)
        done = self._edit(call.ctypes.data)
        if done < 0:
            raise MemoryError("no memory to edit a placement")
        return log[:done], gains[:done]


def edits_within(log: EditLog, start: Ints, weight: Floats, most: int) -> Ints:
    """Returns how many edits of each layer to keep, [L], so that all of them make at most `most` moves together.

    The gains of a layer's first n edits over their moves are a curve. Of its upper concave hull, the steepest pieces of
    all layers are taken first, until the moves are spent.

    start:  [L] moves before the first edit, which count
    weight: [L] what a gain of a layer counts, e.g. its mean rank load in tokens
    """
    keep: Ints = np.zeros(len(start), dtype=np.int64)
    pieces: list[tuple[float, int, int, int]] = []  # price, layer, moves, edits at its end
    for layer in range(len(start)):
        rows = np.flatnonzero(log.layer == layer)
        moves = np.concatenate([start[layer : layer + 1], log.moves[rows]])
        gain = np.cumsum(np.concatenate([[0.0], weight[layer] * log.gain[rows]]))
        at = 0
        while at < len(rows):
            dearer = moves[at + 1 :] - moves[at]
            price = np.where(dearer > 0, (gain[at + 1 :] - gain[at]) / np.maximum(dearer, 1), np.inf)
            end = at + len(price) - int(price[::-1].argmax())  # the last of equal ones
            pieces.append((float(price.max()), layer, int(moves[end] - moves[at]), end))
            at = end
    left = most - int(start.sum())
    stopped = np.zeros(len(start), dtype=bool)
    for _, layer, num_moves, end in sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[3])):
        if stopped[layer] or num_moves > max(left, 0):
            stopped[layer] = True
            continue
        keep[layer] = end
        left -= num_moves
    return keep


def replay_edits(table: Ids, log: EditLog, keep: Ints) -> None:
    """Makes the first keep[l] edits of each layer, in place: table [L, R, K]."""
    done = np.zeros(len(keep), dtype=np.int64)
    for layer, slot, other, expert in zip(log.layer, log.slot, log.other, log.expert, strict=True):
        if done[layer] == keep[layer]:
            continue
        done[layer] += 1
        row = table[layer].reshape(-1)
        if expert < 0:
            row[[slot, other]] = row[[other, slot]]
        else:
            row[slot] = expert
