"""Ten times the load that can be served: what is still served, and what refusals and /health take.

    python -m benchmarks.overload [--minutes 10] [--times 10] [--rounds 10] [--tokens 32] [--note TEXT]

Serves the demo model on two ranks. Rounds alternate: as many requests open as the server takes without a refusal (its
peak); then `times` that rate offered in an open loop; then the peak again, while what was refused is sent to a process
that answers it with a fixed refusal (refusing_sink.py). One process with one thread sends everything
(load_generator.py). All share the machine's cores, so what the third phase loses is lost whatever a server does.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np

from benchmarks.conditions import conditions, save
from benchmarks.hostile_clients import Resources, cpu_s, front_end_of
from benchmarks.hostile_mix import request
from benchmarks.http_streams import _server
from benchmarks.load_generator import LoadGenerator, Tally
from benchmarks.refusing_sink import load_beside

NUM_RANKS = 2
RUNNING = 16  # requests that a rank runs
WAITING = 64  # beyond those, in the front end
CONNECTIONS = 1000
SETTLE_S = 2.0  # before answers count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of overload, in all; the peaks take two thirds of it more"
    )
    parser.add_argument("--times", type=float, default=10.0, help="the peak rate is offered")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("uvicorn", "h11", "pyzmq")
    params = {"max_new_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"text": "def add(a, b):", "sampling_params": params}).encode()
    settings = [
        f"parallel.num_ranks={NUM_RANKS}", "cache.memory_gib=0.2", f"engine.max_running_requests={RUNNING}",
        f"engine.max_queued_requests={WAITING}",
    ]  # fmt: skip
    peaks: list[Tally] = []
    overloads: list[Tally] = []
    besides: list[Tally] = []  # peaks beside the sink
    sunk: list[Tally] = []  # what the sink answered
    front_end_shares: list[float] = []  # of a core, in overload
    round_s = 60 * args.minutes / args.rounds
    with _server(settings) as port, load_beside(request(body), CONNECTIONS) as sink:
        pid = front_end_of(port)
        load = LoadGenerator(port, request(body), CONNECTIONS)
        load.closed_loop(NUM_RANKS * RUNNING, 2.0)
        load.open_loop(1000, 2.0)  # pools and caches grow to their size
        before = Resources.of(pid)
        for _ in range(args.rounds):
            peaks.append(load.closed_loop(NUM_RANKS * RUNNING + WAITING, round_s / 3))
            began_s, began_cpu_s = time.monotonic(), cpu_s(pid)
            overloads.append(load.open_loop(args.times * peaks[-1].rate(200), round_s))
            front_end_shares.append((cpu_s(pid) - began_cpu_s) / (time.monotonic() - began_s))
            with sink.open_loop(overloads[-1].rate(429), round_s / 3 + SETTLE_S) as sent:
                besides.append(load.closed_loop(NUM_RANKS * RUNNING + WAITING, round_s / 3, SETTLE_S))
            sunk += sent
        after = Resources.of(pid)
        load.close()
    _report(args, facts, peaks, overloads, besides, sunk, statistics.mean(front_end_shares), before, after)


def _report(
    args: argparse.Namespace,
    facts: dict[str, object],
    peaks: list[Tally],
    overloads: list[Tally],
    besides: list[Tally],
    sunk: list[Tally],
    front_end_share: float,
    before: Resources,
    after: Resources,
) -> None:
    ratios = [over.rate(200) / peak.rate(200) for peak, over in zip(peaks, overloads, strict=True)]
    beside_ratios = [beside.rate(200) / peak.rate(200) for peak, beside in zip(peaks, besides, strict=True)]
    offered = [tally.num_sent / tally.seconds for tally in overloads]
    rows = [
        {"what": "peak goodput, requests/s", "value": _median([tally.rate(200) for tally in peaks], ".1f")},
        {"what": "offered in overload, requests/s", "value": _median(offered, ".0f")},
        {"what": "goodput in overload, requests/s", "value": _median([tally.rate(200) for tally in overloads], ".1f")},
        {"what": "goodput in overload over peak, median of rounds", "value": _median(ratios, ".3f")},
        {"what": "goodput beside a fixed refusal of that load, over peak", "value": _median(beside_ratios, ".3f")},
        {"what": "accepted at the peak, p50 / p99, ms", "value": _quantiles(peaks, 200)},
        {"what": "accepted in overload, p50 / p99, ms", "value": _quantiles(overloads, 200)},
        {"what": "refused (429), p50 / p99, ms", "value": _quantiles(overloads, 429)},
        {"what": "/health in overload, p50 / p99 / most, ms", "value": _of_health(overloads)},
        {"what": "memory of the front end, MiB", "value": f"{before.rss / 2**20:.1f} -> {after.rss / 2**20:.1f}"},
        {"what": "descriptors of the front end", "value": f"{before.descriptors} -> {after.descriptors}"},
        {"what": "cores of the front end in overload", "value": f"{front_end_share:.2f}"},
        {"what": "cores of the load generator, peak / overload", "value": f"{_cores(peaks)} / {_cores(overloads)}"},
    ]
    statuses = sum((tally.statuses for tally in overloads), start=overloads[0].statuses - overloads[0].statuses)
    unsent = sum(tally.num_without_connection for tally in overloads)
    notes = (
        f"Demo model, {NUM_RANKS} ranks of {RUNNING} running requests, {WAITING} may wait; requests of {args.tokens} "
        f"tokens over {CONNECTIONS} connections that stay open. {args.rounds} rounds, {args.minutes:g} minutes of "
        f"overload in all; ratios of the rounds {min(ratios):.2f} to {max(ratios):.2f}, beside the fixed refusal (of "
        f"{statistics.median(tally.rate(429) for tally in sunk):.0f} requests/s) {min(beside_ratios):.2f} to "
        f"{max(beside_ratios):.2f}. Answers in overload by status: "
        f"{dict(statuses)}; {unsent} requests found no free connection; sending was late by "
        f"{1e3 * max(tally.late_s for tally in overloads):.0f} ms at most. Generator, front end and ranks share the "
        f"cores. Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("overload", f"{args.times:g} times the load that can be served", rows, facts, notes, per_cpu=True))


def _median(values: list[float], form: str) -> str:
    return format(statistics.median(values), form)


def _quantiles(tallies: list[Tally], status: int) -> str:
    values = [latency for tally in tallies for latency in tally.latencies.get(status, ())]
    return " / ".join(f"{1e3 * np.quantile(values, share):.1f}" for share in (0.5, 0.99)) if values else "none"


def _of_health(tallies: list[Tally]) -> str:
    values = [latency for tally in tallies for latency in tally.health]
    return " / ".join(f"{1e3 * np.quantile(values, share):.1f}" for share in (0.5, 0.99, 1.0))


def _cores(tallies: list[Tally]) -> str:
    return f"{sum(tally.cpu_s for tally in tallies) / sum(tally.seconds for tally in tallies):.2f}"


if __name__ == "__main__":
    main()
