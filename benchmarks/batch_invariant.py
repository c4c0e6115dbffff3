"""What `numerics: batch_invariant` costs over `fast`, for each row tile, at batch 1, 16 and 64.

    python -m benchmarks.batch_invariant [--rounds 3]

Both run as one rank with one thread (what batch_invariant holds for), in turn; the cost is the median of ratios.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.bench_model import BenchLLM, compare, write_bench_model
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
                both = {"fast": fast, "batch_invariant": cut}
                for batch in BATCHES:
                    rows.append({"row tile": row_tile, **compare(both, batch, args.rounds, "cost")})
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


if __name__ == "__main__":
    main()
