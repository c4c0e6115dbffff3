"""Output tokens per second of `LLM` against transformers `generate` on the same weights, both cores for either.

    python -m benchmarks.decode_throughput [--rounds 5] [--batches 1,16]

Both generate 64 greedy tokens after 64 prompt tokens, in turn, round by round; the ratio is the median over rounds.
Tokens must agree up to the first near-tie, or the comparison is refused.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, NUM_PROMPT, BenchLLM, draw_prompts, write_bench_model
from benchmarks.conditions import add_isa, conditions, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of moe_serve; the cores are shared among them")
    args = parser.parse_args()
    facts = conditions("transformers", "moe-serve")
    cores = facts["cores"]
    with tempfile.TemporaryDirectory() as folder:
        path = write_bench_model(Path(folder))
        import torch

        torch.set_num_threads(cores)
        theirs = Transformers(path)
        rows = []
        with BenchLLM(path, args.ranks, cores // args.ranks) as ours:
            for batch in (int(text) for text in args.batches.split(",")):
                rows.append(compare(ours, theirs, batch, args.rounds))
                print(rows[-1], flush=True)
    text = save(
        "decode_throughput" if args.ranks == 1 else f"decode_throughput_{args.ranks}_ranks",
        f"Output tokens per second, {args.ranks} rank(s) × {cores // args.ranks} thread(s), against transformers",
        rows,
        facts,
        "Bench model: Qwen3-MoE form, hidden 512, 8 layers, 32 experts top-4, expert width 256, vocabulary 8192, "
        f"float32. {NUM_PROMPT} prompt + {NUM_OUTPUT} output tokens, greedy; prefill is in the time. "
        f"transformers: `generate` with `grouped_mm` experts and {cores} threads. Interleaved rounds, "
        "median of ratios; `load` is the machine's load average while the row ran.",
        per_cpu=True,
    )
    print(text)


def compare(ours: BenchLLM, theirs: "Transformers", batch: int, rounds: int) -> dict[str, Any]:
    ratios, our_rates, their_rates = [], [], []
    for number in range(rounds + 1):
        # New prompts each round: nothing of it can come from a prefix cache.
        prompts = draw_prompts(batch, seed=1000 * batch + number)
        started = time.perf_counter()
        mine = ours.generate(prompts)
        our_s = time.perf_counter() - started
        started = time.perf_counter()
        reference = theirs.generate(prompts)
        their_s = time.perf_counter() - started
        if number == 0:  # the first round warms both up
            agreeing = sum(a == b for a, b in zip(mine, reference, strict=True))
            assert agreeing >= 0.9 * batch, f"only {agreeing} of {batch} sequences agree with transformers"
            continue
        ratios.append(their_s / our_s)
        our_rates.append(batch * NUM_OUTPUT / our_s)
        their_rates.append(batch * NUM_OUTPUT / their_s)
    return {
        "batch": batch,
        "moe_serve tok/s": round(statistics.median(our_rates)),
        "transformers tok/s": round(statistics.median(their_rates)),
        "ratio (median)": round(statistics.median(ratios), 2),
        "ratio (min … max)": f"{min(ratios):.2f} … {max(ratios):.2f}",
        "load": round(os.getloadavg()[0], 2),
    }


class Transformers:
    def __init__(self, path: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="grouped_mm"
        ).eval()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=NUM_OUTPUT,
                max_new_tokens=NUM_OUTPUT,
                pad_token_id=0,
            )
        tokens: list[list[int]] = out[:, NUM_PROMPT:].tolist()
        return tokens


if __name__ == "__main__":
    main()
