"""The time to the first token of a prompt whose pages a rank of another host has, over computing it, by network.

    python -m benchmarks.page_hosts [--tokens 4096] [--rounds 5] [--rates unlimited,10gbit,1gbit,100mbit]

Needs root. Serves the bench model on two hosts (network namespaces), with one rank of one thread and one request on
each, and `cache.host_gb`. In each round a rank computes a new prompt, and then runs another request of the same prompt
until the round ends. So the prompt, sent once more, goes to the other rank, which may take its pages; and so does a new
prompt behind it, which is computed there. Both decode one stream beside it, and both send rows over the same network.
"""

import argparse
import contextlib
import os
import random
import re
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_model import CONFIG, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from benchmarks.handover import times_of
from tests.launcher.hosts import make_hosts, set_rate

_WAIT_S = 60.0
_SETTINGS = (
    "parallel.num_ranks=2", "parallel.device=cpu", "parallel.threads_per_rank=1", "engine.max_running_requests=1",
    "cache.host_gb=1", "cache.memory_gib=0.5",
)  # fmt: skip


@contextlib.contextmanager
def serve(model: Path, rate: str) -> Iterator[httpx.Client]:
    """Yields a client of a system on two hosts. rate: of the network between them, as `tc` writes it"""
    os.environ["MOE_SERVE_TOKEN"] = secrets.token_hex(32)
    settings = [word for value in _SETTINGS for word in ("--set", value)]
    with make_hosts(2) as (a, b):
        if rate != "unlimited":
            set_rate(b, rate)
        meet = ["--nnodes", "2", "--dist-init-addr", f"{a.address}:20000", "--node-rank"]
        words = ["serve", "--model", str(model), "--skip-tokenizer-init", *settings, *meet]
        first, second = a.start("moe_serve", *words, "0"), b.start("moe_serve", *words, "1")
        with first, second, a.network(), first.client(timeout_s=_WAIT_S) as client:
            yield client


def found_in(client: httpx.Client, pattern: str) -> list[float]:
    """Returns the values of the series whose names and labels match; a rank that has not measured has none."""
    return [float(value) for value in re.findall(rf"^{pattern} (\S+)$", client.get("/metrics").text, re.MULTILINE)]


def total(client: httpx.Client, pattern: str) -> float:
    """Returns the sum of the series whose names and labels match."""
    return sum(found_in(client, pattern))


def wait_for(client: httpx.Client, pattern: str, least: float) -> None:
    """Waits until series that match are as large together."""
    late_s = time.monotonic() + _WAIT_S
    while total(client, pattern) < least:
        if time.monotonic() > late_s:
            raise TimeoutError(f"{pattern} was below {least} for {_WAIT_S:g} s")
        time.sleep(0.05)


def hold(client: httpx.Client, prompt: list[int], begun: threading.Event, end: threading.Event) -> None:
    """Runs a request of a prompt until it is told to end."""
    params = {"max_new_tokens": 2 * len(prompt), "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                begun.set()
            if end.is_set():
                return


def measure(client: httpx.Client, num_tokens: int, draw: random.Random) -> tuple[float, float, float]:
    """Returns ms to the first token of a prompt that the other rank has, and of a new one; and the pages that came."""
    known, new = (draw.choices(range(3, int(str(CONFIG["vocab_size"]))), k=num_tokens) for _ in range(2))
    down = total(client, r'moe_serve_rank_cache_pages_total{fate="down",rank="\d"}')
    times_of(client, known)
    wait_for(client, r'moe_serve_rank_cache_pages_total{fate="down",rank="\d"}', down + num_tokens // 16 - 1)
    came = r'moe_serve_rank_cache_pages_total{fate="from_other_host",rank="\d"}'
    before, begun, end = total(client, came), threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(client, known, begun, end))
    holder.start()
    if not begun.wait(_WAIT_S):
        raise TimeoutError(f"a request had no token after {_WAIT_S:g} s")
    fetched_ms = times_of(client, known)[0]
    computed_ms = times_of(client, new)[0]
    end.set()
    holder.join()
    time.sleep(1.5)  # ranks report once a second
    return fetched_ms, computed_ms, total(client, came) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", default="unlimited,10gbit,1gbit,100mbit")
    args = parser.parse_args()
    facts, rows, draw = conditions(), list[dict[str, Any]](), random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_bench_model(Path(scratch), max_position_embeddings=4 * args.tokens)
        for rate in args.rates.split(","):
            with serve(model, rate) as client:
                found = [measure(client, args.tokens, draw) for _ in range(args.rounds + 1)][1:]
                cost = statistics.mean(found_in(client, r'moe_serve_rank_page_cost{rank="\d"}'))
            fetched, computed, pages = zip(*found, strict=True)
            rows.append(
                {
                    "network": rate,
                    "ms to the first token, pages of the other host": f"{statistics.median(fetched):.0f}",
                    "computed": f"{statistics.median(computed):.0f}",
                    "over computing": f"{statistics.median(a / b for a, b in zip(fetched, computed, strict=True)):.3f}",
                    "pages that came": f"{statistics.median(pages):.0f} of {(args.tokens - 1) // 16}",
                    "a page's way over computing it, as ranks measured": f"{cost:.3f}",
                }
            )
    notes = (
        f"A prompt of {args.tokens} tokens, medians of {args.rounds} rounds after one that is not counted. Both hosts "
        "are network namespaces of one machine, with a virtual cable; unlimited: that of its memory."
    )
    print(save("page_hosts", "Pages that a rank of another host has", rows, facts, notes, per_cpu=True))


if __name__ == "__main__":
    main()
