"""The capabilities of each transport, as data: the one place where such a rule stands.

The configuration, `auto` (choose.py), the factory (make.py), `moe-serve check`, the engine and the table in
docs/communication.md read this. It imports nothing, so the configuration can, without torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

Backend = Literal["auto", "local", "collective", "low_latency", "cuda_ipc", "deepep"]  # dispatch.backend
Rows = Literal["auto", "packed", "masked"]
Combine = Literal["ordered", "rank_sum"]


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a transport.

    backend:      the dispatch.backend that names it
    label:        its name for people
    devices:      kinds of device whose rows it carries
    rows:         forms of rows that may be asked for, "packed" or "masked"; empty: it chooses by itself
    combine:      where it can add the results of a token's experts, see dispatch.combine
    bitwise:      whether results of the ordered combine have the bits of every other bitwise transport
    min_ranks, max_ranks: how many ranks it joins; None: any number
    survives_lost_rank: whether the other ranks can go on when one is lost
    live_handles: how many handles may exist between a dispatch and the receipt of its combine
    keeps_rows: whether every row stays on its rank as it is, so that the caller may pack and add rows itself
    fuses: whether compiled code of the caller may carry rows itself, over the buffers of the transport
    """

    backend: str
    label: str
    rows: frozenset[str]
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    combine: frozenset[str] = frozenset({"ordered"})
    bitwise: bool = True
    min_ranks: int = 2
    max_ranks: int | None = None
    survives_lost_rank: bool = False
    live_handles: int = 3
    keeps_rows: bool = False
    fuses: bool = False


PACKED, MASKED = frozenset({"packed"}), frozenset({"masked"})
BOTH_COMBINES = frozenset({"ordered", "rank_sum"})
GPU = frozenset({"cuda"})

