"""Edits a placement for the exact split: replicas that link the heaviest ranks to the lightest ones.

The exact split shifts tokens from rank to rank through experts that both hold. What it leaves above the mean are ranks
whose experts have no replica on a light rank, and the even loads that other edits level (`single_edits.py`) say little
about them. So every edit is judged by the split itself: an expert with many tokens on a heavy rank gets a replica on a
light one, over the replica there that serves least, or trades places with the expert there that serves least. Of these
edits the one stays that lowers the heaviest rank most per move, mean over sampled batches under a fractional split. The
batches of every plan deviate alike from its load, so that plans for the same load find nothing more to do.

`edit_layer_reference` is the plain form of links.c: sums in the same order and ties, so the same edits.

Shape words: L = layers, B = batches, R = ranks, K = slots per rank, P = R x K, E = experts.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import UNFUSED, find_c_library, processor_flags
from moe_serve.eplb.policies.edits import EditState
from moe_serve.eplb.policies.objectives import TOKENS_PER_RANK
from moe_serve.eplb.policies.packing import Deadline
from moe_serve.eplb.policies.problem import Floats
from moe_serve.eplb.policies.single_edits import LEAST_RATE, EditGoal, EditLog
from moe_serve.eplb.split.fractions import level_ranks, shape_words

Ints = NDArray[np.int64]
_Lines = tuple[Ints, Floats]
LINK_MIN_GAIN = 1e-3  # per move, in mean rank loads; smaller gains are noise of the sampled batches
LINK_TARGET = 0.995  # mean rank load / heaviest rank's at which a layer needs no edits
NUM_HEAVY, NUM_LIGHT, NUM_EACH = 2, 3, 2  # ranks, and experts of a heavy rank, that an edit may link; 16 at most
NUM_BATCHES = 6  # with more, plans are a little better and take longer in proportion
_SOURCE = Path(__file__).with_name("links.c")


def deviating_batches(weight: Floats, num_ranks: int, seed: int) -> Floats:
    """Returns batches drawn from the load, in tokens with Poisson's variance: [L, E] -> [L, B, E].

    The draws depend on the seed alone, not on the load, other than those of `objectives.sample_batches`.
    """
    total = weight.sum(axis=1, keepdims=True)
    mean = weight / np.where(total > 0, total, 1.0) * num_ranks * TOKENS_PER_RANK
    deviation = np.random.default_rng(seed).standard_normal((len(weight), NUM_BATCHES, weight.shape[1]))
    batches: Floats = np.maximum(mean[:, None] + np.sqrt(mean)[:, None] * deviation, 0.0)
    return batches


def edit_links(state: EditState, batches: Floats, goal: EditGoal, deadline: Deadline) -> tuple[EditLog, bool]:
    """Edits the tables in place; no edit makes the heaviest rank heavier, mean over batches.

    batches: [L, B, E] tokens;  goal: its target is mean rank load / heaviest rank's, mean over batches
    Returns the edits, and whether the deadline ended them.
    """
    library = find_library()
    mean = batches.sum(axis=2, keepdims=True) / state.table.shape[1]
    load = np.ascontiguousarray(batches / np.where(mean > 0, mean, 1.0))
    made: list[_Lines] = []
    for layer in range(len(load)):
        if deadline.passed:
            break
        if library is None:
            made.append(edit_layer_reference(state, load[layer], goal, layer))
        else:
            made.append(_edit_layer_compiled(library, state, load[layer], goal, layer))
    state.refresh()
    lines = np.concatenate([np.empty((0, 4), dtype=np.int64), *(line for line, _ in made)])
    layer_of = np.repeat(np.arange(len(made)), [len(line) for line, _ in made])
    gains = np.concatenate([np.empty(0), *(gain for _, gain in made)])
    slot, other, expert, moves = lines.T
    return EditLog(layer_of, slot, other, expert, moves, gains), len(made) < len(load)


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns links.c, or None where it cannot be built, which the log says once."""
    otherwise = "plans for the exact split are edited by Python, some hundred times slower"
    return find_c_library(_SOURCE, {"edit_links": 1}, otherwise, (*processor_flags(), UNFUSED))


def _edit_layer_compiled(library: ctypes.CDLL, state: EditState, load: Floats, goal: EditGoal, layer: int) -> _Lines:
    """Same contract as `edit_layer_reference`."""
    table = state.table[layer]
    num_ranks, slots = table.shape
    lines, gains = np.empty((goal.max_edits, 4), dtype=np.int64), np.empty(goal.max_edits)
    numbers = np.array([goal.target[layer], max(goal.min_gain, LEAST_RATE)])
    arrays = [numbers, load, table, np.ascontiguousarray(state.was_here[layer]), lines, gains]
    assert table.flags.c_contiguous
    assert table.dtype == np.int32
    most = slots if state.max_rank_moves is None else state.max_rank_moves
    shape = shape_words(load.shape[1], num_ranks, slots)
    sizes = [len(load), state.min_replicas, goal.budget[layer], goal.max_edits, most]
    tries = [NUM_HEAVY, NUM_LIGHT, NUM_EACH]
    call = np.array([*shape, *sizes, *tries, *(array.ctypes.data for array in arrays)], dtype=np.int64)
    done = library.edit_links(call.ctypes.data)
    if done < 0:
        raise MemoryError("no memory to edit a placement")
    return lines[:done], gains[:done]


