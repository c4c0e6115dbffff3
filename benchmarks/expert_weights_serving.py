"""Tokens a second of a served model with int8 experts against dense ones, on a CPU.

    python -m benchmarks.expert_weights_serving [--rounds 3]

Both run as one rank with one thread, in turn; the gain is the median of ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, BenchLLM, draw_prompts, write_bench_model
from benchmarks.conditions import add_isa, conditions, save

BATCHES = (1, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    facts = conditions("moe-serve")
    with tempfile.TemporaryDirectory() as folder:
        path = write_bench_model(Path(folder))
        with BenchLLM(path, 1, 1) as dense, BenchLLM(path, 1, 1, expert_weights="int8") as int8:
            rows = [compare(dense, int8, batch, args.rounds) for batch in BATCHES]
    print(
        save(
            "expert_weights_serving",
            "Serving with int8 experts",
            rows,
            facts,
            "Bench model (32 experts of hidden 512, width 256 in each of 8 layers, top-4), one rank with one thread, "
            "64 prompt + 64 output tokens, prefill in the time; interleaved, median of ratios (dense time / int8 "
            "time). `load` is the machine's load average after the row ran.",
        )
    )


def compare(dense: BenchLLM, int8: BenchLLM, batch: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"dense": [], "int8": []}
    for number in range(rounds + 1):
        prompts = draw_prompts(batch, seed=1000 * batch + number)
        for name, llm in (("dense", dense), ("int8", int8)):
            started = time.perf_counter()
            llm.generate(prompts)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(times["dense"], times["int8"], strict=True)]
    return {
        "batch": batch,
        "dense tok/s": round(batch * NUM_OUTPUT / statistics.median(times["dense"])),
        "int8 tok/s": round(batch * NUM_OUTPUT / statistics.median(times["int8"])),
        "gain (median)": round(statistics.median(ratios), 2),
        "gain (min … max)": f"{min(ratios):.2f} … {max(ratios):.2f}",
        "load": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
