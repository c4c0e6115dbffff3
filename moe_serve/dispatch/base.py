"""The contract of all transports: token rows go to the ranks that hold their experts, and results come home.

Words: T = num_tokens of this rank, H = hidden, K = topk, R = num_ranks, P = num_slots = R x slots_per_rank. A
physical id is a slot; slot s lives on rank s // slots_per_rank. -1 = no expert: such an entry is not sent, and adds
nothing at home. Nothing here knows of placements, models or logical experts. Transports carry bytes; `wire.py` encodes
above them.

Every call has two halves: the call itself issues the sends, `Pending.wait()` receives. Other work may run in between,
and several calls may be in flight; all ranks make the same calls in the same order and wait in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

Combine = Literal["ordered", "rank_sum"]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class EpGroup:
    """The ranks among which experts are spread. rank: this one's ep_rank; process_group: None on one rank."""

    rank: int
    num_ranks: int
    device: torch.device
    process_group: ProcessGroup | None = None


class Pending(Protocol[T_co]):
    """A result that is on its way."""

    def wait(self) -> T_co:
        """Returns the result; blocks until it is here. May be called again."""
        ...


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A result that is here already."""

    value: T

    def wait(self) -> T:
        return self.value


class Deferred(Generic[T]):
    """A result whose receive half is a function, run by the first wait."""

    def __init__(self, receive: Callable[[], T]):
        self._receive: Callable[[], T] | None = receive
        self._value: T

    def wait(self) -> T:
        if self._receive is not None:
            self._value = self._receive()
            self._receive = None  # frees what the closure holds: send buffers above all
        return self._value


@dataclass(frozen=True)
class PackedRows:
    """Rows without gaps, grouped by slot, in a slot by source rank, then by token (prefill; sizes are dynamic).

    x:             [num_rows, H] compute dtype
    rows_per_slot: [slots_per_rank] int64 on the CPU, summing to num_rows
    """

    x: Tensor
    rows_per_slot: Tensor


@dataclass(frozen=True)
class MaskedRows:
    """One slab for each slot, its first rows filled in the same order (decode; sizes are static).

    x:             [slots_per_rank, capacity, H] compute dtype; rows beyond the count are undefined
    rows_per_slot: [slots_per_rank] int64 on the compute device
    """

    x: Tensor
    rows_per_slot: Tensor


@dataclass(frozen=True)
class Dispatched:
    """Token rows as they arrive at one rank's experts.

    rows:   PackedRows or MaskedRows
    handle: what `combine` needs to send results home; meaningful to the transport that made it
    out:    where results may be written so that `combine` need not copy them, in the shape of rows.x, as long as
            handles are combined in the order of their dispatches; None: anywhere
    """

    rows: PackedRows | MaskedRows
    handle: object
    out: Tensor | None = None


@dataclass(frozen=True)
class BufferLimits:
    """What static buffers are sized for. slots_per_rank counts physical experts, redundant ones included."""

    max_tokens_per_rank: int
    hidden: int
    topk: int
    slots_per_rank: int


class AllToAll(Protocol):
    """Moves token rows to the ranks that hold their experts, and the results back.

    is_bitwise: whether results have the bits of every other such transport: added at home, in top-k order, in float32
    note:       what the operator should know of how it works here, one line; empty: nothing
    """

    @property
    def is_bitwise(self) -> bool: ...

    @property
    def note(self) -> str: ...

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        """Returns every rank's counts. counts: [n] int64, n equal on all ranks -> [R, n] int64, same device."""
        ...

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched]:
        """Sends each row to every slot that its ids name, and receives this rank's rows.

        hidden:       [T, H] compute dtype; T may differ from rank to rank, and be 0
        physical_ids: [T, K] int64, 0 <= id < P, -1 = none; the same id twice in one row sends the row twice; K is equal
                      on all ranks
        slot_counts:  [R, P] int64, rows of every rank for every slot, equal on all ranks; None: the transport learns
                      the sizes itself, by a round of its own
        weights:      [T, K] float32, what `combine` will get; needed with combine "rank_sum", else not looked at
        """
        ...

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        """Sends results home and adds them there, weighted, in top-k order in float32.

        With combine "rank_sum", a faster mode outside the bitwise class, each rank adds up what its own experts made of
        a token, rounds that sum to the wire, and home adds the sums in the order of ranks: one row for each (token,
        rank) travels instead of one for each (token, expert), and bits depend on where experts live.

        expert_out: like the x of the rows that `dispatch` gave
        weights:    [T, K] float32; the weight of a -1 entry is never read
        returns:    [T, H] dtype of expert_out; a row without any expert is zero
        """
        ...


@runtime_checkable
class FollowsSteps(Protocol):
    """A transport that must hear of the steps of the engine; all ranks tell it the same."""

    def begin_step(self, most_tokens: int) -> None:
        """Prepares for the calls of a step. most_tokens: of any rank in one dispatch, equal on all ranks"""
        ...

    def end_step(self) -> None:
        """Raises PeerError when rows of a peer did not come in this step, which is void then: nothing is sampled."""
        ...


@runtime_checkable
class MeasuresWaits(Protocol):
    """A transport that knows for whom it waited."""

    @property
    def waited_s(self) -> list[float]:
        """[R] seconds that this rank has waited for each other one since the start: its row of the wait matrix."""
        ...


