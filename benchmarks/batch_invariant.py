"""What `numerics: batch_invariant` costs over `fast`, for each row tile, at batch 1, 16 and 64.

    python -m benchmarks.batch_invariant [--rounds 3]

Both run as one rank with one thread (what batch_invariant holds for), in turn; the cost is the median of ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, BenchLLM, draw_prompts, write_bench_model
from benchmarks.conditions import conditions, save

ROW_TILES = (4, 8, 16)
BATCHES = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    facts = conditions("moe-serve")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_bench_model(Path(folder))
        for row_tile in ROW_TILES:
            invariant = {"numerics": "batch_invariant", "row_tile": row_tile}
            with BenchLLM(path, 1, 1) as fast, BenchLLM(path, 1, 1, **invariant) as cut:
                for batch in BATCHES:
                    rows.append({"row tile": row_tile, **compare(fast, cut, batch, args.rounds)})
                    print(rows[-1], flush=True)
    text = save(
        "batch_invariant",
        "Cost of batch_invariant over fast",
        rows,
        facts,
        "Bench model, one rank with one thread, 64 prompt + 64 output tokens, prefill in the time; interleaved, median "
        "of ratios (time in batch_invariant / time in fast). `load` is the machine's load average while the row ran.",
    )
    print(text)


def compare(fast: BenchLLM, cut: BenchLLM, batch: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"fast": [], "cut": []}
    for number in range(rounds + 1):
        prompts = draw_prompts(batch, seed=1000 * batch + number)
        for name, llm in (("fast", fast), ("cut", cut)):
            started = time.perf_counter()
            llm.generate(prompts)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(times["fast"], times["cut"], strict=True)]
    return {
        "batch": batch,
        "fast tok/s": round(batch * NUM_OUTPUT / statistics.median(times["fast"])),
        "batch_invariant tok/s": round(batch * NUM_OUTPUT / statistics.median(times["cut"])),
        "cost (median)": round(statistics.median(ratios), 2),
        "cost (min … max)": f"{min(ratios):.2f} … {max(ratios):.2f}",
        "load": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
