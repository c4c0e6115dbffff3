"""The paged cache of keys and values of one rank: one tensor per layer, whose address never changes.

A slot holds one token; a block is block_size consecutive slots. The scheduler decides which request owns which block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_serve.errors import CapacityError
from moe_serve.kernels.huge_pages import zeros_in_huge_pages


@dataclass(frozen=True)
class KvLayout:
    """The values that one layer caches for one token.

    gqa: a key and a value for each of `num_heads` heads of `width`; a row is [2 * num_heads, width], keys first
    mla: one normed latent of `value_width` and one rotated key, together `width` wide; a row is [1, width]
    """

    kind: Literal["gqa", "mla"]
    num_heads: int
    width: int
    value_width: int

    @classmethod
    def gqa(cls, num_heads: int, head_dim: int) -> "KvLayout":
        return cls("gqa", num_heads, head_dim, head_dim)

    @classmethod
    def mla(cls, latent: int, rope_dim: int) -> "KvLayout":
        return cls("mla", 1, latent + rope_dim, latent)

    @property
    def row_shape(self) -> tuple[int, int]:
        return (2 * self.num_heads if self.kind == "gqa" else 1, self.width)

    @property
    def elements_per_token(self) -> int:
        heads, width = self.row_shape
        return heads * width

    def gather_rows(self, slots: Tensor) -> Tensor:
        """Returns the rows of the flattened cache ([num_slots * heads, width]) that hold these tokens' keys and values.

        slots: [num_seqs, num_keys] int64 -> gqa: [2 * num_seqs * num_heads * num_keys], all keys, then all values, each
        ordered by sequence, head and token; mla: [num_seqs * num_keys]
        """
        if self.kind == "mla":
            return slots.reshape(-1)
        heads = torch.arange(2 * self.num_heads, device=slots.device).view(2, 1, self.num_heads, 1)
        return (slots[None, :, None, :] * (2 * self.num_heads) + heads).reshape(-1)


class KvCache:
    """All layers' keys and values. Slot -1, behind the num_blocks blocks, is a row that is never read."""

    def __init__(
        self,
        layouts: Sequence[KvLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """Raises CapacityError when the memory is not there."""
        self.layouts = tuple(layouts)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        num_slots = num_blocks * block_size + 1  # padding rows write to the last one
        try:
            self._layers = [zeros_in_huge_pages((num_slots, *layout.row_shape), dtype, device) for layout in layouts]
        except (RuntimeError, MemoryError) as error:
            need = num_blocks * bytes_per_block(layouts, block_size, dtype) / 2**30
            reason = str(error).splitlines()[0]
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks needs {need:.1f} GiB on {device} ({reason}); "
                "lower cache.num_blocks or cache.memory_gib"
            ) from None

    def layer(self, index: int) -> Tensor:
        """Returns the rows of one layer by slot, [num_slots + 1, *row_shape]: values written here are cached."""
        return self._layers[index]

    def gather(self, layer: int, rows: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Returns copies of keys [num_seqs, heads, num_keys, width] and values [.., value_width].

        rows: from KvLayout.gather_rows. With mla the values are a view of the first value_width elements of the keys.
        """
        layout = self.layouts[layer]
        found = self._layers[layer].view(-1, layout.width).index_select(0, rows)
        if layout.kind == "mla":
            keys = found.view(num_seqs, 1, -1, layout.width)
            return keys, keys[..., : layout.value_width]
        both = found.view(2, num_seqs, layout.num_heads, -1, layout.width)
        return both[0], both[1]


def bytes_per_block(layouts: Sequence[KvLayout], block_size: int, dtype: torch.dtype) -> int:
    """Returns the size of one block over all layers, in bytes."""
    return sum([layout.elements_per_token for layout in layouts]) * block_size * dtype.itemsize