def make_all_to_all(
    backend: str,
    group: EpGroup,
    slots_per_rank: int,
    dtype: torch.dtype,
    wire_dtype: str = "auto",
    max_tokens_per_rank: int | None = None,
    hidden: int | None = None,
    topk: int | None = None,
    deadline_s: float = 60.0,
    compiled: bool = True,
    masked: bool | None = None,
    combine: Combine = "ordered",
) -> AllToAll:
    """Returns the transport of that name.

    backend:             "auto" (see choose.py; logs why), "local", "collective", "low_latency" (shared memory among CPU
                         ranks of one host, NVSHMEM among GPUs), "cuda_ipc" (its kernels over the GPUs of one host),
                         "by_batch" (on GPUs: low_latency for small steps, collective for larger ones), "deepep" (an
                         installed DeepEP). A collective call, since ranks map each other's memory
    dtype:               compute dtype of hidden rows and expert outputs
    wire_dtype:          "auto" (compute dtype), "float32", "bf16", "fp8"; see wire.py
    max_tokens_per_rank, hidden, topk: most rows of one dispatch, and their shape; low_latency is sized by them
    deadline_s:          how long low_latency waits for a peer
    compiled:            let low_latency build a small C helper where it finds a compiler; the bits are the same
    masked:              True: masked slabs, which low_latency gives (a token must not name a slot twice); False: packed
                         rows; None: packed on CPUs, on GPUs what the transport gives
    combine:             "ordered": results are added at home, in top-k order; "rank_sum": see AllToAll.combine
    Raises ConfigError for names unknown here, for `local` on several ranks, for rows that the transport does not give,
    and for what it cannot do on these devices; CapacityError when buffers do not fit.
    """
    from moe_serve.dispatch.wire import make_wire

    wire = make_wire(wire_dtype, dtype)
    limits: BufferLimits | None = None
    if max_tokens_per_rank is not None and hidden is not None and topk is not None:
        limits = BufferLimits(max_tokens_per_rank, hidden, topk, slots_per_rank)
    on_gpu = group.device.type == "cuda"
    if backend == "auto":
        from moe_serve.dispatch.choose import choose_backend

        choice = choose_backend(group, limits, dtype, wire_dtype, masked, combine)
        backend = choice.backend
        get_logger(__name__).info("dispatch.backend auto: %s (%s)", backend, choice.why)
    _check_rows(backend, on_gpu, masked)
    check_combine(backend, on_gpu, combine)
    if backend in ("cuda_ipc", "by_batch") and not on_gpu:
        raise ConfigError(f"dispatch.backend {backend} runs on GPUs only; set dispatch.backend: auto")
    if backend in ("low_latency", "cuda_ipc", "by_batch", "deepep") and limits is None:
        raise ConfigError(f"dispatch.backend {backend} needs max_tokens_per_rank, hidden and topk for its buffers")
    match backend:
        case "local":
            from moe_serve.dispatch.local import LocalAllToAll

            if group.num_ranks != 1:
                raise ConfigError(
                    f"dispatch.backend is local but there are {group.num_ranks} ranks; local serves one rank: "
                    "set dispatch.backend: auto"
                )
            return LocalAllToAll(slots_per_rank, wire, combine=combine)
        case "collective":
            from moe_serve.dispatch.collective import CollectiveAllToAll

            return CollectiveAllToAll(group, slots_per_rank, wire, combine)
        case "low_latency" if limits and not on_gpu:
            from moe_serve.dispatch.buffers import buffer_sizes
            from moe_serve.dispatch.low_latency import make_low_latency

            for line in buffer_sizes(group.num_ranks, limits, wire).lines():
                get_logger(__name__).info("%s", line)
            return make_low_latency(group, limits, dtype, wire, deadline_s, compiled, bool(masked), combine)
        case "low_latency" | "cuda_ipc" | "by_batch" if limits:
            from moe_serve.dispatch.low_latency_gpu import make_gpu_by_batch, make_gpu_low_latency

            if backend == "by_batch":
                return make_gpu_by_batch(group, limits, dtype, wire_dtype, deadline_s)
            memory = "ipc" if backend == "cuda_ipc" else "nvshmem"
            return make_gpu_low_latency(group, limits, dtype, wire_dtype, deadline_s, memory)
        case "deepep" if limits:
            from moe_serve.dispatch.deepep import make_deepep

            return make_deepep(group, limits, dtype, wire_dtype)
        case _:
            known = "auto, local, collective, low_latency, cuda_ipc, deepep"
            raise ConfigError(f"dispatch.backend is {backend!r}; choose one of {known}")


def check_combine(backend: str, on_gpu: bool, combine: Combine) -> None:
    """Raises ConfigError where a transport does not add results where dispatch.combine says."""
    if combine == "rank_sum" and (backend == "deepep" or (on_gpu and backend not in ("local", "collective"))):
        raise ConfigError(
            f"dispatch.combine is rank_sum but {backend} adds results its own way; set dispatch.combine: ordered, or "
            "dispatch.backend: collective"
        )


def _check_rows(backend: str, on_gpu: bool, masked: bool | None) -> None:
    """Raises ConfigError where the form of rows that is asked for is not what a transport gives."""
    slabs_only = backend in ("cuda_ipc", "by_batch") or (backend == "low_latency" and on_gpu)
    if masked is False and slabs_only:
        raise ConfigError(
            f"dispatch.rows is packed but {backend} gives masked slabs on GPUs; set dispatch.rows: auto, or "
            "dispatch.backend: collective"
        )
    if masked and backend not in ("low_latency", "cuda_ipc"):
        raise ConfigError(
            f"dispatch.rows is masked but {backend}, which serves here, does not give slabs for every step; set "
            "dispatch.rows: auto, or dispatch.backend: low_latency"
        )
