"""What log probabilities add: to the sampling part of a step, and to decoding as a whole.

    python -m benchmarks.logprobs [--vocab 151936] [--rounds 7] [--threads 2]

The first table is a step's sampling of rows that all ask for 5 likeliest tokens, over the same without; the second one
is `LLM` with the demo model, one rank and 16 requests of 64 tokens with logprobs=5, over the same without. The ways
run in turns in every round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.engine.output.row_logprobs import LogprobScorer
from moe_serve.engine.output.sampler import Sampler
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.launcher.llm import LLM

NUM_TOP = 5
REQUESTS, PROMPT, TOKENS = 16, 32, 64
PARAMS = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(args.threads)
    cpu_library().set_threads(args.threads)
    rows = [measure_step(num_rows, args.vocab, args.rounds) for num_rows in (1, 16, 64)]
    rows.append(measure_decode(args.rounds))
    notes = (
        f"logprobs={NUM_TOP} for every request. Sampling: vocabulary {args.vocab}, {args.threads} threads, float32 "
        f"logits of standard deviation 1, temperature 1, the copy of the logits included. Decode: the demo model "
        f"through LLM, one rank, {REQUESTS} requests, {TOKENS} tokens each. Median of {args.rounds} rounds, the best "
        f"one in brackets; the ratio is the median of each round's. Load average at the end: {os.getloadavg()[0]:.2f}."
    )
    print(save("logprobs", "Log probabilities", rows, facts, notes, per_cpu=True))


def measure_step(num_rows: int, vocab: int, rounds: int) -> dict[str, Any]:
    """Returns a row: sampling a step with log probabilities, and without."""
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    sampler, scorer = Sampler([1], compiled=True), LogprobScorer(compiled=True)
    plain = [Request(str(i), 0, [5] * PROMPT, [], PARAMS, i) for i in range(num_rows)]
    asking = [replace(request, params=replace(PARAMS, logprobs=NUM_TOP), output_ids=[]) for request in plain]

    def step(requests: list[Request]) -> list[int]:
        raw = scorer.keep(logits, requests)
        tokens = sampler(logits, requests)
        scorer.of_tokens(raw, requests, tokens)
        return tokens

    return _compared(f"sampling {num_rows} rows, ms", 1000, lambda: step(plain), lambda: step(asking), rounds)


def measure_decode(rounds: int) -> dict[str, Any]:
    """Returns a row: the time of outputs with log probabilities, and without."""
    prompts = [[5 + i] * PROMPT for i in range(REQUESTS)]
    with LLM("demo", num_ranks=1, prefix_cache=False) as llm:

        def run(params: SamplingParams) -> list[list[int]]:
            each = [replace(params, seed=i) for i in range(REQUESTS)]
            return [output.token_ids for output in llm.generate(prompts, each)]

        asking = replace(PARAMS, logprobs=NUM_TOP)
        return _compared(f"{REQUESTS} x {TOKENS} tokens, s", 1, lambda: run(PARAMS), lambda: run(asking), rounds)


def _compared(
    what: str, unit: float, plain: Callable[[], Any], asking: Callable[[], Any], rounds: int
) -> dict[str, Any]:
    took: dict[str, list[float]] = {"with": [], "without": []}
    for index in range(rounds + 1):
        found = []
        for name, run in (("without", plain), ("with", asking)):
            start = time.perf_counter()
            found.append(run())
            if index:  # the first round warms up
                took[name].append(unit * (time.perf_counter() - start))
        assert found[0] == found[1], "log probabilities change no token"
    shown = {name: f"{statistics.median(times):.3g} ({min(times):.3g})" for name, times in took.items()}
    ratios = (asked / base for asked, base in zip(took["with"], took["without"], strict=True))
    return {"what": what, **shown, "with / without": statistics.median(ratios)}


if __name__ == "__main__":
    main()
