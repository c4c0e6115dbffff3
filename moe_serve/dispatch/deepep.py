"""The transport over an installed DeepEP, behind the same protocol. Never required; bf16 rows on CUDA ranks.

Three of its ways, by name:

    low_latency  V1 `Buffer.low_latency_*`: masked slabs, receive hooks. Its weighted reduction is outside the bitwise
                 class: the order in which it adds is its own.
    normal       V1 `Buffer.dispatch / combine`
    elastic      V2 `ElasticBuffer`, expanded layout

DeepEP's normal and elastic combine add up a token's results without weights, or want the weights on the way out, where
this protocol does not have them. So there every (token, expert) pair travels as a token with one expert: its result
comes home alone, and is added here in top-k order, with the bits of every other transport. That sends a row per expert
where DeepEP would send one per rank; its own reduction is what one would add for speed.

Limits are checked when the transport is built, with a message that says what to install or set.
"""

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    BufferLimits,
    Deferred,
    Dispatched,
    EpGroup,
    MaskedRows,
    PackedRows,
    Pending,
)
from moe_serve.dispatch.collective import CollectiveAllToAll
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import CapacityError, ConfigError
from moe_serve.kernels.weighted_sum import weighted_sum

MODES = ("low_latency", "normal", "elastic")
MOST_LOW_LATENCY_TOKENS = 512  # above, the normal kernels are the faster ones and the buffers get large
MOST_LOW_LATENCY_TOPK = 11  # compiled into V1
NORMAL_BUFFER_BYTES = 1 << 30  # NVLink buffer of V1's normal kernels
_INSTALL = "install DeepEP from its repository (it has no official wheels), or set dispatch.backend: auto"


@dataclass(frozen=True)
class _Handle:
    theirs: Any
    ids: Tensor  # [T, K] slots
    order: Tensor | None = None  # [M] placed row -> arrived row, where they differ


class DeepEpAllToAll:
    """AllToAll over one DeepEP buffer."""

    def __init__(self, group: EpGroup, limits: BufferLimits, fp8: bool, mode: str, library: ModuleType):
        """fp8: on the way out, low_latency only;  library: the module deep_ep"""
        self._limits, self._fp8, self._mode = limits, fp8, mode
        self._num_slots = group.num_ranks * limits.slots_per_rank
        self._slots_per_rank = limits.slots_per_rank
        self._counts = CollectiveAllToAll(group, limits.slots_per_rank, make_wire("auto", torch.bfloat16))
        tokens, hidden = limits.max_tokens_per_rank, limits.hidden
        match mode:
            case "low_latency":
                size = library.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, group.num_ranks, self._num_slots)
                self._buffer = library.Buffer(
                    group.process_group,
                    num_rdma_bytes=size,
                    low_latency_mode=True,
                    num_qps_per_rank=limits.slots_per_rank,
                    explicitly_destroy=True,
                )
            case "normal":
                self._buffer = library.Buffer(
                    group.process_group, num_nvl_bytes=NORMAL_BUFFER_BYTES, explicitly_destroy=True
                )
            case _:
                self._buffer = library.ElasticBuffer(
                    group.process_group,
                    num_max_tokens_per_rank=tokens * limits.topk,
                    hidden=hidden,
                    num_topk=1,
                    deterministic=True,
                    explicitly_destroy=True,
                )

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return self._counts.exchange_counts(counts)

    def dispatch(self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None) -> Pending[Dispatched]:
        if hidden.shape[0] > self._limits.max_tokens_per_rank:
            raise CapacityError(
                f"{hidden.shape[0]} tokens in one dispatch, room for {self._limits.max_tokens_per_rank}; raise "
                "dispatch.max_tokens_per_rank, or run the step in chunks of it"
            )
        match self._mode:
            case "low_latency":
                return self._dispatch_low_latency(hidden, physical_ids)
            case "normal":
                return self._dispatch_normal(hidden, physical_ids)
            case _:
                return self._dispatch_elastic(hidden, physical_ids)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        assert isinstance(handle, _Handle), "the handle belongs to another transport"
        if self._mode == "low_latency":
            combined, _, hook = self._buffer.low_latency_combine(
                expert_out, handle.ids, weights.masked_fill(handle.ids < 0, 0), handle.theirs, return_recv_hook=True
            )
            return Deferred(lambda: _after(hook, combined))
        rows = expert_out
        if handle.order is not None:  # back into the order in which they came
            rows = torch.empty_like(expert_out).index_copy_(0, handle.order, expert_out)
        # As many results as there are pairs, each the sum of one.
        results, _, event = self._buffer.combine(rows, handle.theirs, **self._in_background())

        def receive() -> Tensor:
            event.current_stream_wait()
            index = torch.arange(handle.ids.numel(), device=results.device).view(handle.ids.shape)
            return weighted_sum(results, index.masked_fill(handle.ids < 0, -1), weights)

        return Deferred(receive)

    def _dispatch_low_latency(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched]:
        received, counts, theirs, _, hook = self._buffer.low_latency_dispatch(
            hidden, ids, self._limits.max_tokens_per_rank, self._num_slots, use_fp8=self._fp8, return_recv_hook=True
        )

        def receive() -> Dispatched:
            hook()
            x = _dequantise(*received) if self._fp8 else received
            return Dispatched(MaskedRows(x, counts.to(torch.int64)), _Handle(theirs, ids))

        return Deferred(receive)

    def _dispatch_normal(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched]:
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

        def receive() -> Dispatched:
            event.current_stream_wait()
            # They come by source rank; stable, so within a slot they stay so.
            order = torch.sort(local_ids.reshape(-1), stable=True).indices
            packed = PackedRows(x.index_select(0, order), torch.tensor(counts, dtype=torch.int64))
            return Dispatched(packed, _Handle(theirs, ids, order))

        return Deferred(receive)

    def _dispatch_elastic(self, hidden: Tensor, ids: Tensor) -> Pending[Dispatched]:
        rows, pairs = self._pairs(hidden, ids)
        x, _, _, theirs, event = self._buffer.dispatch(
            rows, topk_idx=pairs, num_experts=self._num_slots, expert_alignment=1, do_cpu_sync=True, do_expand=True,
            **self._in_background(),
        )  # fmt: skip

        def receive() -> Dispatched:
            event.current_stream_wait()
            counts = torch.tensor(theirs.num_recv_tokens_per_expert_list, dtype=torch.int64)
            return Dispatched(PackedRows(x, counts), _Handle(theirs, ids))

        return Deferred(receive)

    def _pairs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a row and one slot for every (token, k): [T * K, H] and [T * K, 1]."""
        return hidden.repeat_interleave(ids.shape[1], dim=0), ids.reshape(-1, 1)

    def _in_background(self) -> dict[str, bool]:
        return {"async_finish": True} if self._mode == "normal" else {"async_with_compute_stream": True}

    def close(self) -> None:
        """Gives the buffer back; DeepEP's destructor could hang while an exception is handled."""
        self._buffer.destroy()


