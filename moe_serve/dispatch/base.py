"""The contract of all transports: token rows go to the ranks that hold their experts, and results come back.

Words: T = num_tokens of this rank, H = hidden, K = topk, R = num_ranks, P = num_slots = R x slots_per_rank. A
physical id is a slot; slot s lives on rank s // slots_per_rank. -1 = no expert: such an entry is not sent, and adds
nothing. Nothing here knows of placements, models or logical experts. Transports carry bytes; `wire.py` encodes above
them.

Every call has two halves: the call itself issues the sends, `Pending.wait()` receives. Other work may run in between,
and several calls may be in flight; all ranks make the same calls in the same order and wait in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_serve.dispatch.capabilities import Capabilities, Combine, Rows, Wanted
from moe_serve.dispatch.membership import Membership
from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.dispatch.shared_files import SharedFiles

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.link import HostLink

T = TypeVar("T")
H = TypeVar("H")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class EpGroup:
    """The ranks among which experts are spread.

    rank: this one's ep_rank;  process_group: None on one rank, and on one that joins ranks that serve
    num_nodes: equal machines, ranks numbered one by one
    files: the shared memory that ranks which are started anew open; None: lost ranks are not started anew alone
    link:  this rank's connections with other hosts; None: all ranks are on one, or meet by collectives only
    streams: with ranks that serve, which are read from by one that is started anew; None where `files` is
    """

    rank: int
    num_ranks: int
    device: torch.device
    process_group: ProcessGroup | None = None
    num_nodes: int = 1
    files: SharedFiles | None = None
    link: "HostLink | None" = None
    streams: PeerStreams | None = None

    @property
    def is_replacement(self) -> bool:
        """Whether this rank takes the place of a dead one, beside others that serve."""
        return self.files is not None and self.files.is_replacement


class Pending(Protocol[T_co]):
    """A result that has not been received yet."""

    def wait(self) -> T_co:
        """Returns the result; blocks until it is here. May be called again."""
        ...


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A result that needs no receive."""

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
    """Rows without gaps, grouped by slot, in a slot by source rank, then by token.

    x:             [num_rows, H] compute dtype, or e4m3 with a scale
    rows_per_slot: [slots_per_rank] int64 on the CPU, summing to num_rows; or on the accelerator: what lies behind the
                   rows that it counts is undefined, before and after the experts
    scale:         [num_rows, ceil(H / 128)] float32, of rows that are quantised already; results are bfloat16 then
    """

    x: Tensor
    rows_per_slot: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class MaskedRows:
    """One slab for each slot, its first rows filled in the same order (decode; sizes are static).

    x:             [slots_per_rank, capacity, H], dtype as of PackedRows; rows beyond the count are undefined
    rows_per_slot: [slots_per_rank] int64 on the compute device
    scale:         [slots_per_rank, capacity, ceil(H / 128)] float32, as of PackedRows
    """

    x: Tensor
    rows_per_slot: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class Dispatched(Generic[H]):
    """Token rows as they arrive at one rank's experts.

    rows:   PackedRows or MaskedRows
    handle: what `combine` needs to send results back; a type of the transport that made it
    out:    where results may be written so that `combine` need not copy them, in the shape of rows.x, as long as
            handles are combined in the order of their dispatches; None: anywhere
    """

    rows: PackedRows | MaskedRows
    handle: H
    out: Tensor | None = None


@dataclass(frozen=True)
class BufferLimits:
    """The sizes of static buffers. slots_per_rank counts physical experts, redundant ones included."""

    max_tokens_per_rank: int
    hidden: int
    topk: int
    slots_per_rank: int


