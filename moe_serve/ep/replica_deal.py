"""How replicas share a batch, in C: the same integers as the torch forms of LayerReplicas, sooner.

Twenty small torch calls cost more than a decode step's rows take to travel. Never required: without a compiler, and on
accelerators, the torch form serves.
"""

from pathlib import Path

import torch
from torch import Tensor

from moe_serve.c_library import load_c_library
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

_SOURCE = Path(__file__).with_name("replica_deal.c")
_FUNCTIONS = {"count_ids": 4, "deal_evenly": 7, "fill_shares": 7}


class ReplicaDeal:
    """Deals the batches of one layer. Reads tables where they lie, so it follows a new placement by itself."""

    def __init__(self, tables: dict[str, Tensor], layer_row: int, num_ranks: int):
        """tables: as in LayerReplicas, CPU. Raises ConfigError where no library can be had."""
        self._library, _ = load_c_library(_SOURCE, _FUNCTIONS)
        self._tables = tables  # held, since the library has their addresses
        num_logical, most = tables["slots"].shape[0] - 1, tables["slots"].shape[1]
        self._shape = num_ranks, num_logical, tables["logical"].shape[0]
        parts = [tables[name] for name in ("slots", "count", "logical", "ordinal")]
        assert all(part.is_contiguous() for part in parts), "addresses of rows that lie apart would be wrong"
        places = [part.data_ptr() for part in parts]
        self._facts = torch.tensor([*self._shape, most, layer_row, 0, *places], dtype=torch.int64)
        self._rank = self._facts[5:6].numpy()
        self._scratch = torch.empty(num_logical + self._shape[2], dtype=torch.int64)
        self._facts_at, self._scratch_at = self._facts.data_ptr(), self._scratch.data_ptr()

    def count(self, topk_ids: Tensor) -> Tensor:
        """Returns how many ids name each expert: [T, K] int64, -1 = none -> [E] int64."""
        ids = topk_ids.contiguous()
        counts = torch.empty(self._shape[1], dtype=torch.int64)
        self._library.count_ids(ids.data_ptr(), ids.numel(), self._shape[1], counts.data_ptr())
        return counts

    def deal(self, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Same contract as LayerReplicas.split_evenly."""
        ids, counts = topk_ids.contiguous(), counts.contiguous()
        physical = torch.empty_like(ids)
        slot_counts = torch.empty(self._shape[0], self._shape[2], dtype=torch.int64)
        self._rank[0] = rank
        self._library.deal_evenly(
            self._facts_at, ids.data_ptr(), ids.numel(), counts.data_ptr(), physical.data_ptr(), slot_counts.data_ptr(),
            self._scratch_at,
        )  # fmt: skip
        return physical, slot_counts

    def fill(self, topk_ids: Tensor, shares: Tensor) -> Tensor:
        """Returns physical ids [T, K]: tokens of an expert, in order, fill its slots. shares: [P] of this rank"""
        ids, shares = topk_ids.contiguous(), shares.contiguous()
        physical = torch.empty_like(ids)
        self._library.fill_shares(
            self._facts_at, ids.data_ptr(), ids.numel(), shares.data_ptr(), physical.data_ptr(), self._scratch_at,
            self._scratch_at + 8 * self._shape[2],
        )  # fmt: skip
        return physical


def make_deal(tables: dict[str, Tensor], layer_row: int, num_ranks: int) -> ReplicaDeal | None:
    """Returns the C form for one layer, or None where it cannot be built."""
    try:
        return ReplicaDeal(tables, layer_row, num_ranks)
    except ConfigError as error:
        get_logger(__name__).debug("replicas share batches by torch: %s", error)
        return None
