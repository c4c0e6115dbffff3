"""Times every variant of dispatch and combine on one rank; see benchmarks/dispatch.py."""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AnyAllToAll,
    BufferLimits,
    Dispatched,
    EpGroup,
    PackedRows,
    TransportRequest,
)
from moe_serve.dispatch.capabilities import Combine
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm import memory
from moe_serve.dispatch.shm.row_copy import RowCopier
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.dispatch.shm.transport import ShmAllToAll
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.cpu.library import cpu_library

NUM_TOKENS, HIDDEN, TOPK, NUM_EXPERTS = 128, 7168, 8, 64
ROW_BYTES = 2 * HIDDEN
COPIES = ("copy_", "memmove", "streaming")  # plain copies to compare with
LARGE, SMALL = 7, 20  # runs in a row; gloo and what is computed by numpy runs once
Times = dict[str, list[list[tuple[float, float]]]]  # seconds, and those of CPU time, of each run in each round
Run = Callable[..., Any]


class Variants:
    """What is timed, in this order in every round; variants of one group run in turn."""

    def __init__(self, barrier: Callable[[], None]):
        self._barrier = barrier
        self._groups: list[tuple[int, dict[str, Callable[[], tuple[float, float]]]]] = []

    def add(
        self,
        name: str,
        run: Run,
        before: Callable[[], tuple[Any, ...]] = tuple,
        after: Callable[[Any], None] = lambda result: None,
        num_runs: int = LARGE,
    ) -> None:
        """before gives what run takes, after gets what it gave; neither is timed."""
        self._groups.append((num_runs, {name: functools.partial(self._timed, run, before, after)}))

    def add_in_turn(self, runs: dict[str, Run], after: Callable[[Any], None]) -> None:
        """Adds variants that differ by little."""
        group = {name: functools.partial(self._timed, run, tuple, after) for name, run in runs.items()}
        self._groups.append((3 * LARGE, group))

    def measure(self, num_rounds: int) -> Times:
        """Returns the times of all rounds but the first two."""
        times: Times = {name: [] for _, group in self._groups for name in group}
        for number in range(num_rounds + 2):
            for num_runs, group in self._groups:
                took = [[timed() for timed in group.values()] for _ in range(num_runs)]
                for name, runs in zip(group, zip(*took, strict=True), strict=True):
                    if number >= 2:
                        times[name].append(list(runs))
        return times

    def _timed(
        self, run: Run, before: Callable[[], tuple[Any, ...]], after: Callable[[Any], None]
    ) -> tuple[float, float]:
        arguments = before()
        self._barrier()
        started_s, cpu_s = time.perf_counter(), time.thread_time()
        result = run(*arguments)
        took = time.perf_counter() - started_s, time.thread_time() - cpu_s
        after(result)
        return took


@dataclass(frozen=True)
class Batch:
    """hidden: [T, H] bf16;  ids: [T, K] slots;  weights: [T, K]"""

    hidden: Tensor
    ids: Tensor
    weights: Tensor

    def first(self, num_tokens: int) -> "Batch":
        return Batch(self.hidden[:num_tokens].clone(), self.ids[:num_tokens].clone(), self.weights[:num_tokens].clone())


class Way:
    """The calls of one transport with one batch."""

    def __init__(self, transport: AnyAllToAll, batch: Batch):
        self._transport, self._batch = transport, batch
        self._elsewhere = torch.empty(0, HIDDEN, dtype=batch.hidden.dtype)  # results of the experts in private memory

    def dispatch(self) -> Dispatched[Any]:
        batch = self._batch
        return self._transport.dispatch(batch.hidden, batch.ids, None, batch.weights).wait()

    def leave(self, arrived: Dispatched[Any]) -> None:
        """Gives the memory of the rows back, as the receive of their combine does."""
        if isinstance(self._transport, ShmAllToAll):
            self._transport._staging.give_back(arrived.handle.staging)  # type: ignore[attr-defined]

    def elsewhere(self) -> tuple[Tensor, object]:
        """Returns results of the experts in memory of their own, and their handle."""
        arrived = self.dispatch()
        if self._elsewhere.shape[0] < arrived.rows.x.shape[0]:
            self._elsewhere = torch.empty_like(arrived.rows.x)
        return self._elsewhere[: arrived.rows.x.shape[0]].copy_(arrived.rows.x), arrived.handle

    def in_place(self) -> tuple[Tensor, object]:
        """Returns results where the transport wants them, and their handle."""
        arrived = self.dispatch()
        assert arrived.out is not None
        return arrived.out.copy_(arrived.rows.x), arrived.handle

    def combine(self, results: Tensor, handle: object) -> Tensor:
        return self._transport.combine(results, self._batch.weights, handle).wait()

    def round_trip(self) -> Tensor:
        arrived = self.dispatch()
        return self.combine(arrived.rows.x, arrived.handle)

    def count(self) -> Tensor:
        return self._transport.exchange_counts(torch.zeros(1, dtype=torch.int64)).wait()


