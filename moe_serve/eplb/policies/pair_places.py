"""Puts the pool of a search onto its broken ranks: heaviest beside lightest, no expert twice, few experts received.

A pair of the pool and a broken rank fit if the rank holds one of the pair's experts in the placement in use; then it
receives the other one only. The most pairs that can have such a rank each are found by augmenting paths. The few ranks
left over receive two experts; where they may not, one of these trades places with an expert of about the same load.
"""

from collections import defaultdict, deque

from moe_serve.eplb.policies.pair_search import Ints
from moe_serve.eplb.policies.problem import Ids

_Pair = tuple[int, int]


def place_pairs(table: Ids, current: Ids, broken: Ints, pool: Ints, one_each: bool = False) -> Ids:
    """Returns the table [R, 2] of one layer with the pool [2 B], heaviest first, on the broken ranks [B].

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
