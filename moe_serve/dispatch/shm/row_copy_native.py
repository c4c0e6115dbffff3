"""LaneWork in C: row_copy.c, built at first use where there is a compiler, and kept in the user's cache.

Never required: `native_lane_work` gives None, and the reason, where it cannot be built or where its bits differ from
those of the plain form.
"""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.c_library import FOR_THIS_PROCESSOR, load_c_library
from moe_serve.dispatch.shm.region import FIRST, Float32Array, Int32Array, Int64Array
from moe_serve.dispatch.shm.row_copy import Lanes, Placed, encode_results, refuse_id, refuse_slab
from moe_serve.dispatch.shm.row_copy_plain import add_fetched, add_sums
from moe_serve.dispatch.shm.send_plan import placed_starts, plan_sends
from moe_serve.errors import ConfigError
from moe_serve.kernels.weighted_sum import weighted_sum_reference

_SOURCE = Path(__file__).with_name("row_copy.c")
_ARGUMENTS = {
    "send_rows": 9, "place_rows": 10, "send_results": 8, "sum_results": 6, "add_results": 10, "weighted_rows": 7,
    "stream_copy": 3,
}  # fmt: skip


class _Trip:
    """One dispatch and its combine: a block of int64 whose parts row_copy.c names, those of arrivals first."""

    x: Tensor

    def __init__(self, ids: Tensor, num_ranks: int, slots: int, kept_entries: int):
        self.ids = ids.clone(memory_format=torch.contiguous_format)  # read once more when results come home
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


class NativeLaneWork:
    """LaneWork for a machine with a C compiler."""

    writes_in_place = True

    def __init__(self, lanes: Lanes, library: ctypes.CDLL):
        shape = lanes.shape
        self._lanes, self._library = lanes, library
        self._num_ranks, self._slots = shape.num_ranks, shape.slots_per_rank
        self._facts = lane_facts(lanes)
        self._facts_at = _at(self._facts)
        self._row_bytes = lanes.hidden * lanes.dtype.itemsize
        self._others: list[int] = []
        self._bits = 0
        self._outbox_at = [rows.data_ptr() for rows in lanes.outboxes[lanes.rank].rows]
        # With rank_sum what each entry's row and weight are is kept until the results are there.
        self._kept_entries = shape.max_results if lanes.rank_sum else 0

    def send_rows(
        self,
        physical_ids: Tensor,
        own: Tensor,
        weights: Tensor | None,
        buffer: int,
        others: list[int],
    ) -> _Trip:
        trip = _Trip(physical_ids, self._num_ranks, self._slots, self._kept_entries)
        if weights is not None:
            assert (weights.dtype, weights.shape) == (torch.float32, trip.ids.shape), "one float32 weight for each id"
            weights = weights.contiguous()  # a name holds what has only an address below
        status = self._library.send_rows(
            self._facts_at, buffer, self._mask(others), trip.ids.data_ptr(), trip.num_tokens, trip.topk, own.data_ptr(),
            0 if weights is None else weights.data_ptr(), trip.at,
        )  # fmt: skip
        if status < 0:
            raise refuse_id(physical_ids, self._num_ranks * self._slots)
        return trip

    def place_rows(self, sent: object, own: Tensor, room: Tensor, buffer: int, others: list[int]) -> _Trip:
        assert isinstance(sent, _Trip)
        pieces = self._decoded(own, buffer, others)
        pointers = torch.tensor([piece.data_ptr() for piece in pieces]) if pieces else None
        num_rows = self._library.place_rows(
            self._facts_at, buffer, self._mask(others), sent.num_tokens, sent.topk,
            0 if pointers is None else pointers.data_ptr(), own.data_ptr(), self._row_bytes,
            room.data_ptr(), sent.at,
        )  # fmt: skip
        if num_rows < 0:
            raise refuse_slab(int(sent.rows_per_slot.max()), self._lanes.slab_rows)
        sent.x = room if self._lanes.slab_rows else room[:num_rows]
        return sent

    def send_results(self, placed: Placed, results: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _Trip)
        in_place = results.data_ptr() == self._outbox_at[buffer]
        if self._lanes.rank_sum:
            self._sum(placed, results, buffer)
            own, in_place = results, True
        else:
            own = encode_results(self._lanes, results)
        self._library.send_results(
            self._facts_at, buffer, self._mask(others), placed.num_tokens, placed.topk, in_place, own.data_ptr(),
            placed.at,
        )  # fmt: skip
        return own

    def add_results(self, placed: Placed, own: object, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        assert isinstance(placed, _Trip)
        assert isinstance(own, Tensor)
        if not self._lanes.wire.combine.is_identity:
            return self._add_decoded(placed, own, weights, buffer, others)
        assert (weights.dtype, weights.shape) == (torch.float32, placed.ids.shape), "one float32 weight for each id"
        weights = weights.contiguous()
        out = torch.empty(placed.num_tokens, self._lanes.hidden, dtype=self._lanes.dtype)
        self._library.add_results(
            self._facts_at, buffer, self._mask(others), placed.ids.data_ptr(), placed.num_tokens, placed.topk,
            own.data_ptr(), weights.data_ptr(), out.data_ptr(), placed.at,
        )  # fmt: skip
        return out

    def _mask(self, others: list[int]) -> int:
        """Returns ranks as bits; the list is the same object until the group changes."""
        if others is not self._others:
            self._others, self._bits = others, sum(1 << rank for rank in others)
        return self._bits

    def _decoded(self, own: Tensor, buffer: int, others: list[int]) -> list[Tensor]:
        """Returns the rows of each source as they are computed with; empty: they lie in the lanes like that."""
        codec, lanes = self._lanes.wire.dispatch, self._lanes
        if codec.is_identity:
            return []
        pieces = [own] * self._num_ranks  # a rank that takes no part has no entry, so nothing is read from it
        for source in [*others, lanes.rank]:
            lane = lanes.inbox[source]
            data = own if source == lanes.rank else lane.rows[buffer][: int(lane.head[buffer][self._slots])]
            pieces[source] = codec.decode(data, lanes.hidden).contiguous()
        return pieces

    def _sum(self, placed: _Trip, results: Tensor, buffer: int) -> None:
        """Writes the sum of each arrived row's results into the outbox."""
        lanes = self._lanes
        outbox = lanes.outboxes[lanes.rank].rows[buffer]
        direct = lanes.wire.combine.is_identity
        num_rows = int(placed.rows_of.sum())
        sums = outbox if direct else torch.empty(num_rows, lanes.hidden, dtype=lanes.dtype)
        self._library.sum_results(
            self._facts_at, placed.num_tokens, placed.topk, results.data_ptr(), sums.data_ptr(),
            placed.at,
        )  # fmt: skip
        if not direct:
            outbox[:num_rows] = encode_results(lanes, sums)

    def _add_decoded(self, placed: _Trip, own: Tensor, weights: Tensor, buffer: int, others: list[int]) -> Tensor:
        """Adds results that lie encoded, by way of the plain form."""
        lanes, rank = self._lanes, self._lanes.rank
        plan = plan_sends(placed.ids.numpy(), self._num_ranks, self._slots)
        if lanes.rank_sum:
            own_start = int(placed.rows_of[:rank].sum())
            return add_sums(lanes, plan, own_start, placed.num_tokens, buffer, others)
        starts = placed_starts(placed.arrived, lanes.slab_rows)[rank]
        rows = starts[plan.entries[rank] & (FIRST - 1)] + plan.home.reshape(-1)[plan.pairs[rank]]
        return add_fetched(lanes, plan, own.index_select(0, torch.from_numpy(rows)), weights, buffer, others)


def lane_facts(lanes: Lanes) -> Int64Array:
    """Returns what row_copy.c knows of the lanes, in the order that it names."""
    shape = lanes.shape
    facts = [
        lanes.rank,
        shape.num_ranks,
        shape.slots_per_rank,
        shape.row_bytes,
        shape.home_row_bytes,
        lanes.hidden,
        int(lanes.dtype == torch.bfloat16),
        cached_bytes(shape.num_ranks),
        lanes.slab_rows,
        int(lanes.rank_sum),
        shape.topk,
        shape.max_results,
    ]
    for buffer in (0, 1):
        for out, inbox, outbox in zip(lanes.out, lanes.inbox, lanes.outboxes, strict=True):
            facts += [_at(part[buffer]) for part in (out.head, out.entries, out.weights)]
            facts += [out.rows[buffer].data_ptr(), _at(out.starts[buffer])]
            facts += [_at(part[buffer]) for part in (inbox.head, inbox.entries, inbox.weights)]
            facts += [inbox.rows[buffer].data_ptr(), _at(inbox.starts[buffer]), outbox.rows[buffer].data_ptr()]
    return np.array(facts, dtype=np.int64)


def cached_bytes(num_ranks: int) -> int:
    """Returns how much of the rows that arrive is written through the caches: half of a rank's share of the largest.

    Each way to memory has a limit of its own, so half and half is faster than either; benchmarks/dispatch.py shows what
    it comes to.
    """
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if path.read_text().strip().endswith("K")
    ]
    return max(sizes, default=1 << 20) // num_ranks // 2


