"""A placement: the expert in each slot, for every MoE layer. It knows nothing of loads, weights or networks.

    layer            a MoE layer, one row of every table; moe_layer_ids says which layer of the model it is
    logical expert   an expert of the checkpoint, 0 .. E-1 in every layer
    slot             place for one expert's weights on one rank: slot s is on rank s // slots_per_rank. There are always
                     num_ranks x slots_per_rank of them, and -1 is an empty one, so uneven experts and excluded ranks
                     need no special shape
    physical expert  what a slot holds; its id is the slot's number
    replica          one of an expert's slots, numbered by ascending slot
    redundant        slots beyond one for each expert, which hold further replicas

Two layers of 4 experts on 3 ranks with 2 slots each, 2 of the 6 redundant:

    slot                      0  1   2  3   4  5
    rank                      0  0   1  1   2  2
    physical_to_logical[0]    0  1   2  3   1 -1      expert 1 has replicas in slots 1 and 4, slot 5 is empty
    physical_to_logical[1]    0  1   2  3   0  2      experts 0 and 2 have two replicas each

    replica_count             [[1, 2, 1, 1], [2, 1, 2, 1]]
    logical_to_physical       [[[0, -1], [1, 4], [2, -1], [3, -1]], [[0, 4], [1, -1], [2, 5], [3, -1]]]

Shape words: L = num_layers (MoE layers only), E = num_logical, R = num_ranks, K = slots_per_rank, P = num_slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.errors import PlacementError

Ints = NDArray[np.int32]
Array = TypeVar("Array", bound=NDArray[Any])


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert in every slot of all MoE layers. Read-only; checked when built.

    physical_to_logical: [L, P] int32, logical expert of each slot, -1 = empty slot (a read-only copy is kept)
    num_logical:         E, experts of each layer
    num_ranks:           expert ranks; divides P
    moe_layer_ids:       model layer of each row; () = 0 .. L-1
    version:             counts activations; every migration round has its own
    allow_lost:          True lets experts have no slot at all, as after the loss of a rank; it cannot serve

    Raises PlacementError, naming the argument and the fix.
    """

    physical_to_logical: Ints
    num_logical: int
    num_ranks: int
    moe_layer_ids: tuple[int, ...] = ()
    version: int = 0
    allow_lost: bool = False

    def __post_init__(self) -> None:
        for name in ("num_logical", "num_ranks"):
            value = getattr(self, name)
            if int(value) != value or value < 1:
                raise PlacementError(f"{name} is {value!r}; give a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        table = _checked_table(self.physical_to_logical, self.num_logical, self.num_ranks)
        object.__setattr__(self, "physical_to_logical", table)
        ids = tuple(int(i) for i in self.moe_layer_ids) or tuple(range(len(table)))
        if len(ids) != len(table) or len(set(ids)) != len(ids):
            raise PlacementError(
                f"moe_layer_ids names {len(ids)} layers ({len(set(ids))} different) but physical_to_logical has "
                f"{len(table)} rows; give one model layer id per row"
            )
        object.__setattr__(self, "moe_layer_ids", ids)
        if not self.allow_lost and not self.replica_count.all():
            row, expert = np.argwhere(self.replica_count == 0)[0]
            raise PlacementError(
                f"expert {expert} of row {row} (model layer {ids[row]}) has no slot; every expert needs at least one "
                f"of the {self.num_slots} slots: add it, or take more slots"
            )

    @property
    def num_layers(self) -> int:
        return len(self.physical_to_logical)

    @property
    def num_slots(self) -> int:
        return int(self.physical_to_logical.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def by_rank(self) -> Ints:
        """The experts of each rank's slots, [L, R, K] int32; a view."""
        return self.physical_to_logical.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    @cached_property
    def replica_count(self) -> Ints:
        """The number of slots of each expert, [L, E] int32."""
        return _read_only(count_replicas(self.physical_to_logical, self.num_logical))

    @cached_property
    def max_replicas(self) -> int:
        return int(self.replica_count.max(initial=1))

    @cached_property
    def live_ranks(self) -> NDArray[np.int64]:
        """The ranks that hold an expert, ascending; the others, such as lost ones, take no part."""
        return _read_only(np.flatnonzero((self.by_rank >= 0).any(axis=(0, 2))))

    @cached_property
    def logical_to_physical(self) -> Ints:
        """The slots of each expert in ascending order, [L, E, max_replicas] int32; -1 = no more replicas."""
        table = self.physical_to_logical
        # A stable sort by expert keeps slots ascending inside an expert; empty slots (-1) come first and are dropped.
        order = np.argsort(table, axis=1, kind="stable")
        experts = np.take_along_axis(table, order, axis=1)
        first = np.cumsum(self.replica_count, axis=1) - self.replica_count + (table < 0).sum(axis=1)[:, None]
        rows, columns = np.nonzero(experts >= 0)
        ids = experts[rows, columns]
        out = np.full((self.num_layers, self.num_logical, self.max_replicas), -1, dtype=np.int32)
        out[rows, ids, columns - first[rows, ids]] = order[rows, columns]
        return _read_only(out)

    @cached_property
    def num_duplicates(self) -> NDArray[np.int64]:
        """The number of slots that repeat an expert of their rank, [L] int64."""
        by_rank = np.sort(self.by_rank, axis=2)
        repeated = (by_rank[:, :, 1:] == by_rank[:, :, :-1]) & (by_rank[:, :, 1:] >= 0)
        return _read_only(repeated.sum(axis=(1, 2)))

    def without_ranks(self, rank_ids: Iterable[int]) -> tuple["Placement", list[tuple[int, int]]]:
        """Returns the placement with the slots of these ranks emptied, and the experts that lost their last slot.

        Lost experts are (row, expert) pairs, ascending; without any, the placement can go on serving.
        """
        ids = sorted({int(r) for r in rank_ids})
        if any(r < 0 or r >= self.num_ranks for r in ids):
            raise PlacementError(f"rank_ids {ids} leave 0 .. {self.num_ranks - 1}; name ranks of this placement")
        table = self.physical_to_logical.copy()
        table.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)[:, ids] = -1
        left = replace(self, physical_to_logical=table, allow_lost=True)
        lost = [(int(row), int(expert)) for row, expert in np.argwhere(left.replica_count == 0)]
        return left, lost

    @classmethod
    def trivial(
        cls,
        num_layers: int,
        num_logical: int,
        num_ranks: int,
        num_redundant: int = 0,
        moe_layer_ids: tuple[int, ...] = (),
    ) -> Self:
        """Returns experts in order over the ranks, the same in all layers.

        Each rank gets ceil((E + num_redundant) / num_ranks) slots. Experts spread as evenly as they can (a rank with
        fewer has empty slots at its end); redundant slots then take the experts with the fewest replicas, and of these
        one that is half of the ranks away: on another host where ranks of a host are numbered one by one.
        """
        for name, value, least in (
            ("num_layers", num_layers, 0),
            ("num_logical", num_logical, 1),
            ("num_ranks", num_ranks, 1),
            ("num_redundant", num_redundant, 0),
        ):
            if int(value) != value or value < least:
                raise PlacementError(f"{name} is {value!r}; give a whole number of at least {least}")
        slots_per_rank = -(-(num_logical + num_redundant) // num_ranks)
        row = np.full((num_ranks, slots_per_rank), -1, dtype=np.int32)
        small, larger = divmod(num_logical, num_ranks)
        sizes = np.full(num_ranks, small)
        sizes[:larger] += 1
        for rank, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
            row[rank, :size] = np.arange(end - size, end)
        _add_far_replicas(row, sizes, num_logical, num_redundant)
        return cls(np.tile(row.reshape(1, -1), (num_layers, 1)), num_logical, num_ranks, moe_layer_ids)


def count_replicas(table: NDArray[np.integer], num_logical: int) -> Ints:
    """Returns how many slots each expert has: [L, P] (-1 = empty) -> [L, num_logical] int32."""
    num_layers = len(table)
    keys = table.astype(np.int64) + 1 + np.arange(num_layers)[:, None] * (num_logical + 1)
    counts = np.bincount(keys.ravel(), minlength=num_layers * (num_logical + 1))
    return counts.reshape(num_layers, num_logical + 1)[:, 1:].astype(np.int32)


def count_arrivals(old: Ints, new: Ints) -> NDArray[np.int64]:
    """Returns how many experts each rank must receive: old, new [L, R, K] as `Placement.by_rank` -> [L, R] int64."""
    missing = ~(new[:, :, :, None] == old[:, :, None, :]).any(axis=3) & (new >= 0)
    arriving: NDArray[np.int64] = missing.sum(axis=2)
    return arriving


def count_moves(old: Ints, new: Ints) -> NDArray[np.int64]:
    """Returns how many experts the ranks of each layer must receive: old, new [L, R, K] -> [L] int64."""
    arriving: NDArray[np.int64] = count_arrivals(old, new).sum(axis=1)
    return arriving


def _add_far_replicas(row: Ints, filled: NDArray[np.integer], num_logical: int, num_redundant: int) -> None:
    """Puts num_redundant further experts into the free slots of row [num_ranks, slots_per_rank], rank by rank."""
    num_ranks = len(row)
    filled = filled.copy()
    first_rank = np.repeat(np.arange(num_ranks), filled)  # of each expert
    replicas = np.ones(num_logical, dtype=np.int64)
    for _ in range(num_redundant):
        rank = int(np.argmin(filled))  # the emptiest
        ahead = (first_rank - rank) % num_ranks
        # Half of the ranks away at best; of odd numbers of ranks rather one less, so that each rank takes from another.
        order = replicas * (2 * num_ranks + 2) + 2 * np.abs(2 * ahead - num_ranks) + (2 * ahead > num_ranks)
        order[row[rank, : filled[rank]]] = np.iinfo(np.int64).max
        expert = int(order.argmin())
        if filled[rank] == num_logical:
            return  # all ranks hold all experts: leave the other slots empty rather than repeat one
        row[rank, filled[rank]] = expert
        replicas[expert] += 1
        filled[rank] += 1
    assert filled.sum() <= num_ranks * row.shape[1]


def _checked_table(table: ArrayLike, num_logical: int, num_ranks: int) -> Ints:
    array = np.asarray(table)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise PlacementError(
            f"physical_to_logical has shape {array.shape} and dtype {array.dtype}; give integers of shape "
            "[num_moe_layers, num_slots]"
        )
    num_slots = array.shape[1]
    if num_slots == 0 or num_slots % num_ranks:
        raise PlacementError(
            f"physical_to_logical has {num_slots} slots but {num_ranks} ranks need a multiple of {num_ranks}; "
            f"use {max(1, num_slots // num_ranks) * num_ranks} or {(num_slots // num_ranks + 1) * num_ranks}"
        )
    if array.size and (array.min() < -1 or array.max() >= num_logical):
        wrong = array[(array < -1) | (array >= num_logical)][0]
        raise PlacementError(
            f"physical_to_logical holds expert {wrong}; ids are 0 .. {num_logical - 1}, or -1 for an empty slot"
        )
    return _read_only(array.astype(np.int32, copy=True))


def _read_only(array: Array) -> Array:
    array.setflags(write=False)
    return array
