"""The work of the shared-memory transport on rows: plan, copy, add. Plain numpy and torch; `row_moves_native.py` has
the same in C, for those who have a compiler, with the same bits.

Rows are bytes; a piece is what came from one rank. Shape words as in send_plan.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.dispatch.inbox import Int32Array, Int64Array
from moe_serve.dispatch.send_plan import SendPlan, placed_rows, plan_sends
from moe_serve.kernels.weighted_sum import weighted_sum


class RowMoves(Protocol):
    """What low_latency.py does to rows."""

    def plan(self, physical_ids: Int64Array, num_ranks: int, slots_per_rank: int) -> SendPlan:
        """Returns what goes where; see send_plan.py."""
        ...

    def placed_rows(self, counts: Int64Array) -> Int64Array:
        """Returns where entries go on arrival; see send_plan.py."""
        ...

    def take(self, rows: Tensor, which: Int64Array, out: Tensor) -> None:
        """out[i] = rows[which[i]].  rows: [n, row_bytes] uint8, contiguous;  out: [at least len(which), row_bytes]"""
        ...

    def place(
        self, pieces: Sequence[Tensor], which: Sequence[Int64Array | Int32Array], placed: Int64Array, out: Tensor
    ) -> None:
        """out[placed[e]] = the row of entry e, entries by piece.

        pieces: R of [n_r, row_bytes] uint8, contiguous;  which: R of [M_r], row of its piece for each entry
        placed: [M], a permutation;  out: [M, row_bytes] uint8
        """
        ...

    def weighted_sum(
        self,
        pieces: Sequence[Tensor],
        which: Sequence[Int64Array | None],
        first_entry: Sequence[int],
        home: Int64Array,
        weights: Tensor,
    ) -> Tensor:
        """Returns sum over k, in order, of weights[t, k] x result home[t, k], in fused float32 steps: [T, H].

        pieces:      R of [n_r, H] compute dtype, contiguous
        which:       R of [N_r], row of its piece for each entry of that rank; None: entry after entry
        first_entry: [R + 1] where the entries of each rank begin
        home:        [T, K] entry, -1 = nothing to add;  weights: [T, K] float32, not read there
        """
        ...


class PlainMoves:
    """RowMoves for every machine."""

    def plan(self, physical_ids: Int64Array, num_ranks: int, slots_per_rank: int) -> SendPlan:
        return plan_sends(physical_ids, num_ranks, slots_per_rank)

    def placed_rows(self, counts: Int64Array) -> Int64Array:
        return placed_rows(counts)

    def take(self, rows: Tensor, which: Int64Array, out: Tensor) -> None:
        # On whole words: a gather of 8-byte elements runs at the speed of a copy, one of bytes at a tenth of it.
        rows, out = _words(rows), _words(out)
        torch.index_select(rows, 0, torch.from_numpy(which), out=out[: which.shape[0]])

    def place(
        self, pieces: Sequence[Tensor], which: Sequence[Int64Array | Int32Array], placed: Int64Array, out: Tensor
    ) -> None:
        first = 0
        words = _words(out).numpy()
        for piece, rows in zip(pieces, which, strict=True):
            words[placed[first : first + rows.shape[0]]] = _words(piece).numpy()[rows]
            first += rows.shape[0]

    def weighted_sum(
        self,
        pieces: Sequence[Tensor],
        which: Sequence[Int64Array | None],
        first_entry: Sequence[int],
        home: Int64Array,
        weights: Tensor,
    ) -> Tensor:
        rows = [
            piece if entry_rows is None else piece.index_select(0, torch.from_numpy(entry_rows))
            for piece, entry_rows in zip(pieces, which, strict=True)
        ]
        complete = first_entry[-1] == home.size
        return weighted_sum(torch.cat(rows), torch.from_numpy(home), weights, complete)


def _words(rows: Tensor) -> Tensor:
    """Returns rows of bytes as rows of 8-byte words where they divide: a view."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0 else rows
