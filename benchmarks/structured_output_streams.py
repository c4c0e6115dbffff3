"""What other streams notice of structured output: the demo model on two ranks, eight plain streams.

    python -m benchmarks.structured_output_streams [--seconds 20] [--rounds 3] [--note TEXT]

They run alone; beside one client's short requests, so many a second; beside as many, each with a new ordinary schema;
and beside a client that sends a new hostile schema as soon as the last one is refused.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from itertools import count
from typing import Any

import numpy as np

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.http_streams import _server
from benchmarks.structured_output import HOSTILE, PERSON

PER_S = 20.0  # short requests beside streams
Gaps = dict[str, list[list[float]]]  # seconds between tokens, of each round, by row

ALONE, PLAIN, ORDINARY, HOSTILE_ONES = (
    "none", "short requests without a schema", "the same, each with a new ordinary schema", "new hostile schemas"
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("llguidance", "uvicorn")
    schemas: dict[str, Any] = {
        ALONE: None,
        PLAIN: {},
        ORDINARY: PERSON,
        HOSTILE_ONES: HOSTILE["integer, multiple of 9,999,991"],
    }
    gaps: Gaps = {name: [] for name in schemas}
    asked = dict.fromkeys(schemas, 0)
    with _server(["parallel.num_ranks=2", "cache.memory_gib=0.2"]) as port:
        asyncio.run(_round(port, 2.0, PERSON, True))
        for _ in range(args.rounds):
            for name, schema in schemas.items():
                found, num_asked = asyncio.run(_round(port, args.seconds, schema, name != HOSTILE_ONES))
                gaps[name].append(found)
                asked[name] += num_asked
    rows = [_stream_row(name, asked[name], gaps) for name in schemas]
    notes = (
        f"Demo model, two ranks, eight plain streams; medians over {args.rounds} rounds of {args.seconds:g} s, "
        f"alternating. Short requests: 4 tokens, {PER_S:g} a second. Load average at the end: "
        f"{os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("structured_output_streams", "Streams beside schemas", rows, facts, notes, per_cpu=True))


def _stream_row(name: str, num_asked: int, gaps: Gaps) -> dict[str, Any]:
    p50, p99 = (
        statistics.median(1e3 * float(np.quantile(each, share)) for each in gaps[name]) for share in (0.5, 0.99)
    )

    def against(base: str) -> str:
        pairs = zip(gaps[name], gaps[base], strict=True)
        ratios = [float(np.quantile(each, 0.99) / np.quantile(other, 0.99)) for each, other in pairs]
        return f"{statistics.median(ratios):.2f}"

    return {
        "beside": name,
        "requests": num_asked,
        "between tokens p50, ms": f"{p50:.2f}",
        "p99, ms": f"{p99:.2f}",
        "p99 against alone": against(ALONE),
        "against the same without a schema": against(PLAIN) if name == ORDINARY else "",
    }


async def _round(port: int, seconds: float, schema: dict[str, Any] | None, paced: bool) -> tuple[list[float], int]:
    """Returns the seconds between tokens of eight streams, and how many requests were sent beside them.

    schema: of these, made new for each; {} = without one; None = no requests.  paced: PER_S a second at most
    """
    gaps: list[float] = []
    ends_s = time.monotonic() + seconds
    serial, sent = count(time.time_ns()), 0

    async def stream() -> None:
        while time.monotonic() < ends_s:
            params = {"max_new_tokens": 200, "temperature": 0.8, "ignore_eos": True}
            last_s = None
            async for _ in _lines(port, {"text": "def f(", "sampling_params": params, "stream": True}):
                now_s = time.monotonic()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s

    async def send() -> None:
        nonlocal sent
        while schema is not None and (begin_s := time.monotonic()) < ends_s:
            sent += 1
            params: dict[str, Any] = {"max_new_tokens": 4}
            if schema:
                params["json_schema"] = json.dumps({**schema, "title": str(next(serial))})
            async for _ in _lines(port, {"text": "a", "sampling_params": params}):
                pass
            if paced:
                await asyncio.sleep(begin_s + 1 / PER_S - time.monotonic())

    await asyncio.gather(*[stream() for _ in range(8)], send())
    return gaps, sent


async def _lines(port: int, body: dict[str, Any]) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
    assert b" 40" in (first := await reader.readline()) or b" 200" in first, first
    async for line in reader:
        if line.startswith((b"data: ", b"{")):
            yield line
    writer.close()


if __name__ == "__main__":
    main()