TRANSPORTS = {
    "local": Capabilities(
        "local", "local (rows stay on the rank)", PACKED, combine=BOTH_COMBINES, min_ranks=1, max_ranks=1
    ),
    "collective": Capabilities(
        "collective", "collective (torch.distributed)", PACKED, combine=BOTH_COMBINES, min_ranks=1
    ),
    "shm": Capabilities(
        "low_latency", "low_latency (shared memory)", PACKED | MASKED, frozenset({"cpu"}), BOTH_COMBINES,
        max_ranks=62,  # sets of ranks are the bits of one word
        survives_lost_rank=True,
    ),
    "hosts": Capabilities(
        "low_latency", "low_latency (shared memory, TCP between hosts)", PACKED | MASKED, frozenset({"cpu"}),
        BOTH_COMBINES, max_ranks=62, survives_lost_rank=True,
    ),
    "nvshmem": Capabilities("low_latency", "low_latency (NVSHMEM)", MASKED, GPU, live_handles=2),
    "cuda_ipc": Capabilities(
        "cuda_ipc", "cuda_ipc (GPUs of one host map each other's memory)", MASKED, GPU, live_handles=2
    ),
    # NVSHMEM for small steps and NCCL for large ones, so the form of rows follows the step.
    "by_batch": Capabilities("auto", "low_latency (NVSHMEM) for small steps, collective (NCCL) for large ones",
                             frozenset(), GPU, live_handles=2),
    # Rows, bits and handles depend on the mode that it chooses; this is the least that holds in all of them.
    "deepep": Capabilities("deepep", "deepep", frozenset(), GPU, bitwise=False, live_handles=2),
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """The properties that a configuration asks of a transport.

    device: "cpu", "cuda", or "auto" where it is not known yet
    """

    num_ranks: int
    device: str
    rows: Rows = "auto"
    combine: Combine = "ordered"
    batch_invariant: bool = False


def survivors() -> str:
    """Returns the transports whose other ranks can go on when one is lost, for people."""
    return " or ".join(can.label for can in TRANSPORTS.values() if can.survives_lost_rank)


def transports_of(backend: str, device: str, num_ranks: int) -> tuple[str, ...]:
    """Returns the transports that may serve behind a dispatch.backend, or the transport of that name."""
    match backend:
        case "auto" if num_ranks == 1:
            return ("local",)
        case "auto":
            return ("nvshmem", "by_batch", "collective") if device == "cuda" else ("shm", "hosts", "collective")
        case "low_latency":
            return ("nvshmem",) if device == "cuda" else ("shm", "hosts")
        case _:
            return (backend,) if backend in TRANSPORTS else ()


def refusals(backend: str, wanted: Wanted) -> list[str]:
    """Returns why no transport behind a dispatch.backend can do what is wanted, with the fixes; empty: one can."""
    devices = ("cpu", "cuda") if wanted.device == "auto" else (wanted.device,)
    found = [
        problems(name, replace(wanted, device=device))
        for device in devices
        for name in transports_of(backend, device, wanted.num_ranks)
    ]
    return min(found, key=len)


def problems(transport: str, wanted: Wanted) -> list[str]:
    """Returns what a transport cannot do of what is wanted, each with its fix; empty: nothing."""
    can = TRANSPORTS[transport]
    name = can.backend if can.backend != "auto" else transport
    return [
        *_rank_problems(name, can, wanted),
        *_row_problems(name, can, wanted),
        *_sum_problems(name, can, wanted),
    ]


def _rank_problems(name: str, can: Capabilities, wanted: Wanted) -> list[str]:
    found = []
    if len(can.devices) == 1 and wanted.device not in can.devices:
        only = "GPUs" if can.devices == GPU else "CPUs"
        found.append(f"dispatch.backend {name} runs on {only} only; set dispatch.backend: auto")
    if wanted.num_ranks < can.min_ranks:
        found.append(
            f"dispatch.backend is {name}, which joins several ranks, but parallel.num_ranks is {wanted.num_ranks}; set "
            "dispatch.backend: auto"
        )
    if can.max_ranks == 1 < wanted.num_ranks:
        found.append(
            f"dispatch.backend is {name} but parallel.num_ranks is {wanted.num_ranks}; {name} serves one rank: set "
            "dispatch.backend: auto"
        )
    elif can.max_ranks is not None and wanted.num_ranks > can.max_ranks:
        found.append(
            f"dispatch.backend {name} joins up to {can.max_ranks} CPU ranks and parallel.num_ranks is "
            f"{wanted.num_ranks}; set dispatch.backend: collective, or use fewer ranks with more threads"
        )
    return found


def _row_problems(name: str, can: Capabilities, wanted: Wanted) -> list[str]:
    if wanted.rows == "auto" or wanted.rows in can.rows:
        return []
    if wanted.rows == "packed":
        gives = "gives masked slabs only" if can.rows == MASKED else "chooses the form of rows itself"
        return [f"dispatch.rows is packed but {name} {gives}; set dispatch.rows: auto, or dispatch.backend: collective"]
    if wanted.num_ranks == 1:
        return [
            "dispatch.rows is masked but parallel.num_ranks is 1, and one rank's rows are packed; set dispatch.rows: "
            "auto"
        ]
    return [
        f"dispatch.rows is masked but {name} does not give masked slabs for every step; set dispatch.rows: auto, or "
        "dispatch.backend: low_latency"
    ]


def _sum_problems(name: str, can: Capabilities, wanted: Wanted) -> list[str]:
    found = []
    if wanted.combine not in can.combine:
        found.append(
            f"dispatch.combine is {wanted.combine} but {name} adds results its own way; set dispatch.combine: ordered, "
            "or dispatch.backend: collective"
        )
    if wanted.batch_invariant and wanted.combine == "rank_sum":
        found.append(
            "dispatch.combine rank_sum adds expert outputs in an order that depends on where experts live, which "
            "engine.numerics batch_invariant excludes; set dispatch.combine: ordered, or engine.numerics: fast"
        )
    if wanted.batch_invariant and not can.bitwise:
        found.append(
            f"dispatch.backend {name} adds expert outputs in an order of its own, which engine.numerics "
            "batch_invariant excludes; set dispatch.backend: auto, or engine.numerics: fast"
        )
    return found