def make_deepep(
    group: EpGroup, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, mode: str = "auto"
) -> DeepEpAllToAll:
    """Returns the transport over the installed DeepEP. Raises ConfigError saying what to install or to set."""
    library = _load()
    mode = _choose_mode(library, limits) if mode == "auto" else mode
    _check(library, group, limits, dtype, wire_dtype, mode)
    return DeepEpAllToAll(group, limits, wire_dtype == "fp8", mode, library)


def _load() -> ModuleType:
    try:
        return importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(f"dispatch.backend is deepep but it cannot be imported ({error}); {_INSTALL}") from None


def _choose_mode(library: ModuleType, limits: BufferLimits) -> str:
    small = limits.max_tokens_per_rank <= MOST_LOW_LATENCY_TOKENS and limits.topk <= MOST_LOW_LATENCY_TOPK
    if small and hasattr(library, "Buffer"):
        return "low_latency"
    return "elastic" if hasattr(library, "ElasticBuffer") else "normal"


def _check(
    library: ModuleType, group: EpGroup, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str, mode: str
) -> None:
    if mode not in MODES:
        raise ConfigError(f"DeepEP has no way {mode!r}; choose one of {', '.join(MODES)}")
    needed = "ElasticBuffer" if mode == "elastic" else "Buffer"
    if not hasattr(library, needed):
        raise ConfigError(f"the installed DeepEP has no {needed}, which {mode} needs; {_INSTALL}")
    if group.device.type != "cuda":
        raise ConfigError(
            f"dispatch.backend deepep needs CUDA ranks, this one computes on {group.device}; "
            "set dispatch.backend: low_latency"
        )
    if dtype != torch.bfloat16 or wire_dtype == "float32":
        raise ConfigError(
            f"DeepEP carries bf16 rows, here they are {str(dtype).removeprefix('torch.')} and dispatch.wire_dtype is "
            f"{wire_dtype}; set model.dtype: bfloat16 and dispatch.wire_dtype: auto"
        )
    if wire_dtype == "fp8" and (mode != "low_latency" or limits.hidden % 128):
        raise ConfigError(
            f"DeepEP takes fp8 rows here in low_latency and with hidden a multiple of 128, this is {mode} with "
            f"{limits.hidden}; set dispatch.wire_dtype: auto"
        )
    if mode == "low_latency":
        depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        if depth < 2 * (limits.max_tokens_per_rank + 1):
            raise ConfigError(
                f"NVSHMEM_QP_DEPTH is {depth} and {limits.max_tokens_per_rank} tokens need "
                f"{2 * (limits.max_tokens_per_rank + 1)}; raise it, or lower dispatch.max_tokens_per_rank"
            )
        if limits.topk > MOST_LOW_LATENCY_TOPK:
            raise ConfigError(
                f"DeepEP's low-latency kernels take up to {MOST_LOW_LATENCY_TOPK} experts per token, this model has "
                f"{limits.topk}; use its elastic way, or set dispatch.backend: auto"
            )


def _dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """values: [S, C, H] e4m3, scales: [S, C, H / 128] float32 -> [S, C, H] bf16"""
    blocks = values.to(torch.float32).view(*values.shape[:2], -1, 128)
    x: Tensor = (blocks * scales[..., None]).flatten(2).to(torch.bfloat16)
    return x


def _after(hook: Any, value: Tensor) -> Tensor:
    hook()
    return value