@dataclass(frozen=True)
class TransportRequest:
    """The request for a transport, the same on all ranks.

    backend:    a dispatch.backend, or the name of a transport in capabilities.py
    limits:     what static buffers are sized for
    dtype:      compute dtype of hidden rows and expert outputs
    wire_dtype: "auto" (compute dtype), "float32", "bf16", "fp8"; see wire.py
    rows:       form of rows that the experts get; "auto": what the transport gives, packed on CPUs
    combine:    where results are added; see AllToAll.combine
    deadline_s: how long the transport waits for a peer, where it has a deadline
    compiled:   let shared memory move rows by a C helper where a compiler is found; the bits are the same
    cpu_kernels: one rank packs and adds rows by the compiled CPU kernels; the bits are the same
    threads:    of this rank's CPU kernels
    fp8_rows:   experts take rows in e4m3 as they arrive, and give bfloat16
    """

    backend: str
    limits: BufferLimits
    dtype: torch.dtype
    wire_dtype: str = "auto"
    rows: Rows = "auto"
    combine: Combine = "ordered"
    deadline_s: float = 60.0
    compiled: bool = True
    cpu_kernels: bool = False
    threads: int = 1
    fp8_rows: bool = False

    def wanted(self, group: EpGroup) -> Wanted:
        """Returns what is asked of the transport, to be held against capabilities."""
        return Wanted(group.num_ranks, group.device.type, self.rows, self.combine)


class AllToAll(ABC, Generic[H]):
    """Moves token rows to the ranks that hold their experts, and the results back. H: the type of its handles.

    capabilities: what it can do as it was made
    note:         what the operator should know of how it works here, one line; empty: nothing
    membership:   who takes part, where the others can go on without a lost rank; None: a lost rank ends the epoch
    step_sizes:   one number of tokens for each path that a step may take, to warm all of them up
    """

    capabilities: Capabilities
    note: str = ""
    membership: Membership | None = None
    step_sizes: Sequence[int] = (0,)

    @abstractmethod
    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        """Returns every rank's counts, zeros for a lost one.

        counts: [n] int64, n equal on all ranks -> [R, n] int64, same device
        """

    @abstractmethod
    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[H]]:
        """Sends each row to every slot that its ids name, and receives this rank's rows.

        hidden:       [T, H] compute dtype; T may differ from rank to rank, and be 0
        physical_ids: [T, K] int64, 0 <= id < P, -1 = none; the same id twice in one row sends the row twice; K is equal
                      on all ranks
        slot_counts:  [R, P] int64, rows of every rank for every slot, equal on all ranks; None: the transport learns
                      the sizes itself, by a round of its own
        weights:      [T, K] float32, what `combine` will get; needed with combine "rank_sum", else not looked at
        """

    @abstractmethod
    def combine(self, expert_out: Tensor, weights: Tensor, handle: H) -> Pending[Tensor]:
        """Sends results back to the tokens' ranks and adds them there, weighted, in top-k order in float32.

        With combine "rank_sum", a faster mode outside the bitwise class, each rank adds up what its own experts made of
        a token and rounds that sum to the wire, and the token's rank adds the sums in the order of ranks. One row for
        each (token, rank) is sent instead of one for each (token, expert); bits depend on where experts live.

        expert_out: like the x of the rows that `dispatch` gave
        weights:    [T, K] float32; the weight of a -1 entry is never read
        returns:    [T, H] dtype of expert_out; a row without any expert is zero
        """

    @property
    def live_handles(self) -> int:
        """The number of handles that may exist in this step between a dispatch and the receipt of its combine."""
        return self.capabilities.live_handles

    @property
    def captures(self) -> bool:
        """Whether the calls of this step may be captured in a graph: the host reads nothing back in them."""
        return False

    @property
    def waited_s(self) -> list[float]:
        """[R] seconds that this rank has waited for each other one since the start; empty: not measured."""
        return []

    def begin_step(self, most_tokens: int) -> None:
        """Prepares for the calls of a step. most_tokens: of any rank in one dispatch, equal on all ranks"""

    def end_step(self) -> None:
        """Ends a step whose results have all been received; a GPU need not have computed them yet."""

    def check_step(self) -> None:
        """Raises PeerError when rows of a peer did not come in the step that ended: it is void, and none of its tokens
        is sent.

        Called when the host has read what it wants of the step, so that it waits for a GPU only once.
        """

    def close(self) -> None:
        """Gives buffers back. All ranks call it, after their last step."""


AnyAllToAll = AllToAll[Any]  # for callers that pass handles on without looking at them
