"""Tokens a second of a served model with int8 experts against dense ones, on a CPU.

    python -m benchmarks.expert_weights_serving [--rounds 3]

Both run as one rank with one thread, in turn; the gain is the median of ratios.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.bench_model import BenchLLM, compare, write_bench_model
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
        with BenchLLM(path, 1, 1, expert_weights="int8") as int8, BenchLLM(path, 1, 1) as dense:
            rows = [compare({"int8": int8, "dense": dense}, batch, args.rounds, "gain") for batch in BATCHES]
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


if __name__ == "__main__":
    main()
