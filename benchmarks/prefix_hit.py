"""The time to the first token over HTTP where a prompt's beginning is in the prefix cache, over one that is not.

    python -m benchmarks.prefix_hit [--tokens 512] [--pairs 40] [--note TEXT]

Serves the demo model on one rank. Each pair sends the same new prompt twice, one after the other: the first computes
all of it, the second what is behind the cached blocks.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import time

import numpy as np

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.http_streams import _server

BEHIND = 8  # tokens behind the shared beginning: what a client adds to it
VOCABULARY = range(300, 2000)  # ordinary words of the demo model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--tokens", type=int, default=512, help="of the beginning that two prompts share")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("uvicorn", "pyzmq")
    draw = random.Random(0)
    pairs: list[tuple[float, float]] = []
    with _server(["parallel.num_ranks=1", "cache.memory_gib=0.2"]) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for number in range(args.pairs + 3):
            beginning = draw.choices(VOCABULARY, k=args.tokens)
            times = []
            for wanted in (0, args.tokens):
                took_s, cached = first_token(connection, [*beginning, *draw.choices(VOCABULARY, k=BEHIND)])
                assert cached >= wanted - 16 if wanted else cached == 0, f"{cached} tokens came from the cache"
                times.append(took_s)
            if number >= 3:  # the first ones meet cold pools
                pairs.append((times[0], times[1]))
        connection.close()
    rows = [
        {
            "what": f"miss, {args.tokens + BEHIND} tokens computed, p50 / p99, ms",
            "value": _quantiles([m for m, _ in pairs]),
        },
        {"what": f"hit, {BEHIND} to {BEHIND + 16} computed, p50 / p99, ms", "value": _quantiles([h for _, h in pairs])},
        {"what": "hit over miss, median of pairs", "value": f"{statistics.median(h / m for m, h in pairs):.3f}"},
    ]
    notes = (
        f"Demo model, one rank, one client on one connection, {args.pairs} pairs. Times from sending a request to its "
        f"first event. Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("prefix_hit", "A prompt whose beginning is in the prefix cache", rows, facts, notes, per_cpu=True))


def first_token(connection: http.client.HTTPConnection, input_ids: list[int]) -> tuple[float, int]:
    """Returns the seconds until the first event of a stream, and the prompt's tokens that came from the cache."""
    fields = {"input_ids": input_ids, "stream": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    began_s = time.monotonic()
    connection.request("POST", "/generate", json.dumps(fields), {"content-type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    took_s = time.monotonic() - began_s
    response.read()
    return took_s, int(json.loads(line.removeprefix(b"data: "))["meta_info"]["cached_tokens"])


def _quantiles(values: list[float]) -> str:
    return " / ".join(f"{1e3 * np.quantile(values, share):.1f}" for share in (0.5, 0.99))


if __name__ == "__main__":
    main()
