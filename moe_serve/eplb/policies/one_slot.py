"""One slot per rank: a rank's load is that of its only replica, so all that matters is how many replicas an expert has.

The counts with the lightest heaviest replica are many; those nearest to the counts in use are found exactly, so a plan
moves no expert that does not make the heaviest replica lighter.

Shape words: L = layers, R = ranks that take part, E = experts.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import minimax_counts, replicas_in
from moe_serve.eplb.policies.problem import Floats, Ids, Problem

Ints = NDArray[np.int64]


def edit_one_slot(problem: Problem, max_moves: int | None = None, slack: float = 0.0) -> Ids:
    """Returns the table [L, R, 1] that has the lightest heaviest replica within max_moves, with the fewest moves.

    The heaviest replica only gets lighter when its expert gets one more, and a slot costs least where the expert that
    gives it up stays lightest. So one loop does both: the expert with the heaviest replica takes a slot (an empty one,
    else that of the best giver) until no giver stays lighter than it. After m moves no counts that are m moves away
    have a lighter heaviest replica, and at the end no counts at all have: every expert that took a slot must have it at
    any lower maximum, and givers were taken in the order in which a lower maximum rules them out.

    max_moves: of each layer; None = any number
    slack:     a layer is done when its balancedness is within this share of the best; 0 = it goes to the best
    Experts with fewer than min_replicas replicas in use get these first, even beyond max_moves.
    """
    assert problem.current is not None
    assert problem.slots_per_rank == 1
    slots = problem.current[:, :, 0]
    enough = _heaviest_allowed(problem, slack) if slack > 0 else np.zeros(len(slots))
    wanted = nearest_counts(
        problem.weight,
        replicas_in(problem.current, problem.weight.shape[1]),
        (slots < 0).sum(axis=1),
        enough,
        problem.num_slots if max_moves is None else max_moves,
        problem.fixed,
        problem.min_replicas,
    )
    return np.stack([_give_slots(row, counts) for row, counts in zip(slots, wanted, strict=True)])[:, :, None]


def nearest_counts(
    weight: Floats,
    counts: Ints,
    num_empty: Ints,
    enough: Floats,
    max_moves: int,
    fixed: Floats | None = None,
    min_replicas: int = 1,
) -> Ints:
    """Returns the counts [L, E] with the lightest heaviest replica that are at most max_moves slots from these.

    weight:    [L, E] load that an expert's replicas share;  fixed: [L, E] cost of each replica on its own, or None
    counts:    [L, E] replicas in use;  num_empty: [L] slots without an expert
    enough:    [L] a heaviest replica of at most this is not made lighter
    Among equally light ones, those with the fewest moves. Ties go to the lower expert id.
    """
    counts = counts.copy()
    own = np.zeros(weight.shape) if fixed is None else fixed
    best, best_top = counts.copy(), np.full(len(counts), np.inf)
    active, spare, moved = np.arange(len(counts)), num_empty.copy(), np.zeros(len(counts), dtype=np.int64)
    while len(active):
        count, share, cost = counts[active], weight[active], own[active]
        row = np.arange(len(active))
        missing = count < min_replicas
        load = np.where(missing, np.inf, share / np.maximum(count, 1) + cost)
        taker = load.argmax(axis=1)
        top = load[row, taker]
        forced = np.isinf(top)
        better = ~forced & (top < best_top[active])
        best[active[better]], best_top[active[better]] = count[better], top[better]
        after = np.where(count > min_replicas, share / np.maximum(count - 1, 1) + cost, np.inf)
        giver = after.argmin(axis=1)
        takes_empty = spare[active] > 0
        gains = takes_empty | (after[row, giver] < top)
        going = forced | (gains & (share[row, taker] > 0) & (top > enough[active]) & (moved[active] < max_moves))
        rows, gives = active[going], ~takes_empty[going]
        counts[rows, taker[going]] += 1
        counts[rows[gives], giver[going][gives]] -= 1
        spare[rows[~gives]] -= 1
        moved[rows] += 1
        active = rows
    return best


def _heaviest_allowed(problem: Problem, slack: float) -> Floats:
    """Returns the load of a heaviest replica at which a layer is done, [L]."""
    counts = minimax_counts(problem.weight, problem.num_slots, problem.num_ranks, problem.fixed, problem.min_replicas)
    load = problem.weight / counts + (0.0 if problem.fixed is None else problem.fixed)
    top: Floats = load.max(axis=1) / (1.0 - slack)
    return top


def _give_slots(slots: Ids, wanted: Ints) -> Ids:
    """Returns the slots [R] of one layer after a change to these counts [E], with as few changes as that takes."""
    num_experts = len(wanted)
    by_expert = np.argsort(slots, kind="stable")
    sorted_ids = slots[by_expert]
    place = np.arange(len(slots)) - np.searchsorted(sorted_ids, sorted_ids)  # the i-th replica of its expert
    stays = np.zeros(len(slots), dtype=bool)
    stays[by_expert] = (sorted_ids >= 0) & (place < wanted[np.maximum(sorted_ids, 0)])
    out = slots.copy()
    arriving = np.repeat(
        np.arange(num_experts), np.maximum(wanted - np.bincount(slots[stays], minlength=num_experts), 0)
    )
    # Slots that experts gave up come before empty ones, some of which may stay empty.
    free = np.flatnonzero(~stays)
    free = free[np.argsort(slots[free] < 0, kind="stable")][: len(arriving)]
    out[free] = arriving
    return out
