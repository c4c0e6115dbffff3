"""`moe-serve bench` against the demo model as it is served: closed loop, Poisson arrivals, shared prefixes.

The server and the tool share the machine's cores, so that these are figures of the whole, not of the server alone.

python -m benchmarks.client_load
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from benchmarks.http_streams import _server

COMMON = ("--tokenizer", "demo", "--ignore-eos", "--output-len", "64", "--goodput", "ttft:500", "tpot:30")
LOADS = {
    "8 clients, 128 prompt tokens": ("--max-concurrency", "8", "--input-len", "128"),
    "Poisson, 6 per s, 64 to 192 prompt tokens": ("--request-rate", "6", "--input-len", "64-192"),
    "8 clients, 256 of 288 prompt tokens shared": (
        "--max-concurrency", "8", "--input-len", "32", "--random-prefix-len", "256"
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96, help="of each load")
    args = parser.parse_args()
    facts = conditions("aiohttp", "uvicorn")
    with _server(["parallel.num_ranks=2", "cache.memory_gib=0.2"]) as port:
        rows = []
        for seed, (name, flags) in enumerate(LOADS.items()):  # else prompts of one load were in the cache of the next
            found = _run(port, [*flags, "--seed", str(seed), "--num-prompts", str(args.requests)])
            rows.append(_row(name, found))
    notes = (
        f"Demo model, 2 ranks, 64 output tokens, {args.requests} requests of each load; milliseconds, p50 / p99. "
        f"Goodput: TTFT up to 500 ms and TPOT up to 30 ms. Load average at the end: {os.getloadavg()[0]:.2f}."
    )
    print(save("client_load", "`moe-serve bench` on the demo model", rows, facts, notes, per_cpu=True))


def _run(port: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        address = ["--base-url", f"http://127.0.0.1:{port}", "--json", str(file)]
        command = [sys.executable, "-m", "moe_serve", "bench", *address, *flags, *COMMON]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def _row(name: str, found: dict[str, Any]) -> dict[str, object]:
    latencies = {
        key.upper(): f"{found[f'p50_{key}_ms']:.1f} / {found[f'p99_{key}_ms']:.1f}" for key in ("ttft", "tpot", "e2el")
    }
    return {
        "load": name,
        "requests per s": f"{found['request_throughput']:.1f}",
        "within the SLO, per s": f"{found['request_goodput']:.1f}",
        "output tokens per s": f"{found['output_throughput']:.0f}",
        "prompt tokens from the cache": f"{found['total_cached_tokens'] / found['total_input_tokens']:.0%}",
        **latencies,
        "sent late p99, ms": f"{found['p99_sent_late_ms']:.1f}",
        "CPU of the tool": f"{found['client_cpu_share']:.0%} of a core",
    }


if __name__ == "__main__":
    main()
