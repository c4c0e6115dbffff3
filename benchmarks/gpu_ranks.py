"""Rows between processes on the GPUs of one machine, by each transport; a part of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu_ranks TRANSPORT [--ranks N]

TRANSPORT: cuda_ipc, nvshmem or nccl. Each rank is a process: on a GPU of its own, or all on the one that there is
(nccl: one rank on each). Experts return the rows that they get, so what comes home is each row times the sum of its
weights; that is checked before anything is timed. NCCL's own all-to-all of the same bytes stands beside it, where every
rank has its GPU.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_timing import BF16, HIDDEN, TOPK, Row, check_close, tell, time_us
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all

BACKENDS = {"cuda_ipc": "cuda_ipc", "nvshmem": "low_latency", "nccl": "collective"}
SLOTS_PER_RANK, REPEATS, WAIT_S = 16, 50, 60
TOKENS = (1, 8, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", choices=BACKENDS)
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, and two on a single one")
    parser.add_argument("--rows", type=Path, help="append each row there, as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("this machine has no CUDA device")
    num_ranks = arguments.ranks or (gpus if gpus > 1 or arguments.transport == "nccl" else 2)
    if arguments.rank is not None:
        run_rank(arguments.transport, arguments.rank, num_ranks, arguments.store, arguments.rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_ranks", *sys.argv[1:], "--rank", str(rank), "--store",
                 f"{folder}/store"]
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def run_rank(transport: str, rank: int, num_ranks: int, store: str, file: Path | None) -> None:
    """Is one rank; rank 0 prints rows and writes them."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    backend = "nccl" if transport == "nccl" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=WAIT_S),
    )
    group = EpGroup(rank, num_ranks, device, dist.group.WORLD)
    for row in measured(transport, group):
        if rank == 0:
            tell(row, file)
    dist.barrier()  # nobody leaves while a peer may still write into its region
    os._exit(0)  # as ranks end: libraries of communication may wait for each other


def measured(transport: str, group: EpGroup) -> Iterator[Row]:
    apart = torch.cuda.device_count() >= group.num_ranks
    where = f"{group.num_ranks} ranks on {'a GPU each' if apart else 'one GPU'}, H {HIDDEN}, top-{TOPK}"
    limits = BufferLimits(max(TOKENS), HIDDEN, TOPK, SLOTS_PER_RANK)
    request = TransportRequest(BACKENDS[transport], limits, BF16, "bf16", deadline_s=30)
    all_to_all = make_all_to_all(group, request)
    for num_tokens in TOKENS:
        draw = torch.Generator().manual_seed(group.rank)
        x = torch.randn(num_tokens, HIDDEN, generator=draw).to(BF16).to(group.device)
        num_slots = group.num_ranks * SLOTS_PER_RANK
        ids = torch.rand(num_tokens, num_slots, generator=draw).argsort(1)[:, :TOPK].contiguous().to(group.device)
        weights = torch.rand(num_tokens, TOPK, generator=draw).to(group.device)
        got = there_and_back(all_to_all, x, ids, weights)
        check_close(got, x.double() * weights.sum(1, keepdim=True), 1e-2, f"{transport}, {num_tokens} tokens")
        dist.barrier(group.process_group)
        micros = time_us([lambda x=x, ids=ids, weights=weights: there_and_back(all_to_all, x, ids, weights)], REPEATS)
        moved = 2 * num_tokens * TOPK * HIDDEN * 2
        ratio = None
        if apart:
            of_nccl = nccl_us(moved // 2, group)
            ratio = of_nccl / micros
            yield Row(f"NCCL's all-to-all twice, the same bytes, {num_tokens} tokens", of_nccl, "us", conditions=where)
        yield Row(
            f"{transport}: dispatch and combine, {num_tokens} tokens", micros, "us", "", None, where, of_nccl=ratio
        )


def there_and_back(all_to_all: AnyAllToAll, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns each row times the sum of its weights, through experts that return what they get."""
    all_to_all.begin_step(max(TOKENS))
    arrived = all_to_all.dispatch(x, ids).wait()
    out = all_to_all.combine(arrived.rows.x, weights, arrived.handle).wait()
    all_to_all.end_step()
    all_to_all.check_step()
    return out


def nccl_us(num_bytes: int, group: EpGroup) -> float:
    """Returns the time of two all-to-alls over NCCL, in each of which a rank sends so many bytes."""
    own = dist.new_group(backend="nccl")
    each = max(num_bytes // group.num_ranks, 1)
    data = torch.zeros(each * group.num_ranks, dtype=torch.uint8, device=group.device)
    out = torch.empty_like(data)

    def twice() -> None:
        dist.all_to_all_single(out, data, group=own)
        dist.all_to_all_single(data, out, group=own)

    twice()
    return time_us([twice], REPEATS)


if __name__ == "__main__":
    main()