def native_lane_work(lanes: Lanes) -> tuple[NativeLaneWork | None, str]:
    """Returns the C form and what it was built with, or None and why there is none."""
    if lanes.dtype not in (torch.float32, torch.bfloat16):
        return None, f"no C form for {lanes.dtype}"
    library, note = load_library()
    return (None, note) if library is None else (NativeLaneWork(lanes, library), note)


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """Returns row_copy.c and what it was built with, or None and why there is none."""
    try:
        library, compiler = load_c_library(_SOURCE, _ARGUMENTS, (*FOR_THIS_PROCESSOR, "-ffp-contract=fast"))
    except ConfigError as error:
        return None, str(error)
    wrong = _differing_dtype(library)
    return (None, f"the helper built by {compiler} adds {wrong} in other bits") if wrong else (library, compiler)


def _differing_dtype(library: ctypes.CDLL) -> torch.dtype | None:
    """Returns a dtype that the helper adds up differently from the reference; without fused steps it does."""
    num_tokens, topk, hidden = 6, 5, 269
    home = torch.arange(num_tokens * topk).view(num_tokens, topk)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_tokens, topk, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(home.numel(), hidden, generator=generator).to(dtype)
        out = torch.empty(num_tokens, hidden, dtype=dtype)
        facts = np.array([0, 1, 1, 0, 0, hidden, int(dtype == torch.bfloat16)])
        library.weighted_rows(
            _at(facts), home.data_ptr(), weights.data_ptr(), num_tokens, topk, rows.data_ptr(), out.data_ptr()
        )
        if not torch.equal(out, weighted_sum_reference(rows, home, weights)):
            return dtype
    return None


def _at(array: Int64Array | Int32Array | Float32Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
