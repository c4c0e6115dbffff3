"""One copy of the weights for all ranks of a host: times of starts, memory of ranks, and when a killed one is back.

    python -m benchmarks.weight_copy [--layers 6] [--ranks 4] [--kills 5] [--folder FOLDER]

Serves random weights of the shapes of Qwen3-30B-A3B with fewer layers, packed as bfloat16, by `moe-serve serve`:

    none     each rank has its own; starts, and restarts of a rank, draw and pack them
    new      a file in a folder, which the first start makes
    again    the same file, in the cache of the system as the first start has left it
    cold     the same file, of which the system has forgotten all pages: what reading takes is measured beside it

Memory is the sum of Pss of the ranks, and of the process that they are forked from (the fork server, whose part is
shown too), once each has answered, over the bytes of the file. Then ranks are killed, one after the other: until all
take part again, and what its new process has used of a core meanwhile.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from benchmarks.server import Server, pss
from moe_serve.process_facts import core_seconds
from tests.models.published import QWEN3_30B

_BACK_S = 120.0
_CALM_S = 2.0  # between kills


@contextlib.contextmanager
def model_of(num_layers: int) -> Iterator[Path]:
    """Gives a folder with the configuration of such a model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(QWEN3_30B | {"num_hidden_layers": num_layers, "max_position_embeddings": 4096})
        )
        yield Path(folder)


def forget_pages(path: Path) -> None:
    """Lets the system forget what it has read of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading_s(path: Path) -> float:
    """Returns the seconds that reading a file takes from the disk."""
    forget_pages(path)
    started_s, piece = time.perf_counter(), bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--folder", help="of the file; default: a temporary one")
    parser.add_argument("--ways", default="new,again,cold", help="of none, new, again, cold, in order")
    args = parser.parse_args()
    facts = conditions("moe-serve")
    rows = []
    with model_of(args.layers) as model, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for way in args.ways.split(","):
            cache = "none" if way == "none" else folder
            read_s: float | str = ""
            if way == "cold":
                (file,) = Path(folder).glob("*.weights")
                read_s = round(reading_s(file), 1)
                forget_pages(file)
            rows.append({"weights": way} | measure(model, cache, args) | {"reading the file s": read_s})
            print(rows[-1], flush=True)
    notes = (
        f"Random weights of Qwen3-30B-A3B's shapes with {args.layers} layers, bfloat16, {args.ranks} ranks with one "
        f"thread each, every expert on two ranks; {args.kills} kills. Load average at the end {os.getloadavg()[0]:.2f}."
    )
    print(save("weight_copy", "One copy of the weights on a host", rows, facts, notes))


def measure(model: Path, cache: str, args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "model.path": model, "model.load_format": "dummy", "model.skip_tokenizer": True, "model.weight_cache": cache,
        "parallel.num_ranks": args.ranks, "parallel.threads_per_rank": 1, "cache.num_blocks": 64,
        "eplb.num_redundant_experts": 128, "engine.max_batch_tokens": 64, "engine.max_running_requests": 8,
        "launcher.max_restarts": 1000,
    }  # fmt: skip
    with Server(settings) as server:
        server.answer()
        shared = server.info()["ranks"][0]["info"]["shared_weights"]
        num_bytes = shared["num_bytes"] if shared else 0
        pids = server.pids()
        everyone = [server.fork_server(), *pids.values()]
        together, own = sum(map(pss, everyone)), sum(pss(pid, "Pss_Anon") for pid in pids.values())
        program_bytes = pss(everyone[0])
        back_s, used_s = [], []
        for kill in range(args.kills):
            time.sleep(_CALM_S)
            rank = kill % args.ranks
            victim = server.pids()[rank]
            started_s = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            server.wait(_BACK_S, gone=victim)
            back_s.append(time.perf_counter() - started_s)
            used_s.append(core_seconds(server.pids()[rank]))
    return {
        "ready s": round(server.ready_s, 1),
        "copy GiB": round(num_bytes / 2**30, 2),
        "Pss of all GiB": round(together / 2**30, 2),
        "over the copy": round(together / num_bytes, 3) if num_bytes else "",
        "anonymous of the ranks GiB": round(own / 2**30, 2),
        "fork server MiB": round(program_bytes / 2**20),
        "killed rank back s, median": round(statistics.median(back_s), 2) if back_s else "",
        "longest": round(max(back_s), 2) if back_s else "",
        "of a core, s": round(statistics.median(used_s), 2) if used_s else "",
    }


if __name__ == "__main__":
    main()
