"""Makes the transport that `dispatch.backend` names; each branch imports what it needs."""

from typing import get_args

from moe_serve.dispatch.base import AnyAllToAll, EpGroup, TransportRequest
from moe_serve.dispatch.capabilities import Backend, problems, transports_of
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

log = get_logger(__name__)


def make_all_to_all(group: EpGroup, request: TransportRequest) -> AnyAllToAll:
    """Returns this rank's end of the transport; a collective call, since ranks map each other's memory.

    Raises ConfigError for an unknown backend and for what the transport cannot do here, CapacityError when its buffers
    do not fit.
    """
    wire = make_wire(request.wire_dtype, request.dtype)
    slots_per_rank = request.limits.slots_per_rank
    transport = _choose(group, request)
    refused = problems(transport, request.wanted(group))
    if refused:
        raise ConfigError(". ".join(refused))
    match transport:
        case "local" if request.cpu_kernels and request.combine == "ordered":
            from moe_serve.dispatch.local import OneRank

            return OneRank(slots_per_rank, wire)
        case "local" if group.device.type == "cuda" and request.combine == "ordered":
            from moe_serve.dispatch.local import OneGpu

            return OneGpu(slots_per_rank, wire, request.fp8_rows)
        case "local":
            from moe_serve.dispatch.local import LocalAllToAll

            return LocalAllToAll(slots_per_rank, wire, combine=request.combine)
        case "collective":
            from moe_serve.dispatch.collective import CollectiveAllToAll

            return CollectiveAllToAll(group, slots_per_rank, wire, request.combine, request.fp8_rows)
        case "shm" | "hosts":
            from moe_serve.dispatch.shm.region import buffer_sizes
            from moe_serve.dispatch.shm.transport import make_shm

            log.info("%s", buffer_sizes(group.num_ranks, request.limits, wire).line)
            return make_shm(group, request)
        case "nvshmem" | "cuda_ipc":
            from moe_serve.dispatch.gpu.transport import make_gpu_slabs

            return make_gpu_slabs(group, request, transport)
        case "by_batch":
            from moe_serve.dispatch.gpu.transport import make_gpu_by_batch

            return make_gpu_by_batch(group, request)
        case "deepep":
            from moe_serve.dispatch.deepep.transport import make_deepep

            return make_deepep(group, request)
        case _:
            raise AssertionError(f"no branch for {transport}")


def _choose(group: EpGroup, request: TransportRequest) -> str:
    """Returns the transport behind a backend, and logs the reason of auto."""
    if group.is_replacement:
        return "shm"  # what the others chose: no other transport can take a rank in
    if request.backend == "auto":
        from moe_serve.dispatch.choose import choose_transport

        choice = choose_transport(group, request)
        log.info("dispatch.backend auto: %s (%s)", choice.transport, choice.why)
        return choice.transport
    found = transports_of(request.backend, group.device.type, group.num_ranks)
    if not found:
        raise ConfigError(f"dispatch.backend is {request.backend!r}; choose one of {', '.join(get_args(Backend))}")
    return "hosts" if found[0] == "shm" and group.link is not None else found[0]
