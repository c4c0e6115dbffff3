"""Times every variant of dispatch and combine on one rank; see benchmarks/dispatch.py."""

import contextlib
import ctypes
import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AnyAllToAll,
    BufferLimits,
    Dispatched,
    EpGroup,
    PackedRows,
    Pending,
    TransportRequest,
)
from moe_serve.dispatch.capabilities import Combine
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.memory import share_regions
from moe_serve.dispatch.shm.row_copy import RowCopier
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.dispatch.shm.transport import ShmAllToAll
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement

NUM_TOKENS, HIDDEN, TOPK, NUM_EXPERTS = 128, 7168, 8, 64
ROW_BYTES = 2 * HIDDEN


class ArrivalOnly:
    """Dispatch up to the moment when every row lies in its destination's region: one row per (token, rank)."""

    def __init__(self, copier: RowCopier[Any, Any]):
        self.send_rows = copier.send_rows

    def place_rows(self, sent: object, own: Tensor, staging: Tensor, buffer: int, others: list[int]) -> PackedRows:
        return PackedRows(own[:0], torch.empty(0))


class CopyTime:
    """A copier that adds up the CPU time of its calls: what is left without waits, whatever else the machine runs."""

    def __init__(self, copier: RowCopier[Any, Any]):
        self._copier = copier
        self.writes_in_place = copier.writes_in_place
        self.cpu_s = 0.0

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started_s = time.thread_time()
        result = call(*arguments)
        self.cpu_s += time.thread_time() - started_s
        return result

    def send_rows(self, *arguments: Any) -> Any:
        return self(self._copier.send_rows, *arguments)

    def place_rows(self, *arguments: Any) -> Any:
        return self(self._copier.place_rows, *arguments)

    def send_results(self, *arguments: Any) -> Any:
        return self(self._copier.send_results, *arguments)

    def add_results(self, *arguments: Any) -> Any:
        return self(self._copier.add_results, *arguments)


