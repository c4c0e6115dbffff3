"""The memory in which packed weights lie: this process's own, or one that the ranks of a host map (weight_file.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from moe_serve.kernels.huge_pages import zeros_in_huge_pages


class PackedMemory(Protocol):
    """Takes packed weights in, in the order in which a decoder is built."""

    def pack(self, shape: Sequence[int], weight: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
        """Returns the packed form of a weight: of this shape and the weight's dtype.

        fill: writes it into zeros; not called where another rank has packed the weight, which is on meta then
        """
        ...

    def keep(self, rows: Tensor) -> Tensor:
        """Returns a weight that stays as it is, without gaps."""
        ...


class OwnMemory:
    """Memory of this process alone, on the weight's device."""

    def pack(self, shape: Sequence[int], weight: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
        packed = zeros_in_huge_pages(shape, weight.dtype, weight.device)
        fill(packed)
        return packed

    def keep(self, rows: Tensor) -> Tensor:
        return rows


OWN_MEMORY = OwnMemory()
