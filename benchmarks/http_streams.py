"""64 concurrent streams of the demo model: tokens per second and the time between tokens, with HTTP and without it.

    python -m benchmarks.http_streams [--streams 64] [--tokens 128] [--rounds 3] [--ranks 2] [--note TEXT]

Without HTTP means `LLM.stream`: the same ranks, sockets, detokenizer and stop rules in the caller's process. Rounds
alternate, and the other system sleeps; server, ranks and clients share the machine's cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.bench.domains import prompts_of
from moe_serve.config import load_config
from moe_serve.launcher.llm import LLM
from moe_serve.launcher.rank_env import free_port

Run = tuple[float, list[float]]  # (tokens per second, seconds between tokens of one stream)
START_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq", "uvicorn")
    prompts = list(islice(prompts_of("code", 0), args.streams))
    overrides = [f"parallel.num_ranks={args.ranks}", "cache.memory_gib=0.2"]
    runs: dict[str, list[Run]] = {"HTTP": [], "LLM": []}
    with _server(overrides) as port, LLM.from_config(load_config(overrides=overrides)) as llm:
        _over_http(port, prompts, 8)
        _without_http(llm, prompts, 8)
        for _ in range(args.rounds):
            runs["HTTP"].append(_over_http(port, prompts, args.tokens))
            runs["LLM"].append(_without_http(llm, prompts, args.tokens))
    rows = [_row(name, found) for name, found in runs.items()]
    ratios = [http[0] / llm[0] for http, llm in zip(runs["HTTP"], runs["LLM"], strict=True)]
    notes = (
        f"Demo model, {args.ranks} ranks, {args.streams} streams of {args.tokens} tokens at temperature 0.8; medians "
        f"over {args.rounds} rounds. HTTP's share of the time: {1 - statistics.median(ratios):.0%} "
        f"(rounds {', '.join(f'{1 - ratio:.0%}' for ratio in ratios)}), its clients' included. "
        f"Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("http_streams", f"{args.streams} concurrent streams, with HTTP and without", rows, facts, notes))


def _row(name: str, runs: list[Run]) -> dict[str, object]:
    p50, p99 = (statistics.median(1e3 * float(np.quantile(gaps, share)) for _, gaps in runs) for share in (0.5, 0.99))
    rate = statistics.median(rate for rate, _ in runs)
    return {
        "path": name,
        "tokens per s": f"{rate:.0f}",
        "between tokens p50, ms": f"{p50:.1f}",
        "p99, ms": f"{p99:.1f}",
    }


def _without_http(llm: LLM, prompts: list[str], num_tokens: int) -> Run:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.8, ignore_eos=True)
    last: dict[int, float] = {}
    gaps: list[float] = []
    begin_s = time.monotonic()
    for index, _ in llm.stream(prompts, params):
        now_s = time.monotonic()
        if index in last:
            gaps.append(now_s - last[index])
        last[index] = now_s
    return len(prompts) * num_tokens / (time.monotonic() - begin_s), gaps


def _over_http(port: int, prompts: list[str], num_tokens: int) -> Run:
    begin_s = time.monotonic()
    gaps = asyncio.run(_streams(port, prompts, num_tokens))
    return len(prompts) * num_tokens / (time.monotonic() - begin_s), gaps


@contextmanager
def _server(overrides: list[str]) -> Iterator[int]:
    """Yields the port of a server in processes of its own."""
    port = free_port()
    settings = [f"--set={setting}" for setting in (*overrides, f"server.port={port}")]
    command = [sys.executable, "-m", "moe_serve", "serve", *settings]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(port, server)
        yield port
    finally:
        server.terminate()
        server.wait(30)


def _wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"the server was not ready within {START_S:g} s")


async def _streams(port: int, prompts: list[str], num_tokens: int) -> list[float]:
    gaps: list[float] = []
    await asyncio.gather(*[_stream(port, prompt, num_tokens, gaps) for prompt in prompts])
    return gaps


async def _stream(port: int, prompt: str, num_tokens: int, gaps: list[float]) -> None:
    """Reads one stream of server-sent events by hand: a client library would take more time than the server."""
    params = {"max_new_tokens": num_tokens, "temperature": 0.8, "ignore_eos": True}
    body = json.dumps({"text": prompt, "stream": True, "sampling_params": params}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    last_s, newest = 0.0, b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            now_s = time.monotonic()
            if last_s:
                gaps.append(now_s - last_s)
            last_s, newest = now_s, line
    writer.close()
    usage = json.loads(newest[len(b"data: ") :])["meta_info"]
    assert usage["completion_tokens"] == num_tokens, usage


if __name__ == "__main__":
    main()
