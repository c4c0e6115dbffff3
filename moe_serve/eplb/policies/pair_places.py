"""Puts the pool of a search onto its broken ranks: heaviest beside lightest, no expert twice, few experts received.

A pair of the pool and a broken rank fit if the rank holds one of the pair's experts in the placement in use; then it
receives the other one only. The most pairs that can have such a rank each are found by augmenting paths.
"""

from collections import defaultdict, deque

from moe_serve.eplb.policies.pair_search import Ints
from moe_serve.eplb.policies.problem import Ids

_Pair = tuple[int, int]


def place_pairs(table: Ids, current: Ids, broken: Ints, pool: Ints) -> Ids:
    """Returns the table [R, 2] of one layer with the pool [2 B], heaviest first, on the broken ranks [B].

    table, current: [R, 2] to edit, and in use
    pool:           ids, -1 = an empty slot; an expert at most B times
    """
    pairs, held = _pairs_of(pool.tolist()), {r: set(current[r].tolist()) - {-1} for r in broken.tolist()}
    rank_of = _ranks_that_hold(pairs, held)
    left = sorted(held.keys() - set(rank_of.values()))
    out = table.copy()
    for index, pair in enumerate(pairs):
        out[rank_of[index] if index in rank_of else left.pop()] = pair
    return out


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
