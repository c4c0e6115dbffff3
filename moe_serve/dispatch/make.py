"""Makes the transport that `dispatch.backend` names; each branch imports what it needs."""

import torch

from moe_serve.dispatch.base import AllToAll, BufferLimits, Combine, EpGroup
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger


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
            from moe_serve.dispatch.shm.sizes import buffer_sizes
            from moe_serve.dispatch.shm.transport import make_shm

            for line in buffer_sizes(group.num_ranks, limits, wire).lines():
                get_logger(__name__).info("%s", line)
            return make_shm(group, limits, dtype, wire, deadline_s, compiled, bool(masked), combine)
        case "low_latency" | "cuda_ipc" | "by_batch" if limits:
            from moe_serve.dispatch.gpu.transport import make_gpu_by_batch, make_gpu_slabs

            if backend == "by_batch":
                return make_gpu_by_batch(group, limits, dtype, wire_dtype, deadline_s)
            memory = "ipc" if backend == "cuda_ipc" else "nvshmem"
            return make_gpu_slabs(group, limits, dtype, wire_dtype, deadline_s, memory)
        case "deepep" if limits:
            from moe_serve.dispatch.deepep.transport import make_deepep

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
