"""Which slot serves a routed token: the tables of a placement, and how replicas share the tokens of a batch.

The tables never change address or shape, so that a new placement is copied over the old one between two steps and
captured graphs stay valid. Every rank computes the same split from the same counts, in integers, without talking.

Shape words: L = MoE layers, E = num_logical, P = num_slots, R = num_ranks, M = most replicas of an expert, P - E + 1.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.exact_shares import ExactShares, make_exact_shares
from moe_serve.ep.replica_deal import ReplicaDeal, make_deal
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError


class ReplicaMap:
    """The tables of all layers of a placement, on the compute device."""

    def __init__(
        self,
        placement: Placement,
        device: torch.device | str = "cpu",
        split: Literal["even", "exact"] = "even",
        compiled: bool = True,
    ):
        """split: how replicas share a batch: "even" deals tokens out in turn, "exact" makes the largest rank load as
        small as it can be (see exact_shares.py); equal on all ranks

        compiled: count and share in C where a compiler is found, on CPUs; the numbers are the same
        """
        self._shape = _shape_of(placement)
        _, num_logical, num_slots, _ = self._shape
        self._room = num_slots - num_logical + 1  # the others need at least one slot each
        tables = _tables(placement, self._room)
        self._tables = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}
        self.version = placement.version
        self._deals = compiled and self._room > 1 and torch.device(device).type == "cpu"
        self._exact: ExactShares | None = None
        if split == "exact" and self._room > 1:
            self._exact = make_exact_shares(placement, torch.device(device))

    @property
    def split_outcomes(self) -> Tensor | None:
        """Returns how many batches the exact split has proven at once, proven after repair, and not proven: [3] int64.

        None where batches are split evenly.
        """
        return None if self._exact is None else self._exact.outcomes

    def activate(self, placement: Placement) -> None:
        """Copies a new placement into the tables. Raises PlacementError when its shape is another one."""
        if _shape_of(placement) != self._shape:
            raise PlacementError(
                f"the new placement has (layers, experts, slots, ranks) {_shape_of(placement)}, serving runs with "
                f"{self._shape}; give a placement of the same shape, or restart with it"
            )
        for name, table in _tables(placement, self._room).items():
            self._tables[name].copy_(torch.from_numpy(table))
        if self._exact is not None:
            self._exact.activate(placement)
        self.version = placement.version

    def layer(self, row: int) -> "LayerReplicas":
        """Returns the tables of one row of the placement: views, which follow `activate`."""
        tables = {name: table[row] for name, table in self._tables.items()}
        deal = make_deal(tables, row, self._shape[3]) if self._deals else None
        return LayerReplicas(tables, row, self._exact, deal)


class LayerReplicas:
    """The choice of replica in one layer."""

    def __init__(
        self,
        tables: dict[str, Tensor],
        layer_row: int,
        exact: ExactShares | None = None,
        deal: ReplicaDeal | None = None,
    ):
        self._slots = tables["slots"]  # [E + 1, M] slots of an expert, ascending, padded with the first; [E] = -1
        self._count = tables["count"]  # [E + 1] replicas; [E] = 1
        self._logical = tables["logical"]  # [P] expert of a slot; E = empty
        self._ordinal = tables["ordinal"]  # [P] which replica of its expert a slot holds
        self._by_expert = tables["by_expert"]  # [P] all slots, by expert, then slot; empty ones last
        self._exact = exact
        self._deal = deal
        self._layer_row = layer_row
        # A fact of the shape, not of the placement: with as many slots as experts nothing can have a replica.
        self.needs_counts = self._slots.shape[1] > 1

    def only_slots(self, topk_ids: Tensor) -> Tensor:
        """Returns the slot of each expert where none has replicas: [T, K] (-1 stays -1)."""
        assert not self.needs_counts, "experts may have replicas: the split needs the counts of all ranks"
        return self._slots[:, 0][topk_ids]  # -1 reads the last row, which holds -1

    def count(self, topk_ids: Tensor) -> Tensor:
        """Returns how many ids name each expert: [T, K] int64, -1 = none -> [E] int64."""
        return count_slots(topk_ids, self._slots.shape[0] - 1) if self._deal is None else self._deal.count(topk_ids)

    def split(self, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Returns physical ids and slot counts, as the map was told to split; see split_evenly for the arguments."""
        if self._exact is not None:
            slot_counts = self._exact.slot_counts(self._layer_row, counts)
            if self._deal is not None:
                return self._deal.fill(topk_ids, slot_counts[rank]), slot_counts
            return self._follow(topk_ids, counts[rank], slot_counts[rank]), slot_counts
        if self._deal is not None:
            return self._deal.deal(topk_ids, counts, rank)
        return self.split_evenly(topk_ids, counts, rank)

    def _follow(self, topk_ids: Tensor, own: Tensor, own_slots: Tensor) -> Tensor:
        """Returns physical ids [T, K]: an expert's tokens, in order, fill its slots in order, each to its share.

        own: [E] tokens of this rank for each expert;  own_slots: [P] how many of them each slot takes
        """
        flat = topk_ids.reshape(-1)
        order = torch.sort(torch.where(flat < 0, own.shape[0], flat), stable=True).indices
        # What is left after all experts is -1, sorted to the end; so the size is known without reading anything back.
        slots = torch.nn.functional.pad(self._by_expert, (0, 1), value=-1)
        shares = torch.cat([own_slots[self._by_expert], flat.shape[0] - own.sum()[None]])
        physical = torch.empty_like(flat)
        physical[order] = slots.repeat_interleave(shares, output_size=flat.shape[0])
        return physical.view(topk_ids.shape)

    def split_evenly(self, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Deals the rows of an expert out to its replicas, one after the other, over all ranks.

        topk_ids: [T, K] int64 logical experts, -1 = none
        counts:   [R, E] int64, rows of each rank for each expert; row `rank` counts topk_ids
        returns:  physical ids [T, K] int64 (-1 stays -1), and the rows of every rank for every slot [R, P] int64

        Row g of an expert, numbered by rank, then token, goes to replica (g + rotation) % replicas: loads differ by one
        at most, and the rotation by expert and layer keeps the odd rows off the lowest slots.
        """
        num_logical = counts.shape[1]
        device = topk_ids.device
        before = counts.cumsum(0) - counts  # [R, E] rows of lower ranks
        rotation = torch.arange(num_logical + 1, device=device) + self._layer_row

        flat = topk_ids.reshape(-1)
        flat = torch.where(flat < 0, num_logical, flat)
        by_expert, order = torch.sort(flat, stable=True)
        own = torch.nn.functional.pad(counts[rank], (0, 1))
        first_row = own.cumsum(0) - own  # where an expert's entries begin when sorted
        global_row = torch.nn.functional.pad(before[rank], (0, 1)) - first_row + rotation
        dealt = (torch.arange(flat.shape[0], device=device) + global_row[by_expert]) % self._count[by_expert]
        physical = torch.empty_like(flat)
        physical[order] = self._slots[by_expert, dealt]

        # Rows g < x with (g + rotation) % m == j are (x + m - 1 - (j - rotation) mod m) div m.
        replicas = self._count[self._logical]
        phase = replicas - 1 - (self._ordinal - rotation[self._logical]) % replicas
        ends = torch.nn.functional.pad(torch.stack([before, before + counts]), (0, 1))[:, :, self._logical]
        dealt_before, dealt_after = (ends + phase).div(replicas, rounding_mode="floor").unbind(0)
        return physical.view(topk_ids.shape), dealt_after - dealt_before


def even_split_reference(
    topk_ids: list[np.ndarray], slots_of: list[list[int]], layer_row: int, num_slots: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns physical ids of every rank and [R, P] counts by dealing rows one at a time; the plain form of the above.

    topk_ids: of each rank, [T, K];  slots_of: slots of each expert, ascending
    """
    dealt = [0] * len(slots_of)
    counts = np.zeros((len(topk_ids), num_slots), dtype=np.int64)
    physical = []
    for rank, ids in enumerate(topk_ids):
        out = np.full(ids.shape, -1, dtype=np.int64)
        for place, expert in np.ndenumerate(ids):
            if expert >= 0:
                slots = slots_of[expert]
                out[place] = slots[(dealt[expert] + expert + layer_row) % len(slots)]
                dealt[expert] += 1
                counts[rank, out[place]] += 1
        physical.append(out)
    return physical, counts


def _shape_of(placement: Placement) -> tuple[int, int, int, int]:
    return placement.num_layers, placement.num_logical, placement.num_slots, placement.num_ranks


def _tables(placement: Placement, room: int) -> dict[str, np.ndarray]:
    """Returns the tables of LayerReplicas for all layers, int64."""
    if not placement.replica_count.all():
        row, expert = np.argwhere(placement.replica_count == 0)[0]
        raise PlacementError(
            f"expert {expert} of row {row} has no slot, so its tokens cannot be served; place every expert"
        )
    num_layers, num_logical, num_slots, _ = _shape_of(placement)
    listed = placement.logical_to_physical.astype(np.int64)
    slots = np.full((num_layers, num_logical + 1, room), -1, dtype=np.int64)
    slots[:, :num_logical] = listed[:, :, :1]
    slots[:, :num_logical, : listed.shape[2]] = np.where(listed < 0, listed[:, :, :1], listed)
    count = np.ones((num_layers, num_logical + 1), dtype=np.int64)
    count[:, :num_logical] = placement.replica_count
    logical = placement.physical_to_logical.astype(np.int64)
    logical = np.where(logical < 0, num_logical, logical)
    ordinal = np.zeros((num_layers, num_slots), dtype=np.int64)
    rows, experts, replicas = np.nonzero(listed >= 0)
    ordinal[rows, listed[rows, experts, replicas]] = replicas
    by_expert = np.argsort(logical, axis=1, kind="stable")
    return {"slots": slots, "count": count, "logical": logical, "ordinal": ordinal, "by_expert": by_expert}