def edit_layer_reference(state: EditState, load: Floats, goal: EditGoal, layer: int) -> _Lines:
    """Edits one layer of the state's table in place; `refresh` the state afterwards.

    load: [B, E] in mean rank loads
    Returns one line for each edit, [n, 4] (slot, other slot, expert or -1 for a swap, moves so far), and gains [n].
    """
    table = _Table(state, layer)
    lines: list[tuple[int, int, int, int]] = []
    gains: list[float] = []
    batches = load.tolist()
    while len(lines) < goal.max_edits:
        levelled = _level_table(table, batches)
        if levelled.top * float(goal.target[layer]) <= 1.0:
            break
        best, moves = _Edit(max(goal.min_gain, LEAST_RATE)), table.num_moves
        for slot, other, expert in _edits_of(table, levelled):
            with_edit = table.edited(slot, other, expert)
            if with_edit.num_moves > max(goal.budget[layer], moves) or with_edit.overloads(table):
                continue
            cost = with_edit.num_moves - moves
            gain = levelled.top - _level_table(with_edit, batches).top
            rate = gain / (cost if cost > 0 else 0.25)  # free ones count as a quarter of a move
            if rate > best.rate * (1.0 + 1e-9):
                best = _Edit(rate, gain, (slot, other, expert))
        if best.gain <= 0:
            break
        table = table.edited(*best.made)
        lines.append((*best.made, table.num_moves))
        gains.append(best.gain)
    state.table[layer] = np.array(table.ids).reshape(state.table[layer].shape)
    return np.array(lines, dtype=np.int64).reshape(-1, 4), np.array(gains)


@dataclass(frozen=True)
class _Edit:
    rate: float
    gain: float = 0.0
    made: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class _Levelled:
    """A table under the split, means over batches. top: of the heaviest rank;  rank, slot: [R], [P]"""

    top: float
    rank: list[float]
    slot: list[float]


class _Table:
    """One layer's table, as lists."""

    def __init__(self, state: EditState, layer: int, ids: list[int] | None = None) -> None:
        self._state, self._layer = state, layer
        self.num_ranks, self.slots = state.table.shape[1:]
        self.ids: list[int] = state.table[layer].ravel().tolist() if ids is None else ids
        self.slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(self.ids):
            if expert >= 0:
                self.slots_of.setdefault(expert, []).append(slot)
        was = state.was_here[layer]
        self.moves = [sum(e >= 0 and not was[r, e] for e in self.on(r)) for r in range(self.num_ranks)]
        self.num_moves = sum(self.moves)

    def on(self, rank: int) -> list[int]:
        return self.ids[rank * self.slots : (rank + 1) * self.slots]

    def may_lose(self, expert: int) -> bool:
        return len(self.slots_of[expert]) > self._state.min_replicas

    def edited(self, slot: int, other: int, expert: int) -> "_Table":
        ids = self.ids.copy()
        if expert < 0:
            ids[slot], ids[other] = ids[other], ids[slot]
        else:
            ids[slot] = expert
        return _Table(self._state, self._layer, ids)

    def overloads(self, before: "_Table") -> bool:
        """Whether a rank that is to receive more than before receives more than it may."""
        most = self._state.max_rank_moves
        return most is not None and any(n > max(most, old) for n, old in zip(self.moves, before.moves, strict=True))


def _edits_of(table: _Table, levelled: _Levelled) -> Iterable[tuple[int, int, int]]:
    """Yields (slot, other slot, expert or -1 for a swap) of the edits to try."""
    lightest = _largest([-load for load in levelled.rank], NUM_LIGHT)
    for heavy in _largest(levelled.rank, NUM_HEAVY):
        first = heavy * table.slots
        for each in _largest(levelled.slot[first : first + table.slots], NUM_EACH):
            expert = table.ids[first + each]
            for light in lightest:
                if expert < 0 or light == heavy or expert in table.on(light):
                    continue
                own = range(light * table.slots, (light + 1) * table.slots)
                empty = [slot for slot in own if table.ids[slot] < 0]
                spare = empty[:1] or [slot for slot in own if table.may_lose(table.ids[slot])]
                here = empty[:1] or [slot for slot in own if table.ids[slot] not in table.on(heavy)]
                if spare:
                    slot = min(spare, key=levelled.slot.__getitem__)
                    yield slot, slot, expert
                if here:
                    yield first + each, min(here, key=levelled.slot.__getitem__), -1


def _largest(values: list[float], number: int) -> list[int]:
    """Returns the ids of the largest values; of equal ones the first."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:number]


def _level_table(table: _Table, batches: Sequence[list[float]]) -> _Levelled:
    """Returns the loads that the split leaves."""
    top, rank, slot = 0.0, [0.0] * table.num_ranks, [0.0] * len(table.ids)
    for load in batches:
        total, own = level_ranks(table.ids, load, table.num_ranks)
        top += max(total)
        rank = [mean + each / len(batches) for mean, each in zip(rank, total, strict=True)]
        slot = [mean + each / len(batches) for mean, each in zip(slot, own, strict=True)]
    return _Levelled(top / len(batches), rank, slot)
