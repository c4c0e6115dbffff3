"""How long a rank that is started beside others waits for its experts: out of another rank's memory, or from the disk.

    python -m benchmarks.peer_experts [--rounds 3] [--layers 2]

Experts of the size of Qwen3-30B-A3B's in bfloat16, with random numbers. One process serves all of them and does nothing
else; this one reads them into its slots, packed. Sources take turns within a round.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import conditions, save
from moe_serve.dispatch.hosts.handshake import Address, listen
from moe_serve.dispatch.hosts.link import HostLink, Hosts
from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.engine.model.expert_sources import ExpertSources
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.peer_experts import ExpertServer, SlotChanges
from moe_serve.eplb.placement import Placement
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import ExpertReloader, ExpertToRead, load_weights

NUM_EXPERTS = 32
SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": NUM_EXPERTS}
KEY = b"a benchmark"
DEADLINE_S = 60.0
READER, SERVER = 0, 1  # ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = conditions("moe-serve")
    with tempfile.TemporaryDirectory() as folder:
        model = write_bench_model(Path(folder), "bfloat16", num_hidden_layers=args.layers, **SIZES)
        rows = measure(model, args.rounds)
    notes = (
        f"{args.layers * NUM_EXPERTS} experts, each read into a slot as the compiled kernels take it. From the files: "
        "read, looked through for numbers that are not finite, and packed; warm from the page cache, cold after the "
        "kernel was told to drop it. From memory: over a Unix socket as on one host, or over TCP on the loopback "
        "interface as between hosts, with sums at both ends. Chosen: as a rank does, with all of these at hand. `x` is "
        "the time from the files, warm or cold, over this one: medians of ratios within a round. Two processes on the "
        "cores; `load` is the load average at the end of all."
    )
    print(save("peer_experts", "Experts for a rank that is started beside others", rows, facts, notes))


def share_of(model: Path, rank: int) -> WeightShare:
    """Returns the share of a rank that has every expert, as the other one does."""
    spec = read_spec(model)
    placement = Placement.trivial(len(spec.moe_layer_ids), NUM_EXPERTS, 2, NUM_EXPERTS, spec.moe_layer_ids)
    stored = StoredWeights.of(spec, model)
    return WeightShare(spec, placement, rank, torch.float32, "cpu", "dense", stored)


def stores_of(model: Path, share: WeightShare) -> list[ExpertStore]:
    weights = load_weights(model, share)
    return [weights.store(layer) for layer in share.spec.moe_layer_ids]


def serve(model: Path, address: Address, pipe: Connection) -> None:
    """Serves experts until the pipe ends."""
    torch.set_num_threads(1)
    share = share_of(model, SERVER)
    stores = stores_of(model, share)
    listener = listen("127.0.0.1")
    link = HostLink(SERVER, Hosts.of([0, 1]), KEY, listener, DEADLINE_S)
    pipe.send(listener.getsockname()[:2])
    link.connect({READER: address}, DEADLINE_S)
    streams = PeerStreams(lambda rank: None, link)
    server = ExpertServer(
        streams, SERVER, stores, SlotChanges(), lambda: share.placement, lambda: b"", deadline_s=DEADLINE_S
    )
    pipe.send(streams.name)
    pipe.poll(None)
    server.close()
    link.close()


@contextmanager
def serving(model: Path) -> Iterator[tuple[PeerStreams, PeerStreams]]:
    """Yields the streams to a process with all experts, as on one host and as between two."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    listener = listen("127.0.0.1")
    process = context.Process(target=serve, args=(model, listener.getsockname()[:2], theirs), daemon=True)
    process.start()
    theirs.close()
    link = HostLink(READER, Hosts.of([0, 1]), KEY, listener, DEADLINE_S)
    link.connect({SERVER: ours.recv()}, DEADLINE_S)
    name = ours.recv()
    yield PeerStreams(lambda rank: name, None), PeerStreams(lambda rank: None, link)
    ours.close()
    process.join(DEADLINE_S)
    link.close()


def drop(model: Path) -> None:
    """Has the kernel forget the model's files."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(model: Path) -> None:
    """Has the kernel read the model's files."""
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def measure(model: Path, rounds: int) -> list[dict[str, Any]]:
    share = share_of(model, READER)
    stores = stores_of(model, share)
    experts = [ExpertToRead(row, expert, expert) for row in range(len(stores)) for expert in range(NUM_EXPERTS)]
    held = share.placement.without_ranks([READER])[0]
    num_bytes = len(experts) * stores[0].slot_bytes
    files, no_files = ExpertReloader(share, model), ExpertReloader(share, model / "gone")
    with serving(model) as (near, far):
        kinds = {
            "files, warm": (ExpertSources(files, READER, None, DEADLINE_S), warm),
            "files, cold": (ExpertSources(files, READER, None, DEADLINE_S), drop),
            "memory, same host": (ExpertSources(no_files, READER, near, DEADLINE_S), warm),
            "memory, over TCP": (ExpertSources(no_files, READER, far, DEADLINE_S), warm),
            "chosen, same host, warm files": (ExpertSources(files, READER, near, DEADLINE_S), warm),
            "chosen, same host, cold files": (ExpertSources(files, READER, near, DEADLINE_S), drop),
            "chosen, over TCP, cold files": (ExpertSources(files, READER, far, DEADLINE_S), drop),
        }
        taken_s: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(1 + rounds):  # the first one touches all memory
            for kind, (sources, prepare) in kinds.items():
                prepare(model)
                began_s = time.perf_counter()
                sources.read(experts, stores, held)
                taken_s[kind].append(time.perf_counter() - began_s)
    rows = []
    for kind, (sources, _) in kinds.items():
        took_s = taken_s[kind][1:]
        warm_s, cold_s = (taken_s[f"files, {how}"][1:] for how in ("warm", "cold"))
        rows.append(
            {
                "experts from": kind,
                "s": round(statistics.median(took_s), 2),
                "GB/s": round(num_bytes / statistics.median(took_s) / 1e9, 2),
                "x warm files": round(statistics.median(a / b for a, b in zip(warm_s, took_s, strict=True)), 2),
                "x cold files": round(statistics.median(a / b for a, b in zip(cold_s, took_s, strict=True)), 2),
                "in the last round": ", ".join(f"{num}: {name}" for name, num in sources.read_from.items()),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    return rows


if __name__ == "__main__":
    main()
