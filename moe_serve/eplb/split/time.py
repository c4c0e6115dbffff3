"""The split of a batch by time: a rank takes as long as it needs to read its experts' weights and compute their rows.

Few tokens of an expert cost the reading of its weights on every rank that gets one of them, so spreading them over
replicas can lengthen a step that it makes even. The exact split counts tokens and cannot see that. With a price per
started replica, the smallest possible largest rank time is NP-hard to find (one replica a rank is makespan scheduling),
so this split searches, and bounds what is left:

1. Whole experts: in descending order of tokens, each to the rank of its replicas that is done first. (LPT)
2. The bound: no split serves an expert in less time than one replica does, so the exact split of these times, which may
   cut them anywhere, takes no longer than any split of tokens. Its certificate is checked as there.
3. While the busiest rank is above the bound: the move of some or all tokens of an expert to another replica that leaves
   the two ranks earliest, or, where none helps, the exchange of two experts.
4. The same search from the exact split of tokens, which is better for large batches. The better of the two serves.

Whole numbers only, every tie broken by index, as in exact.py; split.c holds the same steps.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.split.exact import (
    PROVEN,
    UNPROVEN,
    ExactResult,
    ExactSplit,
    is_proven,
    level,
    send_short,
    split_exact,
)
from moe_serve.eplb.split.layer import Int64s, LayerSlots, ReplicaGraph
from moe_serve.errors import ConfigError, TraceError

Floats = NDArray[np.float64]
_TICKS = 16  # of the time that a row takes where rows are many
MAX_WEIGHT_ROWS = 2048
_LARGEST_ROWS = 2**27  # beyond, the weights do not count
_FLOPS_PER_BYTE = 5.0  # of one CPU core: what it computes while it reads a byte of weights from memory


@dataclass(frozen=True)
class ExpertTime:
    """The time that a rank takes for an expert's rows, in sixteenths of the time of one row among many.

    Reading overlaps computing in part, so the two add like the sides of a right angle, as in the cost model's GEMMs.

    weight_rows: rows that are computed in the time that the expert's weights are read
    tile_rows:   rows are computed in tiles of this many
    Raises ConfigError for numbers out of range.
    """

    weight_rows: int
    tile_rows: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.weight_rows <= MAX_WEIGHT_ROWS or self.tile_rows < 1:
            raise ConfigError(
                f"weight_rows is {self.weight_rows} and tile_rows {self.tile_rows}; give 0 to {MAX_WEIGHT_ROWS}, and "
                "at least 1"
            )

    @classmethod
    def of_cpu(cls, bytes_per_expert: int, parameters: int) -> "ExpertTime":
        """Returns the times on a CPU core, from an expert's sizes alone: the same on all ranks."""
        return cls(round(bytes_per_expert * _FLOPS_PER_BYTE / (2 * parameters)))

    @classmethod
    def from_event(cls, name: str, fields: Mapping[str, Any]) -> "ExpertTime":
        """Returns the times in an event of a trace. Raises TraceError where they are no whole numbers."""
        weight_rows, tile_rows = fields.get("weight_rows"), fields.get("tile_rows")
        if not isinstance(weight_rows, int) or not isinstance(tile_rows, int):
            raise TraceError(
                f"event {name} has weight_rows {weight_rows!r} and tile_rows {tile_rows!r}; expected whole numbers"
            )
        return cls(weight_rows, tile_rows)

    def ticks(self, rows: int) -> int:
        """Returns the time of this many rows of one expert; 0 for none."""
        if rows == 0:
            return 0
        rows = -(-rows // self.tile_rows) * self.tile_rows
        if rows >= _LARGEST_ROWS:
            return _TICKS * rows
        return isqrt(_TICKS**2 * (rows * rows + self.weight_rows**2))

    def rows_of(self, tokens: NDArray[np.integer]) -> Floats:
        """Returns the time of so many tokens of one expert each, in rows, of any shape; 0 for none."""
        tiles = -(-tokens // self.tile_rows) * self.tile_rows
        return np.where(tokens > 0, np.hypot(tiles, self.weight_rows), 0.0)

    def mean_rows(self, tokens: NDArray[np.number], active: NDArray[np.floating] | None = None) -> Floats:
        """Returns the mean time of an expert's rows in a batch, in rows: what plans balance where the split is by time.

        tokens: [L, E] of a batch on average
        active: [L, E] share of batches in which the expert has some; None = as many as of draws by themselves
        How many an active expert has in a batch is taken as such draws, too: no window says it.
        """
        mean = np.asarray(tokens, dtype=np.float64)
        share = -np.expm1(-mean) if active is None else np.where(mean > 0, active, 0.0)
        of_active = np.maximum(np.divide(mean, share, out=np.ones_like(mean), where=share > 0), 1.0)
        counts, rows = self._active_rows
        many = np.hypot(of_active + (self.tile_rows - 1) / 2, self.weight_rows)
        result: Floats = share * np.where(of_active < counts[-1], np.interp(of_active, counts, rows), many)
        return result

    @cached_property
    def _active_rows(self) -> tuple[Floats, Floats]:
        """Mean tokens of a batch in which an expert has any, ascending from 1, and its mean time then, in rows."""
        # Beyond `most`, draws spread over a tile or more, and over little against their number.
        most = min(max(256, self.tile_rows**2 // 4), 4096)
        draws = most * np.linspace(0, 1, 257)[1:, None] ** 2  # Poisson
        tokens = np.arange(1, most + 8 * isqrt(most) + 16)
        log_chance = tokens * np.log(draws) - draws - np.cumsum(np.log(tokens))
        chance = np.exp(log_chance) / -np.expm1(-draws)  # of so many, where there is one at least
        rows = self.rows_of(tokens)
        return np.append(1.0, chance @ tokens), np.append(rows[0], chance @ rows)


class TimeSplit(ExactSplit):
    """A largest rank time near the smallest possible one. reaches: as of ExactSplit"""

    def __init__(
        self, layer: LayerSlots, reaches: tuple[int, ...], time: ExpertTime, library: ctypes.CDLL | None = None
    ):
        super().__init__(layer, reaches, library, time.weight_rows, time.tile_rows)
        self.name, self._time = "time", time

    def split_plainly(self, counts: Int64s) -> Int64s:
        graph, totals = self._graph, counts.sum(axis=0).tolist()
        by_tokens = split_exact(graph, totals, self._start_of(counts))
        tokens, proven = split_by_time(graph, totals, by_tokens, self._time)
        self.outcomes[PROVEN if proven else UNPROVEN] += 1
        if len(counts) == 1:
            return graph.to_slots(counts, tokens[None])
        return graph.to_slots(counts, send_short(graph, self._reaches, counts[:, graph.experts], tokens))


def split_by_time(
    graph: ReplicaGraph, counts: Sequence[int], by_tokens: ExactResult, time: ExpertTime
) -> tuple[Int64s, bool]:
    """Returns tokens of each replica, [C] int64, and whether no split takes less time. See the module for the method.

    counts:    [E] whole numbers >= 0
    by_tokens: their exact split
    """
    ticks = time.ticks
    fixed = [0] * graph.num_ranks
    slots_per_rank = graph.layer.slots_per_rank
    for slot, tokens in zip(graph.fixed_slot.tolist(), counts, strict=True):
        if slot >= 0:
            fixed[slot // slots_per_rank] += ticks(tokens)
    # Whole experts.
    load, given = list(fixed), [0] * graph.num_replicas
    for i in sorted(range(len(graph.experts)), key=lambda i: -counts[graph.experts[i]]):
        tokens = counts[graph.experts[i]]
        if tokens == 0:
            break
        replicas = range(graph.replica_start[i], graph.replica_start[i + 1])
        first = min(replicas, key=lambda c: load[graph.replica_rank[c]])
        given[first] = tokens
        load[graph.replica_rank[first]] += ticks(tokens)
    # The bound: the exact split of times, from there.
    load_cut, given_cut = list(load), [ticks(tokens) for tokens in given]
    bound, cut, num_pushes = level(graph, load_cut, given_cut)
    at_best = ExactResult(np.array(given_cut), np.array(load_cut), bound, tuple(cut), num_pushes)
    is_bound = is_proven(graph, [ticks(tokens) for tokens in counts], at_best)
    _shorten(graph, load, given, bound, ticks)
    if max(load) > bound:
        other_load, other = list(fixed), by_tokens.replica_tokens.tolist()
        for c, tokens in enumerate(other):
            other_load[graph.replica_rank[c]] += ticks(tokens)
        _shorten(graph, other_load, other, bound, ticks)
        if max(other_load) < max(load):
            load, given = other_load, other
    return np.array(given, dtype=np.int64), is_bound and max(load) == bound


def _shorten(graph: ReplicaGraph, load: list[int], given: list[int], bound: int, ticks: Callable[[int], int]) -> None:
    """Moves tokens off the busiest rank while that helps and the bound is not reached. Changes load and given."""
    replica_rank, replica_start = graph.replica_rank, graph.replica_start
    for _ in range(graph.num_ranks + 2 * graph.num_replicas):  # few are needed; each lowers a largest load
        busiest = max(load)
        if busiest <= bound:
            return
        rank, least, best = load.index(busiest), busiest, (-1, -1, 0, -1, -1, 0)
        held = graph.holder_replica[graph.holder_start[rank] : graph.holder_start[rank + 1]]
        for give in held:
            if given[give] == 0:
                continue
            i, before = graph.owner[give], ticks(given[give])
            for take in range(replica_start[i], replica_start[i + 1]):
                other = load[replica_rank[take]] - ticks(given[take])  # without this expert
                if replica_rank[take] == rank or other >= least:
                    continue
                # The fewest tokens with which the other rank takes as long as this one; one less may be better.
                low, high = 1, given[give]
                while low < high:
                    middle = (low + high) // 2
                    mine = busiest - before + ticks(given[give] - middle)
                    if other + ticks(given[take] + middle) >= mine:
                        high = middle
                    else:
                        low = middle + 1
                for amount in (low, low - 1):
                    mine = busiest - before + ticks(given[give] - amount)
                    peak = max(mine, other + ticks(given[take] + amount))
                    if peak < least and amount:
                        least, best = peak, (give, take, amount, -1, -1, 0)
        if best[0] < 0:
            least, best = _exchange(graph, load, given, rank, ticks)
            if best[0] < 0:
                return
        for give, take, amount in (best[:3], best[3:]):
            if amount:
                for c, change in ((give, -amount), (take, amount)):
                    load[replica_rank[c]] += ticks(given[c] + change) - ticks(given[c])
                    given[c] += change


def _exchange(
    graph: ReplicaGraph, load: list[int], given: list[int], rank: int, ticks: Callable[[int], int]
) -> tuple[int, tuple[int, int, int, int, int, int]]:
    """Returns the best exchange of all that two experts have on the busiest rank and on another, and its peak."""
    replica_rank, replica_start = graph.replica_rank, graph.replica_start
    least, best = load[rank], (-1, -1, 0, -1, -1, 0)
    held = graph.holder_replica[graph.holder_start[rank] : graph.holder_start[rank + 1]]
    for give in held:
        if given[give] == 0:
            continue
        i = graph.owner[give]
        for take in range(replica_start[i], replica_start[i + 1]):
            other = replica_rank[take]
            if other == rank:
                continue
            here = load[rank] - ticks(given[give])
            there = load[other] + ticks(given[take] + given[give]) - ticks(given[take])
            for mine in held:
                j = graph.owner[mine]
                if j == i:
                    continue
                for back in range(replica_start[j], replica_start[j + 1]):
                    if replica_rank[back] != other or given[back] == 0:
                        continue
                    peak = max(here + ticks(given[mine] + given[back]) - ticks(given[mine]), there - ticks(given[back]))
                    if peak < least:
                        least, best = peak, (give, take, given[give], back, mine, given[back])
    return least, best
