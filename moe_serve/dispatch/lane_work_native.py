"""LaneWork in C: lane_work.c, built at first use where there is a compiler, and kept in the user's cache.

Never required: `native_lane_work` gives None, and the reason, where it cannot be built or where its bits differ from
those of the plain form.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.inbox import Int32Array, Int64Array, Lane
from moe_serve.dispatch.lane_work import Decode, Lanes, Placed, PlacedRows
from moe_serve.kernels.weighted_sum import weighted_sum_reference

# Above these sizes stores bypass the caches: what is written is not read again by this core soon.
STREAM_BYTES = 1 << 20
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")


class _Trip:
    """One dispatch and its combine: blocks of int64 whose parts lane_work.c names, and their addresses."""

    x: Tensor
    rows_per_slot: Tensor
    heads: Int64Array
    heads_at: int
    placed: Int64Array

    def __init__(self, ids: Tensor, block: Int64Array, num_ranks: int, slots: int):
        self.ids, self.block, self.block_at = ids, block, _at(block)
        self._num_ranks, self._slots = num_ranks, slots

    @property
    def first_entry(self) -> list[int]:
        start = self._num_ranks * self._slots
        return [int(number) for number in self.block[start : start + self._num_ranks + 1]]


class NativeLaneWork:
    """LaneWork for a machine with a C compiler."""

    def __init__(self, lanes: Lanes, library: ctypes.CDLL):
        self._lanes, self._library = lanes, library
        self._num_ranks, self._slots = lanes.shape.num_ranks, lanes.shape.slots_per_rank
        self._facts = lane_facts(lanes)
        self._facts_at = _at(self._facts)
        self._row_bytes = lanes.hidden * lanes.dtype.itemsize
        self._room = PlacedRows(lanes)

    def send_rows(self, physical_ids: Tensor, own: Tensor, buffer: int, others: list[int]) -> _Trip:
        ids, num_ranks = physical_ids.contiguous(), self._num_ranks
        num_tokens, topk = ids.shape
        size = num_ranks * (self._slots + 2) + 2 + num_tokens * (2 * topk + min(num_ranks, topk))
        trip = _Trip(ids, np.empty(size, dtype=np.int64), num_ranks, self._slots)
        self._library.send_rows(
            self._facts_at, buffer, _mask(others), ids.data_ptr(), num_tokens, topk, own.data_ptr(), trip.block_at
        )
        return trip

    def place_rows(self, sent: object, own: Tensor, buffer: int, others: list[int], decode: Decode | None) -> _Trip:
        assert isinstance(sent, _Trip)
        num_counts = self._num_ranks * self._slots
        sent.heads = np.empty(num_counts + self._num_ranks + 1 + self._slots, dtype=np.int64)
        sent.heads_at = _at(sent.heads)
        num_rows = self._library.read_heads(self._facts_at, buffer, _mask(others), sent.block_at, sent.heads_at)
        sent.placed = np.empty(num_rows, dtype=np.int64)
        per_slot = sent.heads[num_counts + self._num_ranks + 1 :]
        sent.rows_per_slot = torch.from_numpy(per_slot)
        sent.x = self._room.room(buffer, num_rows, int(per_slot.max()) if self._lanes.slab_rows else 0)
        pieces: list[Tensor] = []
        if decode is not None:
            pieces = [sent.x] * self._num_ranks  # a rank that takes no part has no entry, so nothing is read from it
            for peer in others:
                lane = self._lanes.inbox[peer]
                pieces[peer] = decode(lane.rows[buffer][: int(lane.head[buffer][self._slots])])
            pieces[self._lanes.rank] = decode(own)
        pointers = _pointers(pieces)
        self._library.place_rows(
            self._facts_at, buffer, sent.block_at, sent.ids.numel(), sent.heads_at, _at(pointers) if pieces else 0,
            own.data_ptr(), _at(sent.placed), sent.x.data_ptr(), self._row_bytes,
        )  # fmt: skip
        return sent

    def send_results(self, placed: Placed, own: Tensor, buffer: int, others: list[int]) -> None:
        assert isinstance(placed, _Trip)
        self._library.send_results(
            self._facts_at, buffer, _mask(others), placed.heads_at, _at(placed.placed), own.data_ptr()
        )

    def add_results(self, placed: Placed, own: Tensor, weights: Tensor, buffer: int, decode: Decode | None) -> Tensor:
        assert isinstance(placed, _Trip)
        weights = weights.contiguous()
        num_tokens, topk = placed.ids.shape
        out = torch.empty(num_tokens, self._lanes.hidden, dtype=self._lanes.dtype)
        pieces: list[Tensor] = []
        if decode is not None:
            first = placed.first_entry
            sizes = [first[source + 1] - first[source] for source in range(self._num_ranks)]
            pieces = [decode(lane.home[buffer][:size]) for lane, size in zip(self._lanes.inbox, sizes, strict=True)]
            pieces[self._lanes.rank] = decode(own)
        pointers = _pointers(pieces)
        self._library.add_results(
            self._facts_at, buffer, placed.block_at, num_tokens, topk, placed.heads_at, _at(placed.placed),
            _at(pointers) if pieces else 0, own.data_ptr(), weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def lane_facts(lanes: Lanes) -> Int64Array:
    """Returns what lane_work.c knows of the lanes, in the order that it names."""
    shape = lanes.shape
    facts = [
        lanes.rank,
        shape.num_ranks,
        shape.slots_per_rank,
        shape.row_bytes,
        shape.home_row_bytes,
        lanes.hidden,
        int(lanes.dtype == torch.bfloat16),
        STREAM_BYTES,
        lanes.slab_rows,
    ]
    for buffer in (0, 1):
        for out, inbox in zip(lanes.out, lanes.inbox, strict=True):
            facts += [*_addresses(out, buffer), *_addresses(inbox, buffer)]
    return np.array(facts, dtype=np.int64)


def native_lane_work(lanes: Lanes) -> tuple[NativeLaneWork | None, str]:
    """Returns the C form and what it was built with, or None and why there is none."""
    if lanes.dtype not in (torch.float32, torch.bfloat16):
        return None, f"no C form for {lanes.dtype}"
    library, note = load_library()
    return (None, note) if library is None else (NativeLaneWork(lanes, library), note)


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """Builds and loads lane_work.c, unless this user's cache has it for this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler"
    source = Path(__file__).with_name("lane_work.c")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_serve"
    facts = (source.read_bytes(), compiler, _FLAGS, platform.python_version(), _processor())
    path = folder / f"lane_work_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            return None, f"{folder} can be written by others, so no code is loaded from it"
        if not path.exists():
            _build(compiler, source, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{compiler} could not build the helper: {error}"
    for name, num_arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * num_arguments
    wrong = _differing_dtype(library)
    return (None, f"the helper built by {compiler} adds {wrong} in other bits") if wrong else (library, compiler)


_ARGUMENTS = {
    "send_rows": 8, "read_heads": 5, "place_rows": 10, "send_results": 6, "add_results": 11, "stream_copy": 3
}  # fmt: skip


def _build(compiler: str, source: Path, path: Path) -> None:
    """Several ranks may build at once: each into a file of its own, which then takes the name in one step."""
    descriptor, built = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *_FLAGS, "-o", built, str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=60, text=True)
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def _differing_dtype(library: ctypes.CDLL) -> torch.dtype | None:
    """Returns a dtype that the helper adds up differently from the reference; without fused steps it does."""
    num_tokens, topk, hidden = 6, 5, 131
    home = torch.arange(num_tokens * topk).view(num_tokens, topk)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_tokens, topk, generator=generator)
    counts, heads = np.array([home.numel()]), np.array([home.numel(), 0, home.numel()])
    block = np.concatenate([counts, [0, home.numel()], [0, num_tokens], home.flatten().numpy()])
    placed = np.arange(home.numel())
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(home.numel(), hidden, generator=generator).to(dtype)
        out = torch.empty(num_tokens, hidden, dtype=dtype)
        facts = np.array([0, 1, 1, 0, 0, hidden, int(dtype == torch.bfloat16), STREAM_BYTES, 0])
        library.add_results(
            _at(facts), 0, _at(block), num_tokens, topk, _at(heads), _at(placed), 0, rows.data_ptr(),
            weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        if not torch.equal(out, weighted_sum_reference(rows, home, weights)):
            return dtype
    return None


def _processor() -> str:
    """Returns what -march=native looks at; a home folder may be shared by machines that differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def _addresses(lane: Lane, buffer: int) -> list[int]:
    """Returns where the parts of one buffer lie, in the order of the lane table."""
    return [
        _at(lane.head[buffer]),
        _at(lane.entries[buffer]),
        lane.rows[buffer].data_ptr(),
        lane.home[buffer].data_ptr(),
    ]


def _pointers(pieces: Sequence[Tensor]) -> Int64Array:
    return np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)


def _at(array: Int64Array | Int32Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _mask(ranks: list[int]) -> int:
    return sum(1 << rank for rank in ranks)
