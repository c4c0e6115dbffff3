"""From the end of a prefill to the first step on a decode rank, and for which prompts that pays.

    python -m benchmarks.handover [--rounds 10] [--models bench,demo] [--far]

Serves a model by `moe-serve serve` with one prefill and one decode rank of one thread each, on an idle system: one
request at a time, each with a new prompt, greedy, streamed. The first token comes from the prefill rank, the second one
from the decode rank. So the *hand-over* is the time between them, without what one step of the decode rank takes (the
median between the tokens behind). The same requests go to a system whose decode rank computes every prompt itself:
`its prefill` is how long such a prompt holds up other requests there. A hand-over pays where it holds them up for less.
--far: each rank is on a host of its own, two network namespaces of this machine; needs root and `ip netns`.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from tests.launcher.hosts import make_hosts
from tests.launcher.running import Running

LAST_CHUNK = 1024  # tokens of engine.max_batch_tokens
LENGTHS = {"bench": (32, 64, 128, 256, 512, 1024, 2048), "demo": (32, 64, 128, 256, 512, 960)}
BYTES_PER_TOKEN = {"bench": 8 * 2 * 2 * 64 * 4, "demo": 5 * (48 + 16) * 4}  # of the KV cache, in float32
VOCABULARY = {"bench": 8000, "demo": 2000}
NUM_OUTPUT = 12


def times_of(client: httpx.Client, prompt: list[int]) -> list[float]:
    """Returns when each token came, in milliseconds after the request was sent."""
    params = {"max_new_tokens": NUM_OUTPUT, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    times: list[float] = []
    began_s = time.perf_counter()
    with client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            number = json.loads(line[6:])["meta_info"]["completion_tokens"]
            times += [1e3 * (time.perf_counter() - began_s)] * (number - len(times))
    return times


@contextlib.contextmanager
def serve(words: list[str], far: bool) -> Iterator[httpx.Client]:
    """Yields a client of a system. far: each role is on a host of its own"""
    if not far:
        with Running("moe_serve", ["serve", *words, "--port", "0"]) as running, running.client(timeout_s=120) as client:
            yield client
        return
    os.environ["MOE_SERVE_TOKEN"] = secrets.token_hex(32)
    with make_hosts(2) as (a, b):
        words = ["serve", *words, "--nnodes", "2", "--dist-init-addr", f"{a.address}:20000", "--node-rank"]
        first, second = a.start("moe_serve", *words, "0"), b.start("moe_serve", *words, "1")
        with first, second, a.network(), first.client(timeout_s=120) as client:
            yield client


def measure(name: str, path: list[str], from_tokens: int, rounds: int, far: bool) -> dict[int, list[list[float]]]:
    """Returns the times of each round by length of prompts. from_tokens: of prompts that the prefill rank computes"""
    draw = random.Random(0)
    settings = [f"--set=parallel.prefill_from_tokens={from_tokens}", "--set=parallel.threads_per_rank=1"]
    ranks = ["--prefill-ranks", "1", "--decode-ranks", "1", "--device", "cpu"]
    found: dict[int, list[list[float]]] = {length: [] for length in LENGTHS[name]}
    with serve([*path, *ranks, *settings], far) as client:
        for number in range(rounds + 1):
            for length in LENGTHS[name]:
                times = times_of(client, draw.choices(range(3, VOCABULARY[name]), k=length))
                if number:  # the first round meets cold pools
                    found[length].append(times)
    return found


def copying_ms(num_bytes: int) -> float:
    """Returns the time of copying so many bytes, as torch does it on one thread."""
    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(30):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default="bench,demo")
    parser.add_argument("--far", action="store_true")
    args = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            path: list[str] = []
            if name == "bench":
                model = write_bench_model(Path(scratch), max_position_embeddings=4096)
                path = ["--model", str(model), "--skip-tokenizer-init"]
            handed = measure(name, path, 1, args.rounds, args.far)
            local = measure(name, path, 1 << 30, args.rounds, args.far)
        for length in LENGTHS[name]:
            step_ms = statistics.median(b - a for times in handed[length] for a, b in pairwise(times[1:]))
            handover_ms = statistics.median(times[1] - times[0] for times in handed[length]) - step_ms
            last = (min(length, LAST_CHUNK) if length <= LAST_CHUNK else (length - 1) % LAST_CHUNK + 1) // 16 * 16
            goal_ms = 2 * copying_ms(max(16, last) * BYTES_PER_TOKEN[name]) + 2
            ttft = [statistics.median(times[0] for times in way[length]) for way in (handed, local)]
            rows.append(
                {
                    "model": name,
                    "tokens": length,
                    "hand-over, ms": f"{handover_ms:.1f}",
                    "2 x copy of the last chunk + 2 ms": f"{goal_ms:.1f}",
                    "decode step, ms": f"{step_ms:.1f}",
                    "first token, prefill rank, ms": f"{ttft[0]:.0f}",
                    "first token, decode rank, ms": f"{ttft[1]:.0f}",
                    "its prefill, over the hand-over": f"{(ttft[1] - step_ms) / max(handover_ms, 0.1):.1f}",
                }
            )
    notes = (
        f"Medians of {args.rounds} rounds after one that is not counted. Prompts are prefilled in chunks of "
        f"{LAST_CHUNK} tokens. The demo model takes 1,024 tokens, so its longest prompt has 960."
    )
    if args.far:
        title = "Prompts that prefill ranks of another host hand over"
        notes += " Both hosts are network namespaces of one machine, with a virtual cable."
        print(save("handover_far", title, rows, facts, notes, per_cpu=True))
    else:
        print(save("handover", "Prompts that prefill ranks hand over", rows, facts, notes, per_cpu=True))


if __name__ == "__main__":
    main()
