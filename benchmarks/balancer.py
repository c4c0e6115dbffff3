"""Every row of the balancer's goals, in one run: python -m benchmarks.balancer --eplb PATH/TO/eplb.py

--eplb names DeepSeek's eplb.py (github.com/deepseek-ai/EPLB), which is not part of this repository; without it its rows
are left out. Times are CPU times of one thread, apart from the replay, which is wall clock of the command.
Writes benchmarks/results/balancer.md and .json.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.balancer_incremental import gate_rows, incremental_rows, link_rows, price_rows, rank_limit_rows
from benchmarks.balancer_moves import churn_rows, economics_rows, replay_rows, split_rows
from benchmarks.balancer_plans import load_eplb, rows
from benchmarks.conditions import RESULTS, add_isa, conditions, save

PARTS = ("plans", "incremental", "links", "price", "limits", "churn", "split", "economics", "gate", "replay")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--eplb", type=Path, help="DeepSeek's eplb.py")
    parser.add_argument("--eplb-seeds", type=int, default=3, help="seeds for eplb.py, which takes seconds a call")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--windows", type=int, default=1000, help="windows of the replay row")
    parser.add_argument("--economics-windows", type=int, default=40, help="windows of the economics rows")
    parser.add_argument("--merge", action="store_true", help="keep the rows of other parts that the result file has")
    parser.add_argument("--name", default="balancer", help="name of the result files")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    facts = conditions("scipy", "highspy")
    found: list[dict[str, Any]] = []
    for part in parts:
        for row in _rows(part, arguments):
            found.append(row)
            print(" | ".join(str(value) for value in row.values()), flush=True)
    notes = (
        "balancedness = mean / max of rank load per layer; mean: over layers and seeds, min: the worst layer of all. "
        "Seeds 0-9 and, on lines that say so, seeds that were not looked at while the policies were written. Times "
        "are CPU times of one thread; replay rows are wall clock, on a machine that others were using, beside their "
        "CPU time."
    )
    if arguments.merge:
        found = _merged(found, RESULTS / f"{arguments.name}.json")
    for row in found:  # four digits matter here
        row.update({name: f"{row[name]:.4f}" for name in ("mean", "min") if isinstance(row[name], float)})
    save(arguments.name, "The balancer's goals, measured", found, facts, notes)


def _merged(found: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Rows of the same axis are replaced, others kept."""
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    axes = {row["axis"] for row in found}
    return [row for row in kept if row["axis"] not in axes] + found


def _rows(part: str, arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    match part:
        case "plans":
            eplb = load_eplb(arguments.eplb) if arguments.eplb else None
            return rows(eplb, arguments.eplb_seeds)
        case "incremental":
            return incremental_rows()
        case "links":
            return link_rows()
        case "price":
            return price_rows()
        case "limits":
            return rank_limit_rows()
        case "gate":
            return gate_rows()
        case "churn":
            return churn_rows()
        case "split":
            return split_rows()
        case "economics":
            return economics_rows(arguments.economics_windows)
        case "replay":
            return replay_rows(arguments.windows)
    raise SystemExit(f"--parts {part} is not known; use {', '.join(PARTS)}")


if __name__ == "__main__":
    main()
