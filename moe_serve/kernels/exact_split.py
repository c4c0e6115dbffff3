"""The exact per-batch split on the device: how many tokens of a replicated expert each of its replicas serves.

The method is that of eplb/split/exact.py, cut to what one small kernel can do in a bounded time:
1. each replicated expert, most tokens first, is water-filled over the ranks that hold it, `sweeps` times;
2. the bound is ceil(total / ranks). While the heaviest rank is above it, look for a path of experts along which tokens
   can leave it. None: the ranks reached can lose nothing, which proves ceil(their load / their number) as the new
   bound. Found: push tokens along it;
3. the heaviest rank at the bound is the proof that the split is optimal. After max_pushes pushes the kernel stops; such
   a batch has a legal split without proof, and is counted as that, never as exact.
Whole numbers and fixed ties only, so all ranks get the same split from the same counts.

Shape words: E = num_logical, R = num_ranks, P = num_slots, N = experts that live on two or more ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PROVEN, REPAIRED, UNPROVEN = 0, 1, 2  # outcomes: optimal at once, optimal after repair, not proven
SWEEPS = 2  # on synthetic drifting loads 2 left 30 % of the batches to pushes, 4 left 17 %, at twice the time
MAX_PUSHES = 32


@dataclass(frozen=True)
class SplitTable:
    """One layer's replicas.

    fixed_slot:   [E] int64, slot of an expert that lives on one rank only, else -1
    experts:      [N] int64, ids of the replicated experts, ascending; -1 = unused row
    replica_slot: [N, R] int64, lowest slot of that expert on that rank, -1 = none
    num_slots:    P
    """

    fixed_slot: Tensor
    experts: Tensor
    replica_slot: Tensor
    num_slots: int

    @property
    def num_ranks(self) -> int:
        return self.replica_slot.shape[1]


def exact_split_reference(
    counts: Tensor, table: SplitTable, sweeps: int = SWEEPS, max_pushes: int = MAX_PUSHES
) -> tuple[Tensor, int]:
    """counts: [E] int64, sum below 2^31 -> (tokens of each slot [P] int64, outcome).

    Tokens of an expert without a slot are dropped.
    """
    num_ranks, slots_per_rank = table.num_ranks, table.num_slots // table.num_ranks
    experts, replica_slot = table.experts.tolist(), table.replica_slot.tolist()
    load, live = [0] * num_ranks, [False] * num_ranks
    slot_tokens = [0] * table.num_slots
    for expert, slot in enumerate(table.fixed_slot.tolist()):
        if slot >= 0:
            slot_tokens[slot] = int(counts[expert])
            load[slot // slots_per_rank] += slot_tokens[slot]
            live[slot // slots_per_rank] = True
    held = [[slot >= 0 for slot in row] for row in replica_slot]
    live = [live[r] or any(row[r] for row in held) for r in range(num_ranks)]
    tokens = [int(counts[expert]) if expert >= 0 else 0 for expert in experts]
    given = [[0] * num_ranks for _ in experts]
    for _ in range(sweeps):
        for i in sorted(range(len(experts)), key=lambda i: -tokens[i]):
            _water_fill(tokens[i], held[i], load, given[i])

    bound = -(-sum(load) // max(1, sum(live)))
    pushes = 0
    while max(load) > bound:
        reached, via = _search(load.index(max(load)), bound, load, given, held)
        target = next((r for r in range(num_ranks) if reached[r] and load[r] < bound), -1)
        if target < 0:
            members = [r for r in range(num_ranks) if reached[r]]
            bound = -(-sum(load[r] for r in members) // len(members))
        elif pushes == max_pushes:
            break
        else:
            _push(target, bound, load, given, via)
            pushes += 1
    for i, row in enumerate(replica_slot):
        for r, slot in enumerate(row):
            if slot >= 0:
                slot_tokens[slot] = given[i][r]
    outcome = UNPROVEN if max(load) > bound else REPAIRED if pushes else PROVEN
    return torch.tensor(slot_tokens), outcome


def _water_fill(tokens: int, held: list[bool], load: list[int], given: list[int]) -> None:
    """Takes an expert's tokens off its ranks and gives them back where the load is lowest."""
    for r in range(len(load)):
        load[r] -= given[r]
        given[r] = 0
    filled = [r for r in range(len(load)) if held[r]]
    while filled:
        level, extra = divmod(tokens + sum(load[r] for r in filled), len(filled))
        if all(load[r] <= level for r in filled):
            break
        filled = [r for r in filled if load[r] <= level]
    for position, r in enumerate(filled):
        given[r] = level + (position < extra) - load[r]
        load[r] += given[r]


def _search(
    source: int, bound: int, load: list[int], given: list[list[int]], held: list[list[bool]]
) -> tuple[list[bool], list[tuple[int, int]]]:
    """Returns which ranks tokens of `source` can reach, level by level until one below the bound is among them, and for
    each how: (expert, rank that gives)."""
    num_ranks = len(load)
    reached, via = [r == source for r in range(num_ranks)], [(-1, -1)] * num_ranks
    while not any(reached[r] and load[r] < bound for r in range(num_ranks)):
        # The giver of an expert is the lowest reached rank that has tokens of it; a rank is reached by its lowest
        # expert.
        givers = [next((r for r in range(num_ranks) if reached[r] and given[i][r] > 0), -1) for i in range(len(given))]
        found = False
        before = list(reached)
        for r in range(num_ranks):
            by = next((i for i in range(len(given)) if held[i][r] and givers[i] >= 0), -1)
            if not before[r] and by >= 0:
                reached[r], via[r], found = True, (by, givers[by]), True
        if not found:
            break
    return reached, via


def _push(target: int, bound: int, load: list[int], given: list[list[int]], via: list[tuple[int, int]]) -> None:
    """Moves as many tokens along the path to `target` as it carries and both ends want."""
    path, rank = [], target
    while via[rank][0] >= 0:
        expert, giver = via[rank]
        path.append((expert, giver, rank))
        rank = giver
    amount = min(load[rank] - bound, bound - load[target], *(given[expert][giver] for expert, giver, _ in path))
    load[rank] -= amount
    load[target] += amount
    for expert, giver, taker in path:
        given[expert][giver] -= amount
        given[expert][taker] += amount
