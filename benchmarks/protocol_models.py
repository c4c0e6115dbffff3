"""How many states SPIN sees of each protocol between ranks, in how much CPU time, and which sown mistakes it catches.

    python -m benchmarks.protocol_models [--default]

--default: the models of the default suite alone, without mistakes. CPU time is that of SPIN, the compiler and the
search.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from tests.dispatch.models.spin import search
from tests.dispatch.models.test_protocols import CHECKS, MISTAKES, search_with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default", action="store_true", help="no slow models, no mistakes; writes no table")
    args = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    for check in CHECKS:
        if args.default and check.is_slow:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = search(check.model, Path(folder), check.defined, check.optimised)
        suite = "slow" if check.is_slow else "default"
        held = found.error or "holds"
        rows.append(row(check.model, check.name, suite, f"{found.states:,}", found.cpu_s, held))
    total = sum(each["CPU s"] for each in rows if each["suite"] == "default")
    if args.default:
        print(f"{total:.0f} s of CPU time together")
        return
    for model, (_, *mistakes) in MISTAKES.items():
        for mistake in mistakes:
            with tempfile.TemporaryDirectory() as folder:
                found = search_with(model, mistake, Path(folder))
            caught = f"caught: {found.error}" if found.error else "NOT CAUGHT"
            rows.append(row(model, f"with the mistake {mistake}", "slow", f"{found.states:,}", found.cpu_s, caught))
    notes = (
        f"Models of the default suite take {total:.0f} s of CPU time together, SPIN and the compiler included. Of a "
        "mistake the states up to the first error are counted. What a mistake is, the head of its model says."
    )
    print(save("protocol_models", "Protocols between ranks under every schedule", rows, facts, notes))


def row(model: str, name: str, suite: str, states: str, cpu_s: float, found: str) -> dict[str, Any]:
    made = {"model": model, "case": name, "suite": suite, "states": states, "CPU s": round(cpu_s, 1), "found": found}
    print(made, flush=True)
    return made


if __name__ == "__main__":
    main()
