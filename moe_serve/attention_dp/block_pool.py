"""Reference counts of the blocks of the paged KV cache, and the order in which free blocks are allocated.

A block is *free* when no request refers to it. A free block may still hold a useful prefix: the pool allocates such
blocks last, the one released longest ago first (LRU). It never sees tokens, keys or tensors.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0..num_blocks-1, all free at first."""

    __slots__ = ("_free", "_num_references", "num_blocks")

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of allocation

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that no request refers to."""
        return len(self._free)

    def num_references(self, block: int) -> int:
        """Returns how many requests refer to the block."""
        return self._num_references[block]

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Returns how many of the blocks are free now, so that sharing them would use up free blocks."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks that were free, each with one reference now. The caller has checked num_free."""
        free, references = self._free, self._num_references
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each block, free or not."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """Drops one reference. A block that becomes free is allocated again last (keep) or first."""
        assert self._num_references[block] > 0, f"block {block} is released but has no reference"
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Asserts that the counts match the block lists of all holders, and that exactly the other blocks are free."""
        expected = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        assert self._num_references == expected, f"references are {self._num_references}, held are {expected}"
        free = {block for block, count in enumerate(expected) if count == 0}
        assert set(self._free) == free, f"free are {sorted(self._free)}, expected {sorted(free)}"
