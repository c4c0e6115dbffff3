"""The transport over an installed DeepEP, behind the same contract. Never required; bf16 rows on CUDA ranks.

It chooses one of three modes:

    low_latency  V1 `Buffer.low_latency_*`: masked slabs, receive hooks. Its weighted reduction is outside the bitwise
                 class, since it adds in an order of its own.
    normal       V1 `Buffer.dispatch / combine`
    elastic      V2 `ElasticBuffer`, expanded layout

DeepEP's normal and elastic combine sum a token's results without weights, or need the weights with the dispatch, where
this contract does not have them. So in these modes every (token, expert) pair is sent as a token with one expert: its
result comes back alone and is added here in top-k order, with the bits of every other transport. That sends a row per
expert where DeepEP would send one per rank; its own reduction would be the next step for speed.

Limits are checked before the buffers are made, with a message that says what to install or set.
"""

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AllToAll,
    BufferLimits,
    Deferred,
    Dispatched,
    EpGroup,
    MaskedRows,
    PackedRows,
    Pending,
    TransportRequest,
)
from moe_serve.dispatch.buffer_sizes import check_capacity
from moe_serve.dispatch.capabilities import MASKED, PACKED, TRANSPORTS
from moe_serve.dispatch.collective import CollectiveAllToAll
from moe_serve.dispatch.deepep.checks import INSTALL, LOW_LATENCY_HIDDEN, LOW_LATENCY_TOPK, look, problems
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import CapacityError, ConfigError
from moe_serve.kernels.rows import weighted_sum
from moe_serve.log import get_logger

MOST_LOW_LATENCY_TOKENS = 512  # above, the normal kernels are faster and the buffers get large
MOST_LOW_LATENCY_BYTES = 16 * (2**31 - 1)  # DeepEP counts 16-byte words in an int


@dataclass(frozen=True)
class DeepEpHandle:
    """theirs: DeepEP's own handle"""

    theirs: Any
    ids: Tensor  # [T, K] slots
    order: Tensor | None = None  # [M] placed row -> arrived row, where they differ


