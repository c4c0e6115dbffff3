"""The demo model served on a GPU, as a user starts it; a part of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu_serve

Ranks, scheduler, graphs and sampler as in a server, without HTTP. The same prompts on the CPU give the tokens that a
GPU in float32 should give; where rounding makes two logits change places a continuation may part from there on.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.gpu_timing import Row, tell
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.launcher.llm import LLM

PROMPTS = [f"The number {number} is" for number in range(32)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
SAME = 0.5  # share of continuations that are equal to their end; those that part do so at a near tie


def generated(device: str, dtype: str, num_ranks: int) -> tuple[list[list[int]], float]:
    """Returns the tokens of each prompt, and how many came in a second, once everything is compiled."""
    parallel = {"device": device}
    with LLM("demo", num_ranks=num_ranks, dtype=dtype, parallel=parallel) as llm:
        llm.generate(PROMPTS, GREEDY)
        began = time.perf_counter()
        outputs = llm.generate(PROMPTS, GREEDY)
        seconds = time.perf_counter() - began
    tokens = [list(output.token_ids) for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="append each row there, as JSON")
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    expected, cpu_rate = generated("cpu", "float32", 1)
    for dtype in ("float32", "bfloat16"):
        got, rate = generated("cuda", dtype, ranks)
        equal = sum(one == other for one, other in zip(got, expected, strict=True)) / len(PROMPTS)
        firsts = sum(one[:4] == other[:4] for one, other in zip(got, expected, strict=True)) / len(PROMPTS)
        conditions = f"{len(PROMPTS)} prompts, {GREEDY.max_new_tokens} tokens each; {cpu_rate:.0f}/s on a CPU rank"
        name = f"demo model, {dtype}, {ranks} rank{'s' if ranks > 1 else ''}"
        rows = [
            Row(name, rate, "tokens/s", conditions=conditions),
            Row("  continuations as on the CPU, to their end", 100 * equal, "%", ">= 50 in float32",
                equal >= SAME if dtype == "float32" else None),
            Row("  the same in their first four tokens", 100 * firsts, "%", ">= 90", firsts >= 0.9),
        ]  # fmt: skip
        for row in rows:
            tell(row, arguments.rows)
        assert dtype != "float32" or firsts >= 0.9, "the demo model says other things on the GPU than on the CPU"


if __name__ == "__main__":
    main()
