"""The block table of one rank: a row of cache blocks for each running request, kept from step to step.

A row grows when its request gets blocks, so a step reads the table and builds no lists.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moe_serve.attention_dp.request import Request

Int32Array = NDArray[np.int32]


class BlockTables:
    """rows: [num_rows, width] int32; row request.table_row begins with request.block_ids, the rest is left over.

    What is left over are zeros and blocks of earlier requests: block ids of this cache, whose contents are not read.
    changed_at:  [num_rows] int64, which change was the last one of each row, so that a reader copies changed rows only
    num_changes: changes so far, of all rows
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.rows: Int32Array = np.zeros((8, 8), dtype=np.int32)
        self.changed_at: NDArray[np.int64] = np.zeros(len(self.rows), dtype=np.int64)
        self.num_changes = 0
        self._free = list(range(len(self.rows)))[::-1]

    def extend(self, request: Request, blocks: list[int]) -> None:
        """Adds blocks to the end of the request's list and row. Gives it a row if it has none."""
        if request.table_row < 0:
            if not self._free:
                self._add_rows()
            request.table_row = self._free.pop()
        start = len(request.block_ids)
        request.block_ids += blocks
        end = len(request.block_ids)
        if end > self.rows.shape[1]:
            self._widen(end)
        self._write(request.table_row, start, blocks)

    def replace(self, request: Request, start: int, blocks: list[int]) -> None:
        """Puts other blocks in the place of those from the start-th on."""
        request.block_ids[start : start + len(blocks)] = blocks
        self._write(request.table_row, start, blocks)

    def drop(self, request: Request) -> None:
        """Forgets the blocks of a request and frees its row."""
        request.block_ids = []
        if request.table_row >= 0:
            self._free.append(request.table_row)
            request.table_row = -1

    def check(self, running: Iterable[Request]) -> None:
        """Asserts that rows and lists agree, and that each row is free or has one request. For tests."""
        used = [request for request in running if request.table_row >= 0]
        for request in used:
            assert self.rows[request.table_row, : len(request.block_ids)].tolist() == request.block_ids
        assert sorted([request.table_row for request in used] + self._free) == list(range(len(self.rows)))

    def _write(self, row: int, start: int, blocks: list[int]) -> None:
        self.rows[row, start : start + len(blocks)] = blocks
        self.num_changes += 1
        self.changed_at[row] = self.num_changes

    def _add_rows(self) -> None:
        num_rows = len(self.rows)
        self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.changed_at = np.concatenate([self.changed_at, np.zeros_like(self.changed_at)])
        self._free = list(range(num_rows, 2 * num_rows))[::-1]

    def _widen(self, width: int) -> None:
        """Makes rows at least `width` wide. Doubling keeps the copies rare."""
        old = self.rows
        self.rows = np.zeros((len(old), max(width, 2 * old.shape[1])), dtype=np.int32)
        self.rows[:, : old.shape[1]] = old