def measure(rank: int, group: EpGroup, num_rounds: int, huge_tmpfs: str | None) -> Times:
    """Returns the times of all variants on this rank. huge_tmpfs: a folder whose files are in huge pages, if any"""
    torch.manual_seed(rank)
    keep_the_core(rank, group.num_ranks)
    slots = NUM_EXPERTS // group.num_ranks
    ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOPK, dim=1).indices
    batch = Batch(torch.randn(NUM_TOKENS, HIDDEN).bfloat16(), ids, torch.rand(NUM_TOKENS, TOPK))
    request = TransportRequest("collective", BufferLimits(NUM_TOKENS, HIDDEN, TOPK, slots), torch.bfloat16)

    def shm(compiled: bool = True, combine: Combine = "ordered") -> AnyAllToAll:
        return make_all_to_all(group, replace(request, backend="low_latency", compiled=compiled, combine=combine))

    ours = shm()
    variants = Variants(Way(ours, batch).count)
    ranks_of = [set(row) for row in (ids // slots).tolist()]
    num_rows = {
        "remote": sum(len(ranks - {rank}) for ranks in ranks_of),
        "dedup": sum(map(len, ranks_of)),
        "slabs": NUM_TOKENS * TOPK,
    }
    add_copies(variants, group, num_rows)
    for name, compiled in (("shm", True), ("plain", False)):
        variants.add(f"{name} arrival", arrival_only(shm(compiled), batch).dispatch, num_runs=LARGE if compiled else 1)
    add_calls(variants, "shm", ours, batch)
    variants.add("shm combine in place", Way(ours, batch).combine, Way(ours, batch).in_place)
    layer = ReplicatedLayer(group, ours, batch)
    variants.add_in_turn({"replicas": layer.dispatch, "no replicas": layer.dispatch_plain}, Way(ours, batch).leave)
    add_calls(variants, "shm rank_sum", shm(combine="rank_sum"), batch)
    if huge_tmpfs is not None:
        with mock.patch.object(memory, "_FOLDER", huge_tmpfs):
            in_huge = shm()
            add_copies(variants, group, {"slabs, huge pages": num_rows["slabs"]})
        add_calls(variants, "huge", in_huge, batch)
        variants.add("huge combine in place", Way(in_huge, batch).combine, Way(in_huge, batch).in_place)
    for name, transport in (
        ("plain", shm(compiled=False)),
        ("gloo", make_all_to_all(group, request)),
        ("gloo rank_sum", make_all_to_all(group, replace(request, combine="rank_sum"))),
    ):
        add_calls(variants, name, transport, batch, is_slow=True)
    return variants.measure(num_rounds)


def keep_the_core(rank: int, num_ranks: int) -> None:
    """Pins this process and raises its priority where allowed: a rank that is preempted stops all others.

    Where Linux shares cores among sessions (autogroups), a priority within a session says little about other sessions,
    so the process begins one of its own, which ends with this run. Not where ranks share a core: they give it to each
    other by sched_yield, which reaches their own session only.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    if num_ranks <= len(cores):
        with contextlib.suppress(OSError):
            os.setsid()
            Path("/proc/self/autogroup").write_text("-15")


def add_copies(variants: Variants, group: EpGroup, num_rows: dict[str, int]) -> None:
    """Adds plain copies of private memory into the next rank's part of a shared segment. num_rows: by name"""
    assert group.process_group is not None
    num_bytes = ROW_BYTES * max(num_rows.values())
    shared = memory.share_regions(group.process_group, num_bytes * group.num_ranks)
    peer = shared.region((group.rank + 1) % group.num_ranks)
    to = peer[group.rank * num_bytes :][:num_bytes]
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    library, note = load_library()
    assert library is not None, note
    kinds: dict[str, Callable[[int], Any]] = {
        "copy_": lambda n: to[:n].copy_(source[:n]),
        "memmove": lambda n: ctypes.memmove(to.data_ptr(), source.data_ptr(), n),
        "streaming": lambda n: library.stream_copy(to.data_ptr(), source.data_ptr(), n),
    }
    for name, rows in num_rows.items():
        for kind in COPIES:
            kinds[kind](num_bytes)  # pages exist from here on
            variants.add(f"memcpy {name} {kind}", functools.partial(kinds[kind], rows * ROW_BYTES))


class ArrivalOnly:
    """Dispatch up to the moment when every row lies in its destination's region: one row per (token, rank)."""

    def __init__(self, copier: RowCopier[Any, Any]):
        self.send_rows = copier.send_rows

    def place_rows(self, sent: object, own: Tensor, staging: Tensor, buffer: int, others: list[int]) -> PackedRows:
        return PackedRows(own[:0], torch.empty(0))


def arrival_only(transport: AnyAllToAll, batch: Batch) -> Way:
    transport._copier = ArrivalOnly(transport._copier)  # type: ignore[attr-defined]
    return Way(transport, batch)


def add_calls(variants: Variants, name: str, transport: AnyAllToAll, batch: Batch, is_slow: bool = False) -> None:
    """Adds dispatch, combine, and the small calls of a transport."""
    way, tiny, none = (Way(transport, part) for part in (batch, batch.first(1), batch.first(0)))
    large, small = (1, 1) if is_slow else (LARGE, SMALL)
    variants.add(f"{name} dispatch", way.dispatch, after=way.leave, num_runs=large)
    variants.add(f"{name} combine", way.combine, way.elsewhere, num_runs=large)
    variants.add(f"{name} one token", tiny.round_trip, num_runs=small)
    variants.add(f"{name} empty dispatch", none.dispatch, after=none.leave, num_runs=small)
    variants.add(f"{name} counts round", way.count, num_runs=small)


class ReplicatedLayer:
    """One layer of experts with replicas, four slots of them on each rank, and one without any.

    As in a recorded step, kernels count: once for the load record, once to exchange.
    """

    def __init__(self, group: EpGroup, transport: AnyAllToAll, batch: Batch):
        num_spare = 4 * group.num_ranks
        placement = Placement.trivial(1, NUM_EXPERTS - num_spare, group.num_ranks, num_spare)
        self._hidden, self._ids = batch.hidden, batch.ids % placement.num_logical
        self._rank, self._transport = group.rank, transport
        self._replicas = ReplicaMap(placement).layer(0)
        self._counts, self._load = torch.zeros(2, placement.num_logical, dtype=torch.int64)
        sizes = self._ids.data_ptr(), NUM_TOKENS, TOPK, placement.num_logical
        self._to_exchange, self._to_record = (*sizes, self._counts.data_ptr()), (*sizes, self._load.data_ptr())
        self._count = cpu_library().call.count_ids
        self._slots = self._ids

    def dispatch(self) -> Dispatched[Any]:
        """Counts, records, exchanges, chooses replicas, and dispatches."""
        self._count(*self._to_record)  # as long as the gate's kernel takes for it
        self._count(*self._to_exchange)
        counts = self._transport.exchange_counts(self._counts).wait()
        self._slots, slot_counts = self._replicas.split(self._ids, counts, self._rank)
        return self._transport.dispatch(self._hidden, self._slots, slot_counts).wait()

    def dispatch_plain(self) -> Dispatched[Any]:
        """Dispatches the same rows to the same slots, which are known."""
        return self._transport.dispatch(self._hidden, self._slots).wait()
