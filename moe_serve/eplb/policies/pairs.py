"""Searches placements with two slots per rank: breaks ranks and pairs their replicas anew, counts included.

Single edits get stuck with two slots per rank: one more replica of a heavy expert fits nowhere until many ranks change
partners. So some ranks are *broken*: their replicas go into a pool, replica counts change within the pool, and the pool
is paired anew, heaviest beside lightest. With the size of a replica = exp(steepness x load), a rank's peak is the
product of its two sizes, and no pairing has a smaller sum of products (rearrangement inequality): the search over
placements is one over broken ranks and counts alone. A pair of the pool can nearly always go to a rank that had one of
its two experts, so a broken rank costs one move, which `price` weighs.

The search anneals one layer at a time. A proposal breaks a rank, mends one (it gets its old pair back), does both, or
turns a replica of the pool into one of another expert. It is accepted when the sum of peaks, plus the price of broken
ranks, rises by less than a random threshold that cools down. Where an expert's count changes, the ranks that keep it
change too. A plan from nothing (`search_counts`) is the same search with all ranks broken from the start: only counts
are left to change. `search_pairs` is the plain form of pairs.c: the same draws, sums in the same order and ties, so the
same result to the bit.

Shape words: L = layers, R = ranks, E = experts; expert E is an empty slot.
"""

import ctypes
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from math import inf
from operator import add, mul
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import find_c_library
from moe_serve.eplb.placement import count_arrivals
from moe_serve.eplb.policies.anew import greedy_table
from moe_serve.eplb.policies.packing import minimax_counts, replicas_in
from moe_serve.eplb.policies.problem import Ids, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_THRESHOLDS = 4096
# Minus the logarithm of evenly spread numbers: what temperature x it allows is Metropolis' rule.
THRESHOLDS: Floats = -np.log((np.arange(NUM_THRESHOLDS) + 0.5) / NUM_THRESHOLDS)
LARGE_CHANGE = 1e6  # of the sum of whole ranks' peaks, after which it is added up anew
_MASK = 2**64 - 1
_SOURCE = Path(__file__).with_name("pairs.c")
# A fused multiply-add rounds once where the plain form rounds twice.
_FLAGS = ("-ffp-contract=off",)
LARGEST_EXPONENT = 330.0  # of a size: products of two, and sums of these, stay finite
MORE_REPLICAS = 4  # than minimax replication gives, at most
STEPS_PER_RANK, MOST_STEPS = 420, 60_000
ATTEMPTS = 3  # of a search whose placement breaks a limit; each begins with another seed
PLAIN_STEPS = 10_000  # without a compiler: 0.1 s a layer
COUNT_STEPS, PLAIN_COUNT_STEPS = 32_000, 4_000  # of a plan from nothing; three in four cost next to nothing
COUNT_STEEPNESS = 150.0  # of the smooth maximum, per load of the heaviest rank of minimax replication
COUNT_TEMPERATURES = (0.1, 1e-4)
_Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class PairRules:
    """The limits and the aim of a search of some layers.

    room:      [L] moves that a layer may make beside those its legal start has made
    steepness: of the smooth maximum, per top load: that of the heaviest rank of a fresh plan
    risk:      a replica of load x counts as x + risk x^2, as if loads were to drift: two replicas of half the load are
               safer than one
    price:     of a move, in ranks as heavy as the top load
    """

    room: Ints
    steepness: float
    risk: float
    price: float


@dataclass(frozen=True, eq=False)
class PairLayer:
    """One layer as the search sees it.

    table:  [R, 2] int64, the placement to edit, no rank with an expert twice
    start, values: values[start[e] + c] is the size of one replica of expert e with c replicas; values[start[E]] that of
            an empty slot, which is the last
    least, most: [E] of c
    """

    table: Ints
    start: Ints
    values: Floats
    least: Ints
    most: Ints


