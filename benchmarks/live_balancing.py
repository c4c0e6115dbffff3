"""What moving experts costs and brings while the demo model serves: real ranks, real front end, real clients.

    python -m benchmarks.live_balancing [--ranks 2 4] [--parts shift loss] [--pairs 20] [--windows 14]
                                        [--picture docs/live-balancing.svg]
    python -m benchmarks.live_balancing --hosts 2 --ranks 2 4 [--rate 1gbit]

Parts, for each number of ranks:
- latency: every second, a migration is asked for or not, in pairs; p99 of the time between tokens with over without;
  and the longest pause of a rank at the activation of a round, beside the median step;
- gain: tokens per second in a placement planned for the load, over those in the one at the start, in pairs;
- shift: clients change from code to prose; balancedness over time, beside what the placement at the start would give;
- loss (4 ranks): a rank is killed; how long until every expert is on two ranks again; then a second kill.

With --hosts the first and the third part run over several hosts (network namespaces; as root), within eplb.node_moves.

Each part replaces its own rows of earlier runs with as many ranks; the other rows stay, with their date.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

from benchmarks.conditions import RESULTS, add_isa, conditions, save
from benchmarks.live_changes import measure_loss, measure_shift
from benchmarks.live_clients import NUM_EXPERTS, NUM_STREAMS, Row
from benchmarks.live_hosts import Network, measure_latency_over_hosts, measure_shift_over_hosts
from benchmarks.live_moves import measure_gain, measure_latency

NAME = "live_balancing"
PARTS = ("latency", "gain", "shift", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hosts", type=int, default=1, help="on which the ranks are spread; parts latency and shift")
    parser.add_argument("--rate", default="", help="of the hosts' cables, as tc writes it, such as 1gbit")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of seconds with and without a migration")
    parser.add_argument("--windows", type=int, default=14, help="windows of load in each domain")
    parser.add_argument("--picture", type=Path, help="write the picture of the shift here, of the last number of ranks")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq")
    notes = (
        f"Demo model ({NUM_EXPERTS} experts, top 4, 4 MoE layers), one thread per rank; ranks, front end, clients "
        f"share the machine's cores. Latency: {NUM_STREAMS} client threads; interval: 95 %, bootstrap over pairs. "
    )
    for num_ranks in args.ranks:
        for part in PARTS:
            is_there = part in ("latency", "shift") if args.hosts > 1 else part != "loss" or num_ranks == 4
            if part not in args.parts or not is_there:
                continue
            rows = _measure(part, num_ranks, args)
            load = os.getloadavg()[0]
            what = {
                "ranks": num_ranks,
                "part": part if args.hosts == 1 else f"{part}, {Network(args.hosts, args.rate)}",
            }
            when = {"measured": f"{facts['date']} on {facts['cores']} cores of {facts['cpu']}, load {load:.1f}"}
            merged = merge(_earlier(), [what | row | when for row in rows])
            print(save(NAME, "Experts move while the server serves", merged, facts, notes + args.note), flush=True)


def _measure(part: str, num_ranks: int, args: argparse.Namespace) -> list[Row]:
    match part:
        case "latency" if args.hosts > 1:
            return asyncio.run(measure_latency_over_hosts(Network(args.hosts, args.rate), num_ranks, args.pairs))
        case "shift" if args.hosts > 1:
            return asyncio.run(measure_shift_over_hosts(Network(args.hosts, args.rate), num_ranks, args.windows))
        case "latency":
            return measure_latency(num_ranks, args.pairs)
        case "gain":
            return measure_gain(num_ranks, args.pairs)
        case "shift":
            return measure_shift(num_ranks, args.windows, args.picture)
        case _:
            return measure_loss()


def merge(earlier: list[Row], rows: list[Row]) -> list[Row]:
    """Returns the rows by ranks and part, where new ones replace all earlier ones of the same ranks and part."""
    new = {(row["ranks"], row["part"]) for row in rows}
    kept = [row for row in earlier if (row["ranks"], row["part"]) not in new]
    return sorted(
        [*kept, *rows], key=lambda row: (row["ranks"], PARTS.index(row["part"].partition(",")[0]), row["part"])
    )


def _earlier() -> list[Row]:
    file = RESULTS / f"{NAME}.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows


if __name__ == "__main__":
    main()
