"""What `return_routed_experts` costs: outputs of a server that keeps the experts of tokens, over one that does not.

    python -m benchmarks.routed_experts [--rounds 9] [--batch 16]

The model of the serving benchmarks through `LLM`, one rank, prefill and decode. Two servers run side by side, one keeps
experts and one does not; their calls take turns: of the one without, and of the other where nobody asks and where all
do.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, NUM_PROMPT, draw_prompts, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.launcher.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    facts = conditions()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = write_bench_model(Path(folder))

        def server(**settings: Any) -> LLM:
            return stack.enter_context(LLM(path, num_ranks=1, skip_tokenizer=True, prefix_cache=False, **settings))

        without, with_experts = server(), server(return_routed_experts=True)
        params = SamplingParams(max_new_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)
        asking = SamplingParams(max_new_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True, return_routed_experts=True)
        ways: dict[str, Callable[[list[list[int]]], list[Any]]] = {
            "not kept": lambda prompts: without.generate(prompts, params),
            "kept, nobody asks": lambda prompts: with_experts.generate(prompts, params),
            "kept, all ask": lambda prompts: with_experts.generate(prompts, asking),
        }
        rows = compared(ways, args.batch, args.rounds)
    notes = (
        f"The model of benchmarks/bench_model.py, one rank, {args.batch} requests of {NUM_PROMPT} + {NUM_OUTPUT} "
        f"tokens at once, in seconds: the median of {args.rounds} rounds in which the ways take turns, the best one in "
        f"brackets; the ratio is the median of each round's. Load average at the end: {os.getloadavg()[0]:.2f}."
    )
    print(save("routed_experts", "Experts of tokens", rows, facts, notes, per_cpu=True))


def compared(ways: dict[str, Callable[[list[list[int]]], list[Any]]], batch: int, rounds: int) -> list[dict[str, Any]]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        prompts, found = draw_prompts(batch, number), []
        order = list(ways.items())
        for name, run in order if number % 2 else reversed(order):
            start = time.perf_counter()
            outputs = run(prompts)
            if number:  # the first round warms up
                took[name].append(time.perf_counter() - start)
            found.append([output.token_ids for output in outputs])
        assert all(each == found[0] for each in found), "they change no token"
    base = took["not kept"]
    return [
        {
            "": name,
            "seconds": f"{statistics.median(times):.3f} ({min(times):.3f})",
            "ratio": statistics.median(one / other for one, other in zip(times, base, strict=True)),
        }
        for name, times in took.items()
    ]


if __name__ == "__main__":
    main()
