"""RowCopier in C: row_copy.c, built at first use where there is a compiler, and kept in the user's cache.

It is never required: where it cannot be built, or its bits differ from those of the plain form, `native_row_copier`
returns None and the reason.
"""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.c_library import load_c_library, processor_flags
from moe_serve.dispatch.layout import FIRST
from moe_serve.dispatch.shm.region import Float32Array, Int32Array, Int64Array
from moe_serve.dispatch.shm.row_copy import RowBuffers, encode_results, refuse_id, refuse_slab
from moe_serve.dispatch.shm.row_copy_plain import add_fetched, add_sums
from moe_serve.dispatch.shm.send_plan import placed_starts, plan_sends
from moe_serve.errors import ConfigError
from moe_serve.kernels.rows import weighted_sum_reference

_SOURCE = Path(__file__).with_name("row_copy.c")
_ARGUMENTS = {
    "send_rows": 9, "place_rows": 10, "send_results": 8, "sum_results": 6, "add_results": 10, "weighted_rows": 7,
    "stream_copy": 3, "send_counts": 8, "receive_counts": 7, "wait_flags": 6, "fused": 9,
}  # fmt: skip


class _NativePlaced:
    """One dispatch and its combine: a block of int64 whose parts row_copy.h names, those of arrivals first."""

    x: Tensor

    def __init__(self, ids: Tensor, num_ranks: int, slots: int, kept_entries: int):
        self.ids = ids.clone(memory_format=torch.contiguous_format)  # read once more when results are added
        self.num_tokens, self.topk = ids.shape
        self._num_ranks, self._slots = num_ranks, slots
        size = slots + num_ranks * (2 + 3 * slots + self.num_tokens) + self.num_tokens * self.topk
        self._block = torch.empty(size + kept_entries * 3 // 2 + 1, dtype=torch.int64)
        self.at = self._block.data_ptr()
        self.rows_per_slot = self._block[:slots]

    @property
    def rows_of(self) -> Int64Array:
        """Returns how many rows arrived from each source: [R]."""
        return self._block.numpy()[self._slots :][: self._num_ranks]

    @property
    def arrived(self) -> Int64Array:
        """Returns how many entries of each source arrived for each slot: [R, S]."""
        start, size = self._slots + self._num_ranks, self._num_ranks * self._slots
        return self._block.numpy()[start : start + size].reshape(self._num_ranks, self._slots)


class NativeRowCopier:
    """RowCopier for a machine with a C compiler."""

    writes_in_place = True

    def __init__(self, buffers: RowBuffers, library: ctypes.CDLL):
        shape = buffers.shape
        self._buffers, self.library = buffers, library
        self._num_ranks, self._slots = shape.num_ranks, shape.slots_per_rank
        self.facts = buffer_facts(buffers)
        self.facts_at = _at(self.facts)
        self._row_bytes = buffers.hidden * buffers.dtype.itemsize
        self._others: list[int] = []
        self._bits = 0
        self._send_buffer_at = [rows.data_ptr() for rows in buffers.send_buffers[buffers.rank].rows]
        # With rank_sum, the row and weight of each entry are kept until the results are there.
        self._kept_entries = shape.max_results if buffers.rank_sum else 0

    def send_rows(
        self,
        physical_ids: Tensor,
        own: Tensor,
        weights: Tensor | None,
        buffer: int,
        others: list[int],
    ) -> _NativePlaced:
        placed = _NativePlaced(physical_ids, self._num_ranks, self._slots, self._kept_entries)
        if weights is not None:
            assert (weights.dtype, weights.shape) == (torch.float32, placed.ids.shape), "one float32 weight for each id"
            weights = weights.contiguous()  # keeps alive what the C helper gets as an address
        status = self.library.send_rows(
            self.facts_at, buffer, self._mask(others), placed.ids.data_ptr(), placed.num_tokens, placed.topk,
            own.data_ptr(), 0 if weights is None else weights.data_ptr(), placed.at,
        )  # fmt: skip
        if status < 0:
            raise refuse_id(physical_ids, self._num_ranks * self._slots)
        return placed

    def place_rows(
        self, sent: _NativePlaced, own: Tensor, staging: Tensor, buffer: int, others: list[int]
    ) -> _NativePlaced:
        pieces = self._decoded(own, buffer, others)
        pointers = torch.tensor([piece.data_ptr() for piece in pieces]) if pieces else None
        num_rows = self.library.place_rows(
            self.facts_at, buffer, self._mask(others), sent.num_tokens, sent.topk,
            0 if pointers is None else pointers.data_ptr(), own.data_ptr(), self._row_bytes,
            staging.data_ptr(), sent.at,
        )  # fmt: skip
        if num_rows < 0:
            raise refuse_slab(int(sent.rows_per_slot.max()), self._buffers.slab_rows)
        sent.x = staging if self._buffers.slab_rows else staging[:num_rows]
        return sent

    def send_results(self, placed: _NativePlaced, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        in_place = results.data_ptr() == self._send_buffer_at[buffer]
        if self._buffers.rank_sum:
            self._sum(placed, results, buffer)
            own, in_place = results, True
        else:
            own = encode_results(self._buffers, results)
        self.library.send_results(
            self.facts_at, buffer, self._mask(others), placed.num_tokens, placed.topk, in_place, own.data_ptr(),
            placed.at,
        )  # fmt: skip
        return own

    def add_results(
        self, placed: _NativePlaced, own: Tensor, weights: Tensor, buffer: int, others: list[int]
    ) -> Tensor:
        if not self._buffers.wire.combine.is_identity:
            return self._add_decoded(placed, own, weights, buffer, others)
        assert (weights.dtype, weights.shape) == (torch.float32, placed.ids.shape), "one float32 weight for each id"
        weights = weights.contiguous()
        out = torch.empty(placed.num_tokens, self._buffers.hidden, dtype=self._buffers.dtype)
        self.library.add_results(
            self.facts_at, buffer, self._mask(others), placed.ids.data_ptr(), placed.num_tokens, placed.topk,
            own.data_ptr(), weights.data_ptr(), out.data_ptr(), placed.at,
        )  # fmt: skip
        return out

    def _mask(self, others: list[int]) -> int:
        """Returns ranks as bits; the list is the same object until the group changes."""
        if others is not self._others:
            self._others, self._bits = others, sum(1 << rank for rank in others)
        return self._bits

    def _decoded(self, own: Tensor, buffer: int, others: list[int]) -> list[Tensor]:
        """Returns the rows of each source as they are computed with; empty: they need no decoding."""
        codec, buffers = self._buffers.wire.dispatch, self._buffers
        if codec.is_identity:
            return []
        pieces = [own] * self._num_ranks  # a rank that takes no part has no entry, so nothing is read from it
        for source in [*others, buffers.rank]:
            each = buffers.received[source]
            data = own if source == buffers.rank else each.rows[buffer][: int(each.head[buffer][self._slots])]
            pieces[source] = codec.decode(data, buffers.hidden).contiguous()
        return pieces

    def _sum(self, placed: _NativePlaced, results: Tensor, buffer: int) -> None:
        """Writes the sum of each arrived row's results into the send buffer."""
        buffers = self._buffers
        send_buffer = buffers.send_buffers[buffers.rank].rows[buffer]
        direct = buffers.wire.combine.is_identity
        num_rows = int(placed.rows_of.sum())
        sums = send_buffer if direct else torch.empty(num_rows, buffers.hidden, dtype=buffers.dtype)
        self.library.sum_results(
            self.facts_at, placed.num_tokens, placed.topk, results.data_ptr(), sums.data_ptr(),
            placed.at,
        )  # fmt: skip
        if not direct:
            send_buffer[:num_rows] = encode_results(buffers, sums)

    def _add_decoded(
        self, placed: _NativePlaced, own: Tensor, weights: Tensor, buffer: int, others: list[int]
    ) -> Tensor:
        """Adds encoded results with the plain form."""
        buffers, rank = self._buffers, self._buffers.rank
        plan = plan_sends(placed.ids.numpy(), self._num_ranks, self._slots)
        if buffers.rank_sum:
            own_start = int(placed.rows_of[:rank].sum())
            return add_sums(buffers, plan, own_start, placed.num_tokens, buffer, others)
        starts = placed_starts(placed.arrived, buffers.slab_rows)[rank]
        rows = starts[plan.entries[rank] & (FIRST - 1)] + plan.nth.reshape(-1)[plan.pairs[rank]]
        return add_fetched(buffers, plan, own.index_select(0, torch.from_numpy(rows)), weights, buffer, others)


def buffer_facts(buffers: RowBuffers) -> Int64Array:
    """Returns what the C helper knows of the buffers, in the order of row_copy.h."""
    shape = buffers.shape
    facts = [
        buffers.rank,
        shape.num_ranks,
        shape.slots_per_rank,
        shape.row_bytes,
        shape.result_row_bytes,
        buffers.hidden,
        int(buffers.dtype == torch.bfloat16),
        cached_bytes(shape.num_ranks, all_local=buffers.local_mask == -1),
        buffers.slab_rows,
        int(buffers.rank_sum),
        shape.topk,
        shape.max_results,
        buffers.local_mask,
    ]
    for buffer in (0, 1):
        for out, here, send_buffer in zip(buffers.to_peers, buffers.received, buffers.send_buffers, strict=True):
            facts += [_at(part[buffer]) for part in (out.head, out.entries, out.weights)]
            facts += [out.rows[buffer].data_ptr(), _at(out.starts[buffer])]
            facts += [_at(part[buffer]) for part in (here.head, here.entries, here.weights)]
            facts += [here.rows[buffer].data_ptr(), _at(here.starts[buffer]), send_buffer.rows[buffer].data_ptr()]
    return np.array(facts, dtype=np.int64)


def cached_bytes(num_ranks: int, all_local: bool) -> int:
    """Returns how many bytes of arriving rows are written through the caches: half of a rank's share of the largest.

    The rest is streamed past the caches. Each path has a limit of its own, so both together are faster than either.
    Where some ranks are on other hosts, it is half of the core's own cache: the kernel's copies fill the larger ones.
    """
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if path.read_text().strip().endswith("K") and (all_local or (path.parent / "level").read_text().strip() == "2")
    ]
    return max(sizes, default=1 << 20) // (num_ranks if all_local else 1) // 2


def native_row_copier(buffers: RowBuffers) -> tuple[NativeRowCopier | None, str]:
    """Returns the C form and what it was built with, or None and why there is none."""
    if buffers.dtype not in (torch.float32, torch.bfloat16):
        return None, f"no C form for {buffers.dtype}"
    library, note = load_library()
    return (None, note) if library is None else (NativeRowCopier(buffers, library), note)


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """Returns row_copy.c and what it was built with, or None and why there is none. Raises as processor_flags does."""
    flags = processor_flags()
    try:
        library, compiler = load_c_library(_SOURCE, _ARGUMENTS, flags)
    except ConfigError as error:
        return None, str(error)
    wrong = _differing_dtype(library)
    return (None, f"the helper built by {compiler} adds {wrong} in other bits") if wrong else (library, compiler)


def _differing_dtype(library: ctypes.CDLL) -> torch.dtype | None:
    """Returns a dtype that the helper adds up differently from the reference; without fused steps it does."""
    num_tokens, topk, hidden = 6, 5, 269
    index = torch.arange(num_tokens * topk).view(num_tokens, topk)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_tokens, topk, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(index.numel(), hidden, generator=generator).to(dtype)
        out = torch.empty(num_tokens, hidden, dtype=dtype)
        facts = np.array([0, 1, 1, 0, 0, hidden, int(dtype == torch.bfloat16)])
        library.weighted_rows(
            _at(facts), index.data_ptr(), weights.data_ptr(), num_tokens, topk, rows.data_ptr(), out.data_ptr()
        )
        if not torch.equal(out, weighted_sum_reference(rows, index, weights)):
            return dtype
    return None


def _at(array: Int64Array | Int32Array | Float32Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