@dataclass(frozen=True)
class Effort:
    """The effort of a search.

    max_broken:       ranks that may be broken at a time
    price:            of a broken rank, in peaks
    steps:            proposals in all
    seed:             > 0
    all_broken:       all ranks are broken from the start, and stay so: the pool is the whole placement
    hottest, coldest: the first and the last temperature, in peaks
    blocks:           temperatures; each holds for steps // blocks proposals
    """

    max_broken: int
    price: float
    steps: int
    seed: int
    all_broken: bool = False
    hottest: float = 1.0
    coldest: float = 0.03
    blocks: int = 64

    @property
    def temperatures(self) -> Floats:
        return np.geomspace(self.hottest, self.coldest, self.blocks)


def edit_pairs(problem: Problem, table: Ids, layers: Ints, rules: PairRules) -> bool:
    """Edits these layers of a legal table [L, R, 2] in place; they have load. Returns whether the deadline passed.

    A layer keeps its table where no better one within its room, and `max_rank_moves`, is found.
    """
    assert problem.current is not None
    library = find_library()
    fresh = greedy_table(problem)
    minimax = minimax_counts(problem.weight, problem.num_slots, problem.num_ranks, problem.fixed, problem.min_replicas)
    steps = min(STEPS_PER_RANK * problem.num_ranks, MOST_STEPS if library is not None else PLAIN_STEPS)
    for layer in layers.tolist():
        if problem.deadline.passed:
            return True
        searched = _layer(problem, layer, table[layer], _top_load(problem, layer, fresh[layer]), minimax[layer], rules)
        moved = count_arrivals(problem.current[layer][None], table[layer][None])[0]
        most = np.maximum(moved, 2 if problem.request.max_rank_moves is None else problem.request.max_rank_moves)
        allowed = min(int(rules.room[layer]), problem.num_ranks)
        for attempt in range(ATTEMPTS):
            effort = Effort(allowed, rules.price, steps, _seed(problem.request.seed, layer, attempt))
            broken, pool = _search(library, searched, effort)
            pool = np.where(pool == problem.weight.shape[1], -1, pool)
            new = place_pairs(
                table[layer],
                problem.current[layer],
                broken,
                pool,
                one_each=problem.request.max_rank_moves == 1 and attempt == ATTEMPTS - 1,
            )
            arrived = count_arrivals(problem.current[layer][None], new[None])[0]
            over = max(int(arrived.sum() - moved.sum() - rules.room[layer]), int((arrived > most).sum()))
            if over <= 0:
                if _top_load(problem, layer, new) <= _top_load(problem, layer, table[layer]):
                    table[layer] = new
                break
            allowed = max(0, allowed - over)  # a few pairs found neither of their experts' old ranks free
    return False


def search_counts(problem: Problem, table: Ids) -> tuple[Ints, bool]:
    """Returns replica counts [L, E] whose best packing is light, and whether the deadline cut the search short.

    table: [L, R, 2], minimax replication packed: where the search begins

    Minimax replication makes the heaviest replica light. With two slots per rank, though, what a heavy replica shares
    its rank with matters more: often it is better to split a small expert, whose halves then sit beside heavy ones.
    """
    library, num_experts = find_library(), problem.weight.shape[1]
    counts = replicas_in(table, num_experts)
    rules = PairRules(np.zeros(len(table), dtype=np.int64), COUNT_STEEPNESS, 0.0, 0.0)
    for layer in range(len(table)):
        if problem.deadline.passed:
            return counts, True
        top = _top_load(problem, layer, table[layer])
        if top <= 0:
            continue
        searched = _layer(problem, layer, table[layer], top, counts[layer], rules)
        effort = Effort(
            problem.num_ranks,
            0.0,
            COUNT_STEPS if library is not None else PLAIN_COUNT_STEPS,
            _seed(problem.request.seed, layer, 0),
            True,
            *COUNT_TEMPERATURES,
        )
        pool = _search(library, searched, effort)[1]
        counts[layer] = np.bincount(pool, minlength=num_experts + 1)[:num_experts]
    return counts, False


