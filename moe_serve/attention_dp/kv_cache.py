"""The paged cache of keys and values of one rank: one tensor per layer, whose address never changes.

A slot holds one token; a block is block_size consecutive slots. The scheduler decides which request owns which block.

In 8 bits (kernels/quantised.py) a slot is one row of bytes: the values of all heads, then their scales, then nothing up
to a multiple of 16. So whoever moves blocks moves scales with them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_serve.attention_dp.page_record import PageForm
from moe_serve.errors import CapacityError
from moe_serve.kernels.huge_pages import zeros_in_huge_pages
from moe_serve.kernels.quantised import CACHED_DTYPES, widen_cached

SLOT_ALIGNMENT = 16  # bytes of a slot in 8 bits
_BESIDE = ("ids", "changed")  # kinds of layouts that hold no values
StateShapes = tuple[tuple[int, ...], ...]  # of the tensors that one layer keeps of one request


@dataclass(frozen=True)
class KvLayout:
    """The values that one layer caches for one token.

    gqa: a key and a value for each of `num_heads` heads of `width`; a row is [2 * num_heads, width], keys first. Values
         may have fewer elements, `value_width`, at the beginning
    mla: one normed latent of `value_width` and one rotated key, together `width` wide; a row is [1, width]
    ids: no values but the experts of the token in all MoE layers, in `width` bytes; behind all layers with values
    changed: how many of these the capacity of experts has changed, in two bytes; behind all others
    """

    kind: Literal["gqa", "mla", "ids", "changed"]
    num_heads: int
    width: int
    value_width: int

    @classmethod
    def gqa(cls, num_heads: int, head_dim: int, value_dim: int | None = None) -> "KvLayout":
        """value_dim: None: head_dim"""
        return cls("gqa", num_heads, head_dim, value_dim or head_dim)

    @classmethod
    def mla(cls, latent: int, rope_dim: int) -> "KvLayout":
        return cls("mla", 1, latent + rope_dim, latent)

    @classmethod
    def ids(cls, num_layers: int, topk: int, num_logical: int) -> "KvLayout":
        """Returns the layout of expert ids [num_layers, topk], in one byte each where that holds them, else in two."""
        return cls("ids", 1, num_layers * topk * id_dtype(num_logical).itemsize, 0)

    @classmethod
    def changed(cls) -> "KvLayout":
        """Returns the layout of a number below 2^15."""
        return cls("changed", 1, torch.int16.itemsize, 0)

    @property
    def row_shape(self) -> tuple[int, int]:
        return (2 * self.num_heads if self.kind == "gqa" else 1, self.width)

    @property
    def elements_per_token(self) -> int:
        heads, width = self.row_shape
        return heads * width

    @property
    def num_scales(self) -> int:
        """Scales of a head of a slot in 8 bits: one, but two of a latent and its rotated key, whose sizes differ."""
        return 2 if self.has_tail else 1

    @property
    def has_tail(self) -> bool:
        """Whether a row is a latent with a rotated key behind it."""
        return self.kind == "mla" and self.width > self.value_width

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Returns the size of one slot."""
        if self.kind in _BESIDE:
            return -(-self.width // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if dtype not in CACHED_DTYPES:
            return self.elements_per_token * dtype.itemsize
        values = -(-self.elements_per_token // torch.float32.itemsize) * torch.float32.itemsize
        used = values + self.row_shape[0] * self.num_scales * torch.float32.itemsize
        return -(-used // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

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
        computed: torch.dtype = torch.float32,
        states: Sequence[StateShapes] = (),
        num_states: int = 0,
    ):
        """Raises CapacityError when the memory is not there.

        dtype: of what is kept;  computed: of what is gathered from a cache in 8 bits
        states: shapes of what layers keep of a request beside it (RequestStates), in float32, in num_states slots
        """
        self.layouts = tuple(layouts)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._computed = computed
        self.num_states = num_states
        num_slots = num_blocks * block_size + 1  # padding rows write to the last one
        self.page_bytes = bytes_per_block(layouts, block_size, dtype)
        self._memory: list[Tensor] = []
        self._layers: list[Tensor] = []
        self._scales: list[Tensor | None] = []
        try:
            for layout in layouts:
                memory = zeros_in_huge_pages((num_slots, layout.slot_bytes(dtype)), torch.uint8, device)
                values, scales = _parts(memory, layout, dtype)
                self._memory.append(memory)
                self._layers.append(values)
                self._scales.append(scales)
        except (RuntimeError, MemoryError) as error:
            need = num_blocks * bytes_per_block(layouts, block_size, dtype) / 2**30
            reason = str(error).splitlines()[0]
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks needs {need:.1f} GiB on {device} ({reason}); "
                "lower cache.num_blocks or cache.memory_gib"
            ) from None
        try:
            self._states = [
                tuple(zeros_in_huge_pages((num_states, *shape), torch.float32, device) for shape in shapes)
                for shapes in states
            ]
        except (RuntimeError, MemoryError) as error:
            need = num_states * state_bytes(states) / 2**30
            raise CapacityError(
                f"the states of {num_states} requests and snapshots need {need:.1f} GiB on {device} "
                f"({str(error).splitlines()[0]}); lower engine.max_running_requests or cache.snapshot_gib"
            ) from None
        self.num_state_pages = -(-state_bytes(states) // self.page_bytes) if states else 0

    def layer(self, index: int) -> Tensor:
        """Returns the rows of one layer by slot, [num_slots + 1, *row_shape]: values written here are cached."""
        return self._layers[index]

    def scales(self, index: int) -> Tensor | None:
        """Returns the scales of one layer, [num_slots + 1, heads of a row, num_scales] float32; None where rows are not
        in 8 bits."""
        return self._scales[index]

    def states_of(self, index: int) -> tuple[Tensor, ...]:
        """Returns what one layer with a state keeps, by slot: float32 tensors [num_states, *shape]."""
        return self._states[index]

    @property
    def page_form(self) -> PageForm:
        """What its pages have in common."""
        return PageForm(len(self.layouts), self.block_size, self.page_bytes)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where a block lies, of a pool on the CPU: for each layer the address of block 0, and the bytes of a block."""
        return [(memory.data_ptr(), self.block_size * memory.shape[1]) for memory in self._memory]

    @property
    def keeps_experts(self) -> bool:
        """Whether the experts of each token are kept beside its keys and values."""
        return self._beside("ids") is not None

    @property
    def keeps_changed(self) -> bool:
        """Whether the number of a token's choices that the capacity of experts has changed is kept, too."""
        return self._beside("changed") is not None

    @property
    def changed_choices(self) -> Tensor:
        """Returns that number of each slot, [num_slots + 1] int16, where it is kept."""
        memory = self._beside("changed")
        assert memory is not None
        return memory.view(torch.int16)[:, 0]

    def _beside(self, kind: str) -> Tensor | None:
        """Returns the memory of what is kept beside keys and values, [num_slots + 1, bytes] uint8."""
        found = [memory for layout, memory in zip(self.layouts, self._memory, strict=True) if layout.kind == kind]
        return found[0] if found else None

    def expert_ids(self, num_layers: int, topk: int, num_logical: int) -> Tensor:
        """Returns the expert ids of each slot, [num_slots + 1, num_layers, topk] of id_dtype, where they are kept."""
        memory, dtype = self._beside("ids"), id_dtype(num_logical)
        assert memory is not None
        return memory[:, : num_layers * topk * dtype.itemsize].view(dtype).view(-1, num_layers, topk)

    def touch(self) -> None:
        """Has the system give the memory of an unused pool now: the first write to a huge page takes milliseconds."""
        for memory in (*self._memory, *(pool for pools in self._states for pool in pools)):
            memory.zero_()

    def read_page(self, block: int) -> Tensor:
        """Returns a copy of what a block holds, layer after layer: [page_bytes] uint8 on the CPU."""
        first = block * self.block_size
        parts = [memory[first : first + self.block_size].reshape(-1) for memory in self._memory]
        return torch.cat(parts).cpu()

    def write_page(self, block: int, page: Tensor) -> None:
        """Writes to a block what `read_page` returned for another."""
        first, start = block * self.block_size, 0
        for memory in self._memory:
            rows = memory[first : first + self.block_size]
            rows.copy_(page[start : start + rows.numel()].view(rows.shape))
            start += rows.numel()

    def read_state_page(self, slot: int, index: int, page: Tensor) -> None:
        """Writes to `page`, [page_bytes] uint8 on the CPU, one of the num_state_pages pages that a state takes.

        What layers keep in a slot lies in them one behind the other; the last page ends in zeros.
        """
        start = 0
        for part in self._state_parts(slot, index):
            page[start : start + part.numel()] = part
            start += part.numel()
        page[start:] = 0

    def write_state_page(self, slot: int, index: int, page: Tensor) -> None:
        """Writes to a slot what `read_state_page` read from another."""
        start = 0
        for part in self._state_parts(slot, index):
            part.copy_(page[start : start + part.numel()])
            start += part.numel()

    def _state_parts(self, slot: int, index: int) -> Iterator[Tensor]:
        """Yields the bytes of a slot that one page holds, in order, as views: uint8."""
        first, end = index * self.page_bytes, (index + 1) * self.page_bytes
        for pool in (pool for pools in self._states for pool in pools):
            row = pool[slot].view(-1).view(torch.uint8)
            if first < row.numel() and end > 0:
                yield row[max(first, 0) : end]
            first, end = first - row.numel(), end - row.numel()

    def gather(self, layer: int, rows: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Returns copies of keys [num_seqs, heads, num_keys, width] and values [.., value_width].

        rows: from KvLayout.gather_rows. With mla the values are a view of the first value_width elements of the keys.
        """
        layout = self.layouts[layer]
        found = self._found(layer, rows)
        if layout.kind == "mla":
            keys = found.view(num_seqs, 1, -1, layout.width)
            return keys, keys[..., : layout.value_width]
        both = found.view(2, num_seqs, layout.num_heads, -1, layout.width)
        return both[0], both[1, ..., : layout.value_width]

    def _found(self, layer: int, rows: Tensor) -> Tensor:
        """Returns copies of rows [n] of the flattened cache, [n, width]."""
        layout, values, scales = self.layouts[layer], self._layers[layer], self._scales[layer]
        if scales is None:
            return values.view(-1, layout.width).index_select(0, rows)
        heads = layout.row_shape[0]
        where = rows // heads, rows % heads
        found = values.view(torch.uint8)[where].view(values.dtype)  # torch indexes no FP8
        width = layout.value_width if layout.has_tail else layout.width
        return widen_cached(found, scales[where], width).to(self._computed)


def _parts(memory: Tensor, layout: KvLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns values [slots, *row_shape] and scales [slots, heads, num_scales] in slots of bytes."""
    if layout.kind in _BESIDE:
        return memory[:, None], None
    if dtype not in CACHED_DTYPES:
        return memory.view(dtype).view(-1, *layout.row_shape), None
    heads, num_values, num_scales = layout.row_shape[0], layout.elements_per_token, layout.num_scales
    values = memory[:, :num_values].view(dtype).view(-1, *layout.row_shape)
    size = heads * num_scales * torch.float32.itemsize
    first = -(-num_values // torch.float32.itemsize) * torch.float32.itemsize
    scales = memory.view(torch.float32)[:, first // 4 : (first + size) // 4].view(-1, heads, num_scales)
    return values, scales


def id_dtype(num_logical: int) -> torch.dtype:
    """Returns the smallest dtype that holds the ids of so many experts; two bytes mean numbers without a sign."""
    return torch.uint8 if num_logical <= 1 << 8 else torch.int16


def state_bytes(states: Sequence[StateShapes]) -> int:
    """Returns the size of one slot of states over all layers that have one, in bytes."""
    return sum(math.prod(shape) for shapes in states for shape in shapes) * torch.float32.itemsize


def bytes_per_block(layouts: Sequence[KvLayout], block_size: int, dtype: torch.dtype) -> int:
    """Returns the size of one block over all layers, in bytes."""
    return sum(layout.slot_bytes(dtype) for layout in layouts) * block_size
