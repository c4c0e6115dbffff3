"""One copy of the weights for all ranks of a host: times of starts, memory of ranks, and when a killed one is back.

    python -m benchmarks.weight_copy [--layers 6] [--ranks 4] [--kills 5] [--folder FOLDER]

Serves random weights of the shapes of Qwen3-30B-A3B with fewer layers, packed as bfloat16, by `moe-serve serve`:

    none     each rank has its own; starts, and restarts of a rank, draw and pack them
    new      a file in a folder, which the first start makes
    again    the same file, in the cache of the system as the first start has left it
    cold     the same file, of which the system has forgotten all pages: what reading takes is measured beside it

Memory is the sum of Pss of the ranks once each has answered, over the bytes of the file. Then ranks are killed, one
after the other: until all take part again, and what its new process has used of a core meanwhile.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from moe_serve.launcher.rank_env import free_port
from moe_serve.process_facts import core_seconds

_SHAPES = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "hidden_size": 2048, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_START_S, _BACK_S = 1800.0, 120.0
_SPARE_S = 12.0  # after which the next spare process waits


class Server:
    """`moe-serve serve`, for a `with` block. ready_s: from its start until it was ready"""

    def __init__(self, model: Path, num_ranks: int, cache: str):
        self.port = free_port()
        settings = {
            "model.path": model, "model.load_format": "dummy", "model.skip_tokenizer": True,
            "model.weight_cache": cache, "parallel.num_ranks": num_ranks,
            "parallel.threads_per_rank": 1, "cache.num_blocks": 64,
            "eplb.num_redundant_experts": 128, "engine.max_batch_tokens": 64, "engine.max_running_requests": 8,
            "server.port": self.port, "launcher.max_restarts": 1000,
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "moe_serve",
            "serve",
            *(f"--set={name}={each}" for name, each in settings.items()),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it is read where the server ends by itself)
        started_s = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log)
        self.wait(num_ranks, _START_S)
        self.ready_s = time.perf_counter() - started_s

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *args: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def pids(self) -> dict[int, int]:
        """Returns the processes of the ranks that take part."""
        return {each["rank"]: each["pid"] for each in self.info()["ranks"] if each["phase"] == "ready"}

    def wait(self, num_ranks: int, timeout_s: float, gone: int = 0) -> None:
        """Waits until so many ranks take part. gone: a process that is none of them"""
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            if self._process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(self._log.read().decode()[-2000:])
            with contextlib.suppress(OSError):
                if self.info()["state"] == "ready":
                    pids = self.pids()
                    if len(pids) == num_ranks and gone not in pids.values():
                        return
            time.sleep(0.02)
        raise TimeoutError(f"not all ranks serve after {timeout_s:g} s: {self.info()['ranks']}")

    def answer(self, num_ranks: int, num_tokens: int = 64) -> None:
        """Lets each rank compute, so that all experts are looked at."""
        for rank in range(num_ranks):
            ids = [(37 * rank + 11 * i) % 150000 for i in range(512)]
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True}}
            body["routed_dp_rank"] = rank
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/generate",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=600).read()

    def spare(self) -> int:
        """Returns the process that waits to replace a rank; 0: there is none."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if (
                    b"moe_serve.launcher.spare" in path.read_bytes()
                    and int(path.parent.name) not in self.pids().values()
                ):
                    return int(path.parent.name)
        return 0


def pss(pid: int, kind: str = "Pss") -> int:
    """Returns a sum over the memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind + ":")).split()[1]) << 10


@contextlib.contextmanager
def model_of(num_layers: int) -> Iterator[Path]:
    """Gives a folder with the configuration of such a model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_SHAPES | {"num_hidden_layers": num_layers}))
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
            read_s = ""
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
    with Server(model, args.ranks, cache) as server:
        server.answer(args.ranks)
        shared = server.info()["ranks"][0]["info"]["shared_weights"]
        num_bytes = shared["num_bytes"] if shared else 0
        pids = server.pids()
        together, own = sum(map(pss, pids.values())), sum(pss(pid, "Private_Dirty") for pid in pids.values())
        time.sleep(_SPARE_S)
        back_s, used_s, spare_bytes = [], [], 0
        for kill in range(args.kills):
            spare, rank = server.spare(), kill % args.ranks
            victim, before_s = server.pids()[rank], core_seconds(spare) if spare else 0.0
            spare_bytes = pss(spare) if spare else 0
            started_s = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            server.wait(args.ranks, _BACK_S, gone=victim)
            back_s.append(time.perf_counter() - started_s)
            used_s.append(core_seconds(server.pids()[rank]) - before_s)
            time.sleep(_SPARE_S)
    return {
        "ready s": round(server.ready_s, 1),
        "copy GiB": round(num_bytes / 2**30, 2),
        "Pss of the ranks GiB": round(together / 2**30, 2),
        "over the copy": round(together / num_bytes, 3) if num_bytes else "",
        "their own GiB": round(own / 2**30, 2),
        "spare GiB": round(spare_bytes / 2**30, 2),
        "killed rank back s, median": round(statistics.median(back_s), 2) if back_s else "",
        "longest": round(max(back_s), 2) if back_s else "",
        "of a core, s": round(statistics.median(used_s), 2) if used_s else "",
    }


if __name__ == "__main__":
    main()