def _layer(problem: Problem, layer: int, table: Ids, top: float, minimax: Ints, rules: PairRules) -> PairLayer:
    """Returns what the search sees: sizes are such that the peak of a rank with the top load is about 1.

    No expert may lose more than half of its replicas, so that the largest size is known. Where even that would be too
    large, as with a hot expert that has one replica, the layer is planned with a less steep maximum.
    """
    num_experts = len(minimax)
    count = replicas_in(table[None], num_experts)[0]
    least = np.maximum((count + 1) // 2, problem.min_replicas)
    most = np.minimum(np.maximum(count, minimax) + MORE_REPLICAS, problem.num_ranks)
    start = np.concatenate([[0], np.cumsum(most + 1)])
    expert = np.repeat(np.arange(num_experts), most + 1)
    share = problem.weight[layer][expert] / top / np.maximum(np.arange(start[-1]) - start[expert], least[expert])
    own = 0.0 if problem.fixed is None else problem.fixed[layer][expert] / top
    load = np.append(share * (1 + rules.risk * np.minimum(share, 1.0)) + own, 0.0)
    steepness = min(rules.steepness, LARGEST_EXPONENT / load.max())
    values = np.exp(steepness * (load - 0.5 * (1 + 0.7 * rules.risk)))
    return PairLayer(np.where(table < 0, num_experts, table).astype(np.int64), start, values, least, most)


def _top_load(problem: Problem, layer: int, table: Ids) -> float:
    """Returns the load of the heaviest rank, without risk."""
    weight = problem.weight[layer]
    own = 0.0 if problem.fixed is None else problem.fixed[layer]
    each = np.append(weight / np.maximum(replicas_in(table[None], len(weight))[0], 1) + own, 0.0)
    return float(each[table].sum(axis=1).max())  # -1: the 0 at the end


def _seed(seed: int, layer: int, attempt: int) -> int:
    """Returns a positive number below 2^63, by splitmix."""
    mixed = (seed * 3 + attempt + 1) * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9 & 2**64 - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return (mixed ^ mixed >> 31) >> 1 | 1


def _search(library: ctypes.CDLL | None, layer: PairLayer, effort: Effort) -> tuple[Ints, Ints]:
    return search_pairs(layer, effort) if library is None else search_pairs_compiled(library, layer, effort)


def search_pairs(layer: PairLayer, effort: Effort) -> tuple[Ints, Ints]:
    """Returns the broken ranks [B] and the pool for them [2 B], heaviest first: the best state that was seen."""
    search = _Search(layer, effort)
    for rank in range(len(search.table)) if effort.all_broken else ():
        search.move_ranks(rank, None, inf)
    best = search.whole + search.paired + effort.price * search.num_broken
    found = search.order[: search.num_broken], search.experts
    random = _draws(effort.seed)
    for temperature in effort.temperatures.tolist():
        for _ in range(effort.steps // effort.blocks):
            first, second = next(random), next(random)
            limit = temperature * search.thresholds[second & (NUM_THRESHOLDS - 1)]
            whole = search.whole
            if not search.propose(first, second, limit):
                continue
            if abs(search.whole - whole) > LARGE_CHANGE:
                search.whole = search.sum_whole()
            now = search.whole + search.paired + effort.price * search.num_broken
            if now < best:
                best, found = now, (search.order[: search.num_broken], search.experts)
    return np.array(found[0], dtype=np.int64), np.array(found[1], dtype=np.int64)


def _draws(state: int) -> Iterator[int]:
    """Yields xorshift's 64-bit numbers."""
    while True:
        state ^= state << 13 & _MASK
        state ^= state >> 7
        state ^= state << 17 & _MASK
        yield state


def _below(random: int, n: int) -> int:
    return (random >> 32) * n >> 32


class _Search:
    """The state of a search.

    whole, paired: sum of the peaks of whole ranks, and of the pool's pairs
    order, num_broken: all ranks, the broken ones first; place_of: the index of each rank in it
    count, pooled: [E + 1] replicas, and those in the pool; value: [E + 1] size of one replica now
    experts, falling: the pool, heaviest first, and minus its sizes
    """

    def __init__(self, layer: PairLayer, effort: Effort):
        self.layer, self.effort, self.thresholds = layer, effort, THRESHOLDS.tolist()
        self.table: list[list[int]] = layer.table.tolist()
        self.start = layer.start.tolist()
        self.least, self.most = layer.least.tolist(), layer.most.tolist()
        self.values: list[float] = layer.values.tolist()
        self.empty = len(self.most)
        self.count = np.bincount(layer.table.ravel(), minlength=self.empty + 1).tolist()
        self.pooled = [0] * (self.empty + 1)
        self.value: list[float] = [self.values[self.start[e] + self.count[e]] for e in range(self.empty)]
        self.value.append(self.values[self.start[self.empty]])
        self.holders: list[list[int]] = [[] for _ in range(self.empty + 1)]
        for rank, pair in enumerate(self.table):
            for expert in pair:
                self.holders[expert].append(rank)
        self.order, self.place_of = list(range(len(self.table))), list(range(len(self.table)))
        self.num_broken = 0
        self.experts: list[int] = []
        self.falling: list[float] = []
        self.whole, self.paired = self.sum_whole(), 0.0

    def peak(self, rank: int) -> float:
        one, other = self.table[rank]
        return self.value[one] * self.value[other]

    def sum_whole(self) -> float:
        """Returns the sum of the peaks of whole ranks; changes of it leave an error where they are much larger."""
        return reduce(add, (self.peak(r) for r in range(len(self.table)) if self.place_of[r] >= self.num_broken), 0.0)

    def partner(self, rank: int, expert: int) -> int:
        one, other = self.table[rank]
        return other if one == expert else one

    def propose(self, first: int, second: int, limit: float) -> bool:
        """Draws a proposal and makes it if the objective rises by at most the limit. Returns whether it was made."""
        num_ranks, kind, broken = len(self.table), first & 7, self.num_broken
        whole = num_ranks - broken
        if kind < 5 and not self.effort.all_broken:
            if (kind != 3 and broken == 0) or (kind != 4 and whole == 0):
                return False
            if kind == 3 and broken >= self.effort.max_broken:
                return False
            mended = None if kind == 3 else self.order[_below(first, broken)]
            return self.move_ranks(None if kind == 4 else self.order[broken + _below(second, whole)], mended, limit)
        rank = None
        if not self.effort.all_broken and (kind == 5 or broken == 0):
            if broken >= self.effort.max_broken or whole == 0:
                return False
            rank = self.order[broken + _below(first, whole)]
            giver = self.table[rank][first >> 3 & 1]
        else:
            giver = self.experts[_below(first, len(self.experts))]
        if first >> 4 & 1:
            taker = _below(second, self.empty)
        else:  # one of the heavier of two ranks
            one, two = _below(second, num_ranks), _below(second * 0x9E3779B97F4A7C15 & _MASK, num_ranks)
            if self.effort.all_broken:  # a rank is a pair of the pool
                pairs = [(i, len(self.experts) - 1 - i) for i in (one, two)]
                peaks = [self.falling[i] * self.falling[j] for i, j in pairs]
                taker = self.experts[pairs[0 if peaks[0] > peaks[1] else 1][first >> 5 & 1]]
            else:
                taker = self.table[one if self.peak(one) > self.peak(two) else two][first >> 5 & 1]
        if taker in (giver, self.empty) or self.count[taker] >= self.most[taker]:
            return False
        if giver != self.empty and self.count[giver] <= self.least[giver]:
            return False
        return self.change_counts(rank, taker, giver, limit)

    def move_ranks(self, broken: int | None, mended: int | None, limit: float) -> bool:
        """Breaks one rank and mends another, or one of the two."""
        change, entries = 0.0, []
        gone: dict[int, int] = {}
        old_pair = [] if mended is None else self.table[mended]
        if mended is not None:
            if any(self.pooled[e] < old_pair.count(e) for e in old_pair):
                return False
            if broken is None and not self._fits_without(old_pair):
                return False
            change += self.peak(mended)
            for expert in old_pair:
                gone[expert] = gone.get(expert, 0) + 1
        if broken is not None:
            room = self.num_broken + (mended is None)
            for expert in self.table[broken]:
                if expert < self.empty and self.pooled[expert] - (expert in old_pair) >= room:
                    return False
                entries.append((expert, 1, self.value[expert]))
            change -= self.peak(broken)
        experts, falling, paired = self._rebuilt(entries, gone)
        if change + (paired - self.paired) + self.effort.price * ((broken is not None) - (mended is not None)) > limit:
            return False
        self.experts, self.falling, self.paired = experts, falling, paired
        self.whole += change
        if mended is not None:
            self._mend(mended)
        if broken is not None:
            self._break(broken)
        return True

    def change_counts(self, broken: int | None, taker: int, giver: int, limit: float) -> bool:
        """Breaks a rank (None: does not), then turns a replica of giver in the pool into one of taker."""
        more = self.values[self.start[taker] + self.count[taker] + 1]
        fewer = self.value[giver] if giver == self.empty else self.values[self.start[giver] + self.count[giver] - 1]
        takers, givers = self.pooled[taker] + 1, self.pooled[giver] - 1
        change, entries = 0.0, []
        if broken is not None:
            other = self.partner(broken, giver)
            if other == taker or (other < self.empty and self.pooled[other] > self.num_broken):
                return False
            change -= self.peak(broken)
            givers += 1 + (other == giver)
            if other != giver:
                entries.append((other, 1, self.value[other]))
        if takers > self.num_broken + (broken is not None):
            return False
        if givers > 0:
            entries.append((giver, givers, fewer))
        entries.append((taker, takers, more))
        gone = {taker: self.pooled[taker], giver: self.pooled[giver]}
        experts, falling, paired = self._rebuilt(entries, gone)
        for rank in self.holders[taker]:
            if self.place_of[rank] >= self.num_broken and rank != broken:
                other = self.partner(rank, taker)
                if other == giver:
                    change += more * fewer - self.value[taker] * self.value[giver]
                else:
                    change += self.value[other] * (more - self.value[taker])
        for rank in self.holders[giver] if giver != self.empty else ():
            if self.place_of[rank] >= self.num_broken and rank != broken:
                other = self.partner(rank, giver)
                if other != taker:
                    change += self.value[other] * (fewer - self.value[giver])
        if change + (paired - self.paired) + self.effort.price * (broken is not None) > limit:
            return False
        self.experts, self.falling, self.paired = experts, falling, paired
        self.whole += change
        if broken is not None:
            self._break(broken)
        for expert, step, value in ((giver, -1, fewer), (taker, 1, more)):
            self.pooled[expert] += step
            self.count[expert] += step
            self.value[expert] = value
        return True

    def _rebuilt(
        self, entries: list[tuple[int, int, float]], gone: dict[int, int]
    ) -> tuple[list[int], list[float], float]:
        """Returns the pool without gone[e] replicas of each expert, with (expert, number, size) entries; its sum."""
        experts, falling = self.experts.copy(), self.falling.copy()
        for expert, number in gone.items():
            if number:  # all replicas of an expert have one size, though others may have it too
                at = bisect_left(falling, -self.value[expert])
                for _ in range(number):
                    at = experts.index(expert, at)
                    del experts[at], falling[at]
        for expert, number, size in sorted(entries, key=lambda entry: -entry[2]):
            stay = self.pooled[expert] - gone.get(expert, 0)
            at = experts.index(expert) if stay > 0 else bisect_right(falling, -size)
            experts[at:at] = [expert] * number
            falling[at:at] = [-size] * number
        half = len(falling) // 2
        peaks = list(map(mul, falling[:half], falling[: half - 1 : -1]))
        sums = [reduce(add, peaks[lane::4], 0.0) for lane in range(4)]  # as C adds them
        return experts, falling, (sums[0] + sums[1]) + (sums[2] + sums[3])

    def _fits_without(self, pair: list[int]) -> bool:
        """Returns whether every expert of the pool, without this pair, can be on different ranks of one fewer."""
        return all(self.pooled[e] - (e in pair) <= self.num_broken - 1 for e in self.experts if e != self.empty)

    def _break(self, rank: int) -> None:
        for expert in self.table[rank]:
            self.pooled[expert] += 1
        self._set_place(rank, self.num_broken)
        self.num_broken += 1

    def _mend(self, rank: int) -> None:
        for expert in self.table[rank]:
            self.pooled[expert] -= 1
        self.num_broken -= 1
        self._set_place(rank, self.num_broken)

    def _set_place(self, rank: int, place: int) -> None:
        other, old = self.order[place], self.place_of[rank]
        self.order[old], self.place_of[other] = other, old
        self.order[place], self.place_of[rank] = rank, place


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns pairs.c, built where no earlier build is found; None, said once, where it cannot be built."""
    otherwise = "plans for two slots per rank are searched by Python, with less effort"
    return find_c_library(_SOURCE, {"search_pairs": 1}, otherwise, _FLAGS)


def search_pairs_compiled(library: ctypes.CDLL, layer: PairLayer, effort: Effort) -> tuple[Ints, Ints]:
    """Same contract as `search_pairs`, and the same result to the bit."""
    num_ranks, num_experts = len(layer.table), len(layer.most)
    broken, pool = np.empty(num_ranks, dtype=np.int64), np.empty(2 * num_ranks, dtype=np.int64)
    numbers = np.empty(8 * num_ranks + 3 * (num_experts + 1), dtype=np.int64)
    room = np.empty(4 * num_ranks + num_experts + 1)
    reals = layer.values, effort.temperatures, THRESHOLDS, np.array([effort.price])
    arrays: list[NDArray[np.number]] = [
        np.ascontiguousarray(a) for a in (layer.table, layer.start, layer.least, layer.most)
    ]
    arrays += [np.ascontiguousarray(array) for array in reals]
    arrays += [broken, pool, numbers, room]
    task = np.array(
        [
            num_ranks, num_experts, effort.max_broken, effort.all_broken, effort.blocks, effort.steps // effort.blocks,
            effort.seed, *(array.ctypes.data for array in arrays),
        ],
        dtype=np.int64,
    )  # fmt: skip
    num_broken = library.search_pairs(task.ctypes.data)
    return broken[:num_broken], pool[: 2 * num_broken]


def place_pairs(table: Ids, current: Ids, broken: Ints, pool: Ints, one_each: bool = False) -> Ids:
    """Returns the table [R, 2] of one layer with the pool [2 B], heaviest first, on the broken ranks [B].

    A pair of the pool and a broken rank fit if the rank holds one of the pair's experts in the placement in use; then
    it receives the other one only. The most pairs that can have such a rank each are found by augmenting paths. The few
    ranks left over receive two experts; where they may not, one of these trades places with an expert of about the same
    load.

    table, current: [R, 2] to edit, and in use
    pool:           ids, -1 = an empty slot; an expert at most B times
    one_each:       trade experts where a rank would receive two, as far as that is possible
    """
    pairs, held = _pairs_of(pool.tolist()), {r: set(current[r].tolist()) - {-1} for r in broken.tolist()}
    rank_of = _ranks_that_hold(pairs, held)
    left = sorted(held.keys() - set(rank_of.values()))
    out = table.copy()
    for index, pair in enumerate(pairs):
        out[rank_of[index] if index in rank_of else left.pop()] = pair
    if one_each:
        _trade(out, held, pool.tolist())
    return out


def _trade(table: Ids, held: dict[int, set[int]], pool: list[int]) -> None:
    """Lets ranks that receive two experts trade one, in place, with a rank where both then receive at most one.

    held: what each broken rank holds in the placement in use. Of all trades the one between the closest places in the
    pool, whose loads differ least. A rank without such a trade stays as it is.
    """
    place = {expert: i for i, expert in enumerate(pool)}

    def fits(rank: int, pair: set[int]) -> bool:
        return len(pair - held[rank] - {-1}) < 2

    for rank in held:
        pair = table[rank].tolist()
        if fits(rank, set(pair)):
            continue
        trades = []
        for other in held:
            theirs = table[other].tolist()
            for mine, given in ((i, j) for i in range(2) for j in range(2)):
                kept, their_kept = pair[1 - mine], theirs[1 - given]
                if theirs[given] == kept >= 0 or pair[mine] == their_kept >= 0:
                    continue  # an expert twice on one rank
                if fits(rank, {kept, theirs[given]}) and fits(other, {their_kept, pair[mine]}):
                    distance = abs(place[pair[mine]] - place[theirs[given]])
                    trades.append((distance, other, mine, given))
        if trades:
            _, other, mine, given = min(trades)
            table[rank, mine], table[other, given] = table[other, given], table[rank, mine]


def _pairs_of(pool: list[int]) -> list[_Pair]:
    """Returns the heaviest beside the lightest, and so on; a pair of one expert trades with the nearest that can."""
    half = len(pool) // 2
    first, second = pool[:half], pool[: half - 1 : -1]
    for i in range(half):
        if first[i] == second[i] >= 0:
            others = [j for j in range(half) if second[i] not in (first[j], second[j])]
            nearest = min(others, key=lambda j: abs(j - i))
            second[i], second[nearest] = second[nearest], second[i]
    return list(zip(first, second, strict=True))


def _ranks_that_hold(pairs: list[_Pair], held: dict[int, set[int]]) -> dict[int, int]:
    """Returns a rank that holds one of its experts for as many pairs as possible; for those with both, such a rank."""
    holders = defaultdict(list)
    for rank, experts in held.items():
        for expert in experts:
            holders[expert].append(rank)
    fitting = [list(dict.fromkeys([*holders[one], *holders[other]])) for one, other in pairs]
    rank_of: dict[int, int] = {}
    taken: dict[int, int] = {}  # rank -> pair
    for index, pair in enumerate(pairs):
        for same in [r for r in fitting[index] if held[r] == set(pair) and r not in taken][:1]:
            rank_of[index], taken[same] = same, index
    unchanged = set(taken)
    for index in range(len(pairs)):
        if index in rank_of:
            continue
        came_by: dict[int, int] = {}  # rank -> the pair that would move to it
        queue = deque([index])
        while queue:
            mover = queue.popleft()
            free: int | None = None
            for rank in fitting[mover]:
                if rank in came_by or rank in unchanged:
                    continue
                came_by[rank] = mover
                if rank not in taken:
                    free = rank
                    break
                queue.append(taken[rank])
            if free is not None:
                _move_along(free, came_by, rank_of, taken)
                break
    return rank_of


def _move_along(rank: int | None, came_by: dict[int, int], rank_of: dict[int, int], taken: dict[int, int]) -> None:
    """Moves every pair on the way to a free rank: each to the rank that the one before it leaves."""
    while rank is not None:
        mover = came_by[rank]
        rank_of[mover], taken[rank], rank = rank, mover, rank_of.get(mover)
