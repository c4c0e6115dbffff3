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
from moe_serve.dispatch.lane_work import Heads, Lanes
from moe_serve.dispatch.send_plan import SendPlan
from moe_serve.kernels.weighted_sum import weighted_sum_reference

# Above these sizes stores bypass the caches: what is written is not read again by this core soon.
STREAM_BYTES = 1 << 20
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")


class NativeLaneWork:
    """LaneWork for a machine with a C compiler."""

    def __init__(self, lanes: Lanes, library: ctypes.CDLL):
        self._lanes, self._library = lanes, library
        shape = lanes.shape
        self._rank, self._num_ranks, self._slots = lanes.rank, shape.num_ranks, shape.slots_per_rank
        self._tables = [
            np.array(
                [
                    [*_addresses(out, b), *_addresses(inbox, b)]
                    for out, inbox in zip(lanes.out, lanes.inbox, strict=True)
                ]
            )
            for b in (0, 1)
        ]
        self._table_at = [table.ctypes.data for table in self._tables]

    def plan(self, physical_ids: Tensor) -> SendPlan:
        ids = physical_ids.contiguous()
        num_tokens, topk = ids.shape
        num_ranks, num_slots, pairs = self._num_ranks, self._num_ranks * self._slots, ids.numel()
        block = np.empty(num_slots + 2 * num_ranks + 2 + 2 * pairs + num_tokens * min(num_ranks, topk), dtype=np.int64)
        self._library.plan_sends(
            ids.data_ptr(), num_tokens, topk, num_ranks, self._slots, block.__array_interface__["data"][0]
        )
        entry_at = num_slots
        token_at = entry_at + num_ranks + 1
        home_at = token_at + num_ranks + 1
        ends = [int(number) for number in block[entry_at:home_at]]
        return SendPlan(
            counts=block[:num_slots],
            home=block[home_at : home_at + pairs].reshape(num_tokens, topk),
            row=block[home_at + pairs : home_at + 2 * pairs],
            first_entry=ends[: num_ranks + 1],
            tokens=block[home_at + 2 * pairs :],
            first_token=ends[num_ranks + 1 :],
        )

    def push_rows(self, plan: SendPlan, rows: Tensor, buffer: int, others: list[int]) -> None:
        at = _at(plan.counts)
        entry_at = at + 8 * self._num_ranks * self._slots
        token_at = entry_at + 8 * (self._num_ranks + 1)
        self._library.push_rows(
            self._table_at[buffer], self._num_ranks, self._slots, _mask(others), at, entry_at, token_at,
            _at(plan.row), _at(plan.tokens), rows.data_ptr(), self._lanes.shape.row_bytes, STREAM_BYTES,
        )  # fmt: skip

    def read_heads(self, plan: SendPlan, buffer: int, others: list[int]) -> Heads:
        num_ranks, slots = self._num_ranks, self._slots
        block = np.empty(num_ranks * slots + num_ranks + 1 + slots, dtype=np.int64)
        at, split = _at(block), num_ranks * slots
        self._library.read_heads(
            self._table_at[buffer], self._rank, num_ranks, slots, _mask(others), _at(plan.counts),
            at, at + 8 * split, at + 8 * (split + num_ranks + 1),
        )  # fmt: skip
        first = [int(number) for number in block[split : split + num_ranks + 1]]
        return Heads(block[:split].reshape(num_ranks, slots), first, block[split + num_ranks + 1 :])

    def place_rows(
        self, plan: SendPlan, heads: Heads, pieces: Sequence[Tensor], buffer: int, out: Tensor
    ) -> Int64Array:
        placed = np.empty(heads.first[-1], dtype=np.int64)
        pointers = _pointers(pieces)
        row_bytes = out.shape[1] * out.element_size()
        self._library.place_rows(
            self._table_at[buffer], self._rank, self._num_ranks, self._slots, _at(heads.counts), _at(pointers),
            _at(plan.row) + 8 * plan.first_entry[self._rank], _at(plan.tokens) + 8 * plan.first_token[self._rank],
            _at(placed), out.data_ptr(), row_bytes, placed.shape[0], STREAM_BYTES,
        )  # fmt: skip
        return placed

    def push_results(self, heads: Heads, placed: Int64Array, rows: Tensor, buffer: int, others: list[int]) -> None:
        self._library.push_results(
            self._table_at[buffer], self._num_ranks, _mask(others), _at(heads.counts) + 8 * heads.counts.size,
            _at(placed), rows.data_ptr(), self._lanes.shape.home_row_bytes, STREAM_BYTES,
        )  # fmt: skip

    def weighted_sum(self, plan: SendPlan, own_placed: Int64Array, pieces: Sequence[Tensor], weights: Tensor) -> Tensor:
        num_tokens, topk = plan.home.shape
        hidden, dtype = pieces[0].shape[1], pieces[0].dtype
        if dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"{dtype} rows: only float32 and bfloat16 are computed on CPU")
        out = torch.empty(num_tokens, hidden, dtype=dtype)
        weights, pointers = weights.contiguous(), _pointers(pieces)
        self._library.weighted_sum(
            self._rank, num_tokens, topk, hidden, dtype == torch.bfloat16, _at(pointers),
            _at(plan.counts) + 8 * self._num_ranks * self._slots, _at(own_placed), _at(plan.home),
            weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def native_lane_work(lanes: Lanes) -> tuple[NativeLaneWork | None, str]:
    """Returns the C form and what it was built with, or None and why there is none."""
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
        function.restype, function.argtypes = None, [ctypes.c_int64] * num_arguments
    wrong = _differing_dtype(library)
    return (None, f"the helper built by {compiler} adds {wrong} in other bits") if wrong else (library, compiler)


_ARGUMENTS = {
    "plan_sends": 6, "push_rows": 12, "read_heads": 9, "place_rows": 13, "push_results": 8, "weighted_sum": 11,
    "stream_copy": 3,
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
    home = torch.arange(6 * 5).view(6, 5)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 5, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(30, 131, generator=generator).to(dtype)
        out = torch.empty(6, 131, dtype=dtype)
        pieces, first = np.array([rows.data_ptr()]), np.array([0, 30])
        own = np.arange(30)
        library.weighted_sum(
            0, 6, 5, 131, dtype == torch.bfloat16, _at(pieces), _at(first), _at(own), home.data_ptr(),
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