def measure(rank: int, group: EpGroup, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every variant in every round on this rank."""
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # the pool's processes end with this run
    with contextlib.suppress(OSError):  # allowed to few; on a busy machine a rank that is preempted stops all others
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    slots = NUM_EXPERTS // group.num_ranks
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS)
    ids = scores.topk(TOPK, dim=1).indices
    hidden = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    weights = torch.rand(NUM_TOKENS, TOPK)
    tiny = (hidden[:1].clone(), ids[:1].clone(), weights[:1].clone())
    none = (hidden[:0], ids[:0], None, weights[:0])
    results = torch.empty(2 * group.num_ranks * NUM_TOKENS * TOPK, HIDDEN, dtype=torch.bfloat16)

    request = TransportRequest("collective", BufferLimits(NUM_TOKENS, HIDDEN, TOPK, slots), torch.bfloat16)

    def shm(compiled: bool, combine: Combine = "ordered") -> AnyAllToAll:
        return make_all_to_all(group, replace(request, backend="low_latency", compiled=compiled, combine=combine))

    ours, plain, summed = shm(True), shm(False), shm(True, "rank_sum")
    gloo = make_all_to_all(group, request)
    gloo_summed = make_all_to_all(group, replace(request, combine="rank_sum"))
    transports = {"shm": ours, "plain": plain, "gloo": gloo, "shm rank_sum": summed, "gloo rank_sum": gloo_summed}
    arrival, plain_arrival = shm(True), shm(False)
    for transport in (arrival, plain_arrival):
        transport._copier = ArrivalOnly(transport._copier)  # type: ignore[attr-defined]
    counted = shm(True)
    copies = CopyTime(counted._copier)  # type: ignore[attr-defined]
    counted._copier = copies  # type: ignore[attr-defined]
    yardsticks = Yardsticks(group, NUM_TOKENS * TOPK * ROW_BYTES)
    num_dedup = int(sum(len(set(row)) for row in (ids // slots).tolist()))
    remote = ids // slots != rank
    num_remote = int(sum(len(set(row) - {rank}) for row in (ids // slots).tolist()))
    assert bool(remote.any())

    def barrier() -> None:
        ours.exchange_counts(torch.zeros(1, dtype=torch.int64)).wait()

    variants: dict[str, Callable[[], float]] = {}

    def add(
        name: str,
        run: Callable[..., Any],
        before: Callable[[], tuple[Any, ...]] = tuple,
        after: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """before gives what run takes, after gets what it gave; neither is timed."""
        variants[name] = lambda: timed(run, before, after, barrier)

    for size, num_rows in (("remote", num_remote), ("dedup", num_dedup), ("slabs", NUM_TOKENS * TOPK)):
        for kind, copy in yardsticks.kinds.items():
            add(f"memcpy {size} {kind}", lambda c=copy, n=num_rows: c(n * ROW_BYTES))
    for name, transport in transports.items():
        dispatch = functools.partial(transport.dispatch, hidden, ids, None, weights)
        combine = functools.partial(combine_results, transport, weights)
        add(f"{name} dispatch", functools.partial(dispatch_rows, dispatch), after=functools.partial(leave, transport))
        add(f"{name} combine", combine, functools.partial(elsewhere, dispatch, results))
        if name == "shm":
            add(f"{name} combine in place", combine, functools.partial(in_place, dispatch))
        add(f"{name} one token", functools.partial(round_trip, transport, *tiny))
        add(f"{name} empty dispatch", functools.partial(dispatch_rows, functools.partial(transport.dispatch, *none)))
        add(f"{name} counts round", lambda t=transport: t.exchange_counts(torch.zeros(1, dtype=torch.int64)).wait())
    add_copies = functools.partial(add_cpu, variants, copies, barrier)
    dispatch = functools.partial(counted.dispatch, hidden, ids, None, weights)
    combine = functools.partial(combine_results, counted, weights)
    add_copies("cpu dispatch", functools.partial(dispatch_rows, dispatch), after=functools.partial(leave, counted))
    add_copies("cpu combine in place", combine, functools.partial(in_place, dispatch))
    add_copies("cpu combine", combine, functools.partial(elsewhere, dispatch, results))
    for kind, copy in yardsticks.kinds.items():
        add_copies(f"cpu memcpy {kind}", lambda c=copy: copies(c, NUM_TOKENS * TOPK * ROW_BYTES))
    # The way of an MoE layer whose experts have replicas: count, exchange, share, dispatch, record; and without that.
    layer = ReplicatedLayer(group, torch.topk(scores, TOPK, dim=1).indices)
    after = functools.partial(leave, ours)
    add("shm replicas dispatch", functools.partial(layer.dispatch, ours, hidden), after=after)
    add("shm unreplicated dispatch", functools.partial(layer.dispatch_plain, ours, hidden), after=after)
    add("shm arrival", lambda: arrival.dispatch(hidden, ids).wait())
    add("plain arrival", lambda: plain_arrival.dispatch(hidden, ids).wait())
    times: dict[str, list[float]] = {name: [] for name in variants}
    together = ["shm replicas dispatch", "shm unreplicated dispatch"]  # so small a difference asks for runs in turn
    for number in range(rounds + 2):
        for names in [*([name] for name in variants if name not in together), together]:
            small = any(word in names[0] for word in ("empty", "round", "token"))
            is_gloo, is_plain = "gloo" in names[0], "plain" in names[0]
            num_repeats = 1 if is_gloo else 20 if small else 1 if is_plain else 11
            took = [[variants[name]() for name in names] for _ in range(num_repeats)]
            for name, seconds in zip(names, zip(*took, strict=True), strict=True):
                if number >= 2:
                    times[name].append(statistics.median(seconds))
    return times


class ReplicatedLayer:
    """One layer of experts with replicas, four slots of them on each rank, and one without any.

    The wait matrix is kept in both: what it costs, waiting costs.
    """

    def __init__(self, group: EpGroup, logical_ids: Tensor):
        placement = Placement.trivial(1, NUM_EXPERTS - 4 * group.num_ranks, group.num_ranks, 4 * group.num_ranks)
        self._ids = logical_ids % placement.num_logical
        self._rank = group.rank
        self._replicas = ReplicaMap(placement).layer(0)
        self._recorder = LoadRecorder(1, placement.num_logical, group)
        self._plain = ReplicaMap(Placement.trivial(1, NUM_EXPERTS, group.num_ranks)).layer(0)
        self._logical: Tensor | None = None

    def dispatch(self, transport: AnyAllToAll, hidden: Tensor) -> Dispatched[Any]:
        load = self._replicas.count(self._ids)
        self._recorder.add_counts(0, load)
        counts = transport.exchange_counts(load).wait()
        self._logical, slot_counts = self._replicas.split(self._ids, counts, self._rank)
        return transport.dispatch(hidden, self._logical, slot_counts).wait()

    def dispatch_plain(self, transport: AnyAllToAll, hidden: Tensor) -> Dispatched[Any]:
        """The same rows to the same slots, named as experts that have no replica."""
        assert self._logical is not None, "the other way runs first"
        return transport.dispatch(hidden, self._plain.only_slots(self._logical)).wait()


def round_trip(transport: AnyAllToAll, hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
    arrived = transport.dispatch(hidden, ids, None, weights).wait()
    transport.combine(arrived.rows.x, weights, arrived.handle).wait()


def timed(
    run: Callable[..., Any],
    before: Callable[[], tuple[Any, ...]],
    after: Callable[[Any], None],
    barrier: Callable[[], None],
) -> float:
    arguments = before()
    barrier()
    started_s = time.perf_counter()
    result = run(*arguments)
    took_s = time.perf_counter() - started_s
    after(result)
    return took_s


def add_cpu(
    variants: dict[str, Callable[[], float]],
    copies: CopyTime,
    barrier: Callable[[], None],
    name: str,
    run: Callable[..., Any],
    before: Callable[[], tuple[Any, ...]] = tuple,
    after: Callable[[Any], None] = lambda result: None,
) -> None:
    """Adds a variant whose time is the CPU time of its copies."""

    def cpu_time() -> float:
        arguments = before()
        barrier()
        started_s = copies.cpu_s
        result = run(*arguments)
        took_s = copies.cpu_s - started_s
        after(result)
        return took_s

    variants[name] = cpu_time


def dispatch_rows(dispatch: Callable[[], Pending[Dispatched[Any]]]) -> Dispatched[Any]:
    return dispatch().wait()


def leave(transport: AnyAllToAll, arrived: Dispatched[Any]) -> None:
    """Gives the memory of the rows back, as the receive of their combine does."""
    if isinstance(transport, ShmAllToAll):
        transport._staging.give_back(arrived.handle.staging)  # type: ignore[attr-defined]


def combine_results(transport: AnyAllToAll, weights: Tensor, results: Tensor, handle: object) -> Tensor:
    return transport.combine(results, weights, handle).wait()


def elsewhere(dispatch: Callable[[], Pending[Dispatched[Any]]], results: Tensor) -> tuple[Tensor, object]:
    """Returns results of the experts in memory of their own, and their handle."""
    arrived = dispatch().wait()
    return results[: arrived.rows.x.shape[0]].copy_(arrived.rows.x), arrived.handle


def in_place(dispatch: Callable[[], Pending[Dispatched[Any]]]) -> tuple[Tensor, object]:
    """Returns results where the transport wants them, and their handle."""
    arrived = dispatch().wait()
    assert arrived.out is not None
    return arrived.out.copy_(arrived.rows.x), arrived.handle


class Yardsticks:
    """Plain copies of private memory into the next rank's part of a shared segment."""

    def __init__(self, group: EpGroup, num_bytes: int):
        assert group.process_group is not None
        memory = share_regions(group.process_group, num_bytes * group.num_ranks)
        peer = memory.region((group.rank + 1) % group.num_ranks)
        to = peer[group.rank * num_bytes :][:num_bytes]
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
        library, note = load_library()
        assert library is not None, note
        self.kinds: dict[str, Callable[[int], Any]] = {
            "copy_": lambda n: to[:n].copy_(source[:n]),
            "memmove": lambda n: ctypes.memmove(to.data_ptr(), source.data_ptr(), n),
            "streaming": lambda n: library.stream_copy(to.data_ptr(), source.data_ptr(), n),
        }
        for copy in self.kinds.values():
            copy(num_bytes)  # pages exist from here on
