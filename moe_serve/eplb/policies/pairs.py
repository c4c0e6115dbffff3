"""Edits a placement with two slots per rank: breaks some ranks and pairs their replicas anew, counts included.

`pair_search.py` says how it is decided; here each layer is made ready for it, and what it found becomes a table.

Shape words: L = layers, R = ranks, E = experts; expert E is an empty slot.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.policies.greedy import greedy_table
from moe_serve.eplb.policies.pair_search import (
    Effort,
    Ints,
    PairLayer,
    find_library,
    search_pairs,
    search_pairs_compiled,
)
from moe_serve.eplb.policies.problem import Ids, Problem, count_arrivals
from moe_serve.eplb.policies.replication import minimax_counts, replicas_in

LARGEST_EXPONENT = 330.0  # of a size: products of two, and sums of these, stay finite
MORE_REPLICAS = 4  # than minimax replication gives, at most
STEPS_PER_RANK, MOST_STEPS = 420, 60_000
ATTEMPTS = 3  # of a search whose placement breaks a limit; each begins with another seed
PLAIN_STEPS = 10_000  # without a compiler: 0.1 s a layer
_Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class PairRules:
    """What a search of some layers has to keep to, and what it aims at.

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
            if library is None:
                broken, pool = search_pairs(searched, effort)
            else:
                broken, pool = search_pairs_compiled(library, searched, effort)
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
