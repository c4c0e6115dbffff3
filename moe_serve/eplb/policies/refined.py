"""The default policy: minimax replication, packing, swaps; with few slots per rank, a search over counts too."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.anew import finish_anew, first_packing
from moe_serve.eplb.policies.edits import EditState
from moe_serve.eplb.policies.hierarchy import has_single_homes, plan_by_node, read_homes
from moe_serve.eplb.policies.legal import HomeRule, Ints
from moe_serve.eplb.policies.objectives import best_for_exact_split, improve_locality
from moe_serve.eplb.policies.packing import (
    apportion,
    balancedness_bound,
    lightest_top,
    list_replicas,
    pack_in_rounds,
    pack_longest_first,
    repair_duplicates,
    replica_load,
    replicas_in,
    swap_until_even,
)
from moe_serve.eplb.policies.pairs import search_counts
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, part_of, problem_of
from moe_serve.eplb.policies.single_edits import (
    MIN_GAIN,
    SMALL_SLACK,
    STEEPNESS,
    EditGoal,
    balance_reached,
    edit_layers,
)

MOST_EDITS = 1000  # of a layer under a hierarchy
_EVEN = 0.999  # balancedness at which annealing leaves a layer alone, as it does where no placement can be better
_REPLICAS_PER_ROUND = 10_000  # of all trials of a round of annealing; sets the number of chains
_AT_THE_BOUND = 1e-4  # a heaviest rank this share above what is proved is not worth a search
# (rounding, power) of `apportion` that win on Zipf and lognormal loads where minimax (0, 1) does not.
_APPORTIONMENTS = (
    (0.0, 0.85),
    (0.25, 0.85),
    (0.75, 0.7),
    (0.75, 1.0),
    (1.0, 0.85),
    (0.5, 1.15),
    (0.0, 0.7),
    (0.5, 0.7),
)
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RefinedPolicy:
    """The best placement for a load; the one in use matters only for which rank gets what (`anew.py`).

    sweeps:      rounds of swaps, at most
    tolerance:   swaps end when the heaviest rank is this share above the mean
    rounds:      of annealing, for problems of up to 128 slots
    good_enough: layers within this share of their bound are left as they are
    """

    sweeps: int = 90
    tolerance: float = 7e-4
    rounds: int = 50
    good_enough: float = 0.995
    name: str = "refined"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the refined plan. It ignores all limits of moves; use `incremental` for that."""
        problem = problem_of(request)
        if not problem.is_global:
            table, homes, truncated = plan_by_node(problem, self.sweeps // 2)
            if not truncated:
                table, homes, truncated = _edited_to_the_end(problem, table, homes)
            return finish_anew(problem, table, truncated, homes)
        table, truncated = self.table(problem)
        if request.planned_split == "exact" and problem.fixed is None and not truncated:
            table = best_for_exact_split(problem, table, self.sweeps)
        table = improve_locality(problem, table, 200)
        return finish_anew(problem, table, truncated, for_split=True)

    def table(self, problem: Problem) -> tuple[Ids, bool]:
        """Returns the table [L, R, K] without node hierarchy, and whether the deadline cut the search short."""
        table, packed = first_packing(problem)
        if problem.slots_per_rank == 1:
            return table, False  # nothing to pack: minimax replication is the optimum
        if problem.slots_per_rank == 2 and problem.num_spare == 0 and problem.min_replicas == 1:
            return table, False  # nothing to choose: the lightest expert beside the heaviest is the optimum
        truncated = problem.slots_per_rank > 2 and swap_until_even(
            table, packed, self.sweeps, self.tolerance, problem.deadline
        )
        if problem.slots_per_rank <= 4 and not truncated:
            truncated = self._search_counts(problem, table, packed)
        if problem.num_slots <= 128 and not truncated:
            truncated = _anneal_counts(problem, table, self.rounds)
        return table, truncated

    def _search_counts(self, problem: Problem, table: Ids, packed: Floats) -> bool:
        """Replaces, in place, layers for which other counts are better. Returns whether the deadline passed."""
        reached = _mean_over_max(packed)
        bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
        rows = np.flatnonzero(reached < self.good_enough * bound)
        if len(rows) == 0:
            return False
        part = part_of(problem, rows)
        truncated = False
        top = packed[rows].sum(axis=2).max(axis=1)
        if problem.slots_per_rank == 2:
            counts, truncated = search_counts(part, table[rows])
            candidates = iter([(*_pack_pairs(part, counts), truncated)])
        elif problem.fixed is None:
            candidates = _try_apportionments(part, self.sweeps)
        else:
            return False
        for other, other_load, cut in candidates:
            truncated |= cut
            other_top = other_load.sum(axis=2).max(axis=1)
            better = other_top < top
            table[rows[better]], packed[rows[better]] = other[better], other_load[better]
            top = np.minimum(top, other_top)
        return truncated


def _edited_to_the_end(problem: Problem, table: Ids, homes: Ints) -> tuple[Ids, Ints, bool]:
    """Returns the table and homes after all edits that gain anything, and whether the deadline ended them.

    Replicas of other nodes' experts, and single experts that change nodes, even out what packing node by node cannot.
    With the same load, `incremental` then finds nothing left to do.
    """
    mean = problem.weight.sum(axis=1, keepdims=True) / problem.num_ranks
    mean = np.where(mean > 0, mean, 1.0)
    fixed = None if problem.fixed is None else problem.fixed / mean
    nowhere = np.zeros((len(table), problem.num_ranks, problem.weight.shape[1]), dtype=bool)  # so no edit is a move
    state = EditState(problem.weight / mean, table.copy(), nowhere, STEEPNESS, fixed, problem.min_replicas)
    rule = HomeRule(homes.copy(), problem.node_of, problem.request.off_home, has_single_homes(problem))
    bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
    everything = np.full(len(table), problem.num_slots)
    before = balance_reached(state)
    goal = EditGoal(bound * (1 - SMALL_SLACK), everything + 1, MIN_GAIN, MOST_EDITS)
    _, truncated = edit_layers(state, goal, rule, problem.deadline)
    better = balance_reached(state) >= before
    table, homes = np.where(better[:, None, None], state.table, table), np.where(better[:, None], rule.homes, homes)
    return table, read_homes(problem, table) if rule.singles else homes, truncated


def _mean_over_max(packed: Floats) -> Floats:
    load = packed.sum(axis=2)
    top = load.max(axis=1)
    return np.where(top > 0, load.mean(axis=1) / np.where(top > 0, top, 1.0), 1.0)


def _anneal_counts(problem: Problem, table: Ids, rounds: int) -> bool:
    """Improves the table [L, R, K] in place, a layer only by a better one; returns whether the deadline ended it.

    Anneals replica counts with a full packing for every trial: the thorough search for few slots.

    Each layer has several independent chains. A trial moves one or two replicas between experts, packs, swaps, and is
    kept unless it is much worse; the tolerance shrinks from round to round. Larger problems get fewer chains, so that a
    round costs about the same: small problems are searched nearly to the optimum, large ones only a little.
    """
    num_layers, num_ranks, slots = table.shape
    weight, fixed, num_slots = problem.weight, problem.fixed, num_ranks * slots
    num_experts = weight.shape[1]
    chains = int(np.clip(_REPLICAS_PER_ROUND // max(1, num_layers * num_slots), 1, 48))
    limits = (problem.min_replicas, num_ranks)
    draw = np.random.default_rng(problem.request.seed)
    top_of = _tops(weight, table, fixed)
    mean = weight.sum(axis=1) / num_ranks + (0.0 if fixed is None else fixed.sum(axis=1) / num_ranks)
    lightest = lightest_top(weight, num_ranks, slots, fixed, problem.min_replicas) * (1 + _AT_THE_BOUND)
    counts = np.repeat(replicas_in(table, num_experts), chains, axis=0)
    current = np.repeat(top_of, chains)
    for step in range(rounds):
        if problem.deadline.passed:
            return True
        going = np.flatnonzero((top_of * _EVEN > mean) & (top_of > lightest))
        if len(going) == 0:
            return False
        rows = (going[:, None] * chains + np.arange(chains)).ravel()
        layer = np.repeat(going, chains)
        tried = _neighbours(counts[rows], weight[layer], limits, num_slots, draw)
        if num_experts <= 8:  # so few counts that random ones find what small steps miss
            dice = rows % 2 == 1
            tried[dice] = _any_counts(int(dice.sum()), num_experts, limits, num_slots, draw)
        own = None if fixed is None else fixed[layer]
        packed, load = _pack(tried, weight[layer], own, num_ranks, slots, slots == 2 and step % 2 == 0, draw)
        top = load.sum(axis=2).max(axis=1)
        patience = 0.06 * (1 - step / rounds) ** 2
        keep = top <= current[rows] * (1 + patience * draw.random(len(rows)))
        counts[rows[keep]], current[rows[keep]] = tried[keep], top[keep]
        by_layer = top.reshape(len(going), chains)
        winner = by_layer.argmin(axis=1)
        value = by_layer[np.arange(len(going)), winner]
        better = value < top_of[going] * (1 - 1e-12)
        chosen = packed.reshape(len(going), chains, num_ranks, slots)[np.arange(len(going)), winner]
        table[going[better]], top_of[going[better]] = chosen[better], value[better]
    return False


def _pack(
    counts: NDArray[np.int64],
    weight: Floats,
    fixed: Floats | None,
    num_ranks: int,
    slots: int,
    in_pairs: bool,
    draw: np.random.Generator,
) -> tuple[Ids, Floats]:
    """Returns the tables [X, R, K] of these counts [X, E] and the load of each slot; in_pairs: two slots per rank."""
    replicas = list_replicas(counts, num_ranks * slots)
    load = replica_load(weight, counts, replicas, fixed)
    if in_pairs:
        # Optimal, unless experts with many replicas had to be kept apart.
        packed, load = pack_in_rounds(replicas, load, num_ranks)
        repair_duplicates(packed, load)
        return packed, load
    # Perturb the loads, so that the same counts get different packings in different trials.
    packed, _ = pack_longest_first(replicas, load * draw.uniform(0.8, 1.25, load.shape), num_ranks)
    load = replica_load(weight, counts, packed, fixed)
    repair_duplicates(packed, load)
    swap_until_even(packed, load, 16, tolerance=1e-4)
    return packed, load


def _neighbours(
    counts: NDArray[np.int64], weight: Floats, limits: tuple[int, int], num_slots: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Returns counts [X, E] with one to three replicas moved between experts, or to or from an empty slot.

    limits: fewest and most replicas of an expert
    """
    min_replicas, max_replicas = limits
    tried = counts.copy()
    rows = np.arange(len(counts))
    num_moves = draw.integers(1, 4, len(counts))
    for step in range(3):
        moving = step < num_moves
        spare = np.where(tried > min_replicas, draw.random(tried.shape), -1.0)
        giver = spare.argmax(axis=1)
        can_give = spare[rows, giver] >= 0
        # Draw takers by a softened replica load: heavy replicas are split more often, but any expert can be.
        wish = draw.random(tried.shape) ** (1.0 / (0.3 + weight / tried / (weight.max(axis=1, keepdims=True) + 1e-300)))
        taker = np.where(tried < max_replicas, wish, -1.0).argmax(axis=1)
        can_take = tried[rows, taker] < max_replicas
        full = tried.sum(axis=1) >= num_slots
        give = moving & can_give & (full | (draw.random(len(counts)) < 0.3))
        tried[rows[give], giver[give]] -= 1
        # One replica fewer can allow a better packing, so a slot may also stay empty.
        take = moving & can_take & (draw.random(len(counts)) < 0.8) & (tried.sum(axis=1) < num_slots)
        tried[rows[take], taker[take]] += 1
    return tried


def _any_counts(
    num_rows: int, num_experts: int, limits: tuple[int, int], num_slots: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Returns counts [num_rows, E] drawn from all that fit the slots and the limits of an expert's replicas."""
    min_replicas, max_replicas = limits
    extra = draw.integers(0, num_slots - num_experts * min_replicas + 1, num_rows)
    share = draw.dirichlet(np.ones(num_experts), num_rows)
    return np.minimum(min_replicas + draw.multinomial(extra, share), max_replicas)


def _tops(weight: Floats, table: Ids, fixed: Floats | None) -> Floats:
    counts = np.maximum(replicas_in(table, weight.shape[1]), 1)
    top: Floats = replica_load(weight, counts, table, fixed).sum(axis=2).max(axis=1)
    return top


def _try_apportionments(problem: Problem, sweeps: int) -> Iterator[tuple[Ids, Floats, bool]]:
    """Yields (table [L, R, K], its loads [L, R, K], deadline passed) for each apportionment of replicas."""
    weight, num_slots = problem.weight, problem.num_slots
    tried: list[Counts] = []
    for rounding, power in _APPORTIONMENTS:
        how = np.full(len(weight), rounding), np.full(len(weight), power)
        counts = apportion(weight, num_slots, problem.num_ranks, *how, problem.min_replicas)
        if any(np.array_equal(counts, other) for other in tried):
            continue  # all are the same where no slot is spare
        tried.append(counts)
        replicas = list_replicas(counts, num_slots)
        load = replica_load(weight, counts, replicas)
        table, packed = pack_longest_first(replicas, load, problem.num_ranks)
        repair_duplicates(table, packed)
        cut = swap_until_even(table, packed, sweeps, deadline=problem.deadline)
        yield table, packed, cut
        if cut:
            return


def _pack_pairs(problem: Problem, counts: Counts) -> tuple[Ids, Floats]:
    """Returns the best packing of these replicas with two slots per rank, free of duplicates."""
    replicas = list_replicas(counts, problem.num_slots)
    load = replica_load(problem.weight, counts, replicas, problem.fixed)
    table, load = pack_in_rounds(replicas, load, problem.num_ranks)
    repair_duplicates(table, load)
    return table, load