class DeepEpAllToAll(AllToAll[DeepEpHandle]):
    """AllToAll over one DeepEP buffer."""

    def __init__(self, group: EpGroup, limits: BufferLimits, fp8: bool, mode: str, library: ModuleType):
        """fp8: rows of a dispatch, low_latency only;  library: the module deep_ep

        Raises CapacityError when DeepEP could not count the bytes of the buffers.
        """
        low_latency = mode == "low_latency"
        # DeepEP has two low-latency buffers, and no more.
        self.capabilities = replace(
            TRANSPORTS["deepep"],
            rows=MASKED if low_latency else PACKED,
            bitwise=not low_latency,
            live_handles=2 if low_latency else 3,
        )
        adds = "added by DeepEP in its own order: bits may differ" if low_latency else "added here in top-k order"
        self.note = f"DeepEP {getattr(library, '__version__', 'of unknown version')}, {mode}; results {adds}"
        self._limits, self._fp8, self._mode = limits, fp8, mode
        self._num_slots = group.num_ranks * limits.slots_per_rank
        self._counts = CollectiveAllToAll(group, limits.slots_per_rank, make_wire("auto", torch.bfloat16))
        self._buffer = _make_buffer(group, limits, mode, library)

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return self._counts.exchange_counts(counts)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[DeepEpHandle]]:
        check_capacity(hidden.shape[0], self._limits.max_tokens_per_rank)
        match self._mode:
            case "low_latency":
                return self._dispatch_low_latency(hidden, physical_ids)
            case "normal":
                return self._dispatch_normal(hidden, physical_ids)
            case _:
                return self._dispatch_elastic(hidden, physical_ids)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: DeepEpHandle) -> Pending[Tensor]:
        if self._mode == "low_latency":
            combined, _, hook = self._buffer.low_latency_combine(
                expert_out, handle.ids, weights.masked_fill(handle.ids < 0, 0), handle.theirs, return_recv_hook=True
            )
            return Deferred(lambda: _after(hook, combined))
        rows = expert_out
        if handle.order is not None:  # back into the order of arrival
            rows = torch.empty_like(expert_out).index_copy_(0, handle.order, expert_out)
        # Each result is the sum of one pair.
        results, _, event = self._buffer.combine(rows, handle.theirs, **self._in_background())

        def receive() -> Tensor:
            event.current_stream_wait()
            index = torch.arange(handle.ids.numel(), device=results.device).view(handle.ids.shape)
            return weighted_sum(results, index.masked_fill(handle.ids < 0, -1), weights)

        return Deferred(receive)

    def _dispatch_low_latency(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched[DeepEpHandle]]:
        received, counts, theirs, _, hook = self._buffer.low_latency_dispatch(
            hidden, ids, self._limits.max_tokens_per_rank, self._num_slots, use_fp8=self._fp8, return_recv_hook=True
        )

        def receive() -> Dispatched[DeepEpHandle]:
            hook()
            x = _dequantise(*received) if self._fp8 else received
            return Dispatched(MaskedRows(x, counts.to(torch.int64)), DeepEpHandle(theirs, ids))

        return Deferred(receive)

    def _dispatch_normal(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched[DeepEpHandle]]:
        rows, pairs = self._pairs(hidden, ids)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(pairs, self._num_slots)
        x, local_ids, _, counts, theirs, event = self._buffer.dispatch(
            rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=pairs,
            topk_weights=torch.ones(pairs.shape, dtype=torch.float32, device=pairs.device),
            async_finish=True,
        )

        def receive() -> Dispatched[DeepEpHandle]:
            event.current_stream_wait()
            # Rows arrive by source rank; a stable sort keeps that order within a slot.
            order = torch.sort(local_ids.reshape(-1), stable=True).indices
            packed = PackedRows(x.index_select(0, order), torch.tensor(counts, dtype=torch.int64))
            return Dispatched(packed, DeepEpHandle(theirs, ids, order))

        return Deferred(receive)

    def _dispatch_elastic(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched[DeepEpHandle]]:
        rows, pairs = self._pairs(hidden, ids)
        x, _, _, theirs, event = self._buffer.dispatch(
            rows, topk_idx=pairs, num_experts=self._num_slots, expert_alignment=1, do_cpu_sync=True, do_expand=True,
            **self._in_background(),
        )  # fmt: skip

        def receive() -> Dispatched[DeepEpHandle]:
            event.current_stream_wait()
            counts = torch.tensor(theirs.num_recv_tokens_per_expert_list, dtype=torch.int64)
            return Dispatched(PackedRows(x, counts), DeepEpHandle(theirs, ids))

        return Deferred(receive)

    def _pairs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a row and one slot for every (token, k): [T * K, H] and [T * K, 1]."""
        return hidden.repeat_interleave(ids.shape[1], dim=0), ids.reshape(-1, 1)

    def _in_background(self) -> dict[str, bool]:
        return {"async_finish": True} if self._mode == "normal" else {"async_with_compute_stream": True}

    def close(self) -> None:
        self._buffer.destroy()  # DeepEP's destructor could hang while an exception is handled


def make_deepep(group: EpGroup, request: TransportRequest) -> DeepEpAllToAll:
    """Returns the transport over the installed DeepEP; a collective call.

    Raises ConfigError saying all that is to be installed or set, CapacityError when buffers would be too large.
    """
    library = _load()
    mode = choose_mode(library, request.limits)
    wrong = problems(library, group, request, mode, look(group))
    if wrong:
        raise ConfigError(f"dispatch.backend deepep cannot serve here: {'. '.join(dict.fromkeys(wrong))}")
    transport = DeepEpAllToAll(group, request.limits, request.wire_dtype == "fp8", mode, library)
    get_logger(__name__).info("dispatch.backend deepep: %s", transport.note)
    return transport


def choose_mode(library: ModuleType, limits: BufferLimits) -> str:
    """Returns low_latency where all steps are small, else what the installed DeepEP has for large ones."""
    fits = limits.topk <= LOW_LATENCY_TOPK and limits.hidden in LOW_LATENCY_HIDDEN
    if fits and limits.max_tokens_per_rank <= MOST_LOW_LATENCY_TOKENS and hasattr(library, "Buffer"):
        return "low_latency"
    return "elastic" if hasattr(library, "ElasticBuffer") else "normal"


def _make_buffer(group: EpGroup, limits: BufferLimits, mode: str, library: ModuleType) -> Any:
    """Returns DeepEP's buffer for a mode."""
    num_ranks, tokens, hidden = group.num_ranks, limits.max_tokens_per_rank, limits.hidden
    match mode:
        case "low_latency":
            num_slots = num_ranks * limits.slots_per_rank
            size = library.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, num_slots)
            if size > MOST_LOW_LATENCY_BYTES:
                raise CapacityError(
                    f"DeepEP's low-latency buffers would take {size / 2**30:.1f} GiB for {tokens} tokens, it can "
                    "count 32; lower dispatch.max_tokens_per_rank"
                )
            return library.Buffer(
                group.process_group,
                num_rdma_bytes=size,
                low_latency_mode=True,
                num_qps_per_rank=limits.slots_per_rank,
                explicitly_destroy=True,
            )
        case "normal":
            tuned = (library.Buffer.get_dispatch_config(num_ranks), library.Buffer.get_combine_config(num_ranks))
            return library.Buffer(
                group.process_group,
                num_nvl_bytes=max(each.get_nvl_buffer_size_hint(2 * hidden, num_ranks) for each in tuned),
                num_rdma_bytes=max(each.get_rdma_buffer_size_hint(2 * hidden, num_ranks) for each in tuned),
                explicitly_destroy=True,
            )
        case _:
            return library.ElasticBuffer(
                group.process_group,
                num_max_tokens_per_rank=tokens * limits.topk,
                hidden=hidden,
                num_topk=1,
                deterministic=True,
                explicitly_destroy=True,
            )


def _load() -> ModuleType:
    try:
        return importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(f"dispatch.backend is deepep but it cannot be imported ({error}); {INSTALL}") from None


def _dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """values: [S, C, H] e4m3, scales: [S, C, H / 128] float32 -> [S, C, H] bf16"""
    blocks = values.to(torch.float32).view(*values.shape[:2], -1, 128)
    x: Tensor = (blocks * scales[..., None]).flatten(2).to(torch.bfloat16)
    return x


def _after(hook: Any, value: Tensor) -> Tensor:
    hook()
    return value
