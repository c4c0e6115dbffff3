"""Time to draw the tokens of a step: the compiled kernel, its torch twin, and the numpy loop over rows of before.

    python -m benchmarks.sampling [--vocab 151936] [--rounds 7] [--threads 2] [--changes-only]

A second table: what penalties, biases, bad words and a mask of allowed tokens add to a call of the engine's sampler.

Logits are of a normal distribution with standard deviation 1, which is flatter than a language model's: top_p then
keeps most of the vocabulary. The ways run one after the other in every round.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.engine.output.sampler import Sampler
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.sampling import sample_rows
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows, sample_rows_reference

PARAMETERS: dict[str, list[dict[str, float]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature 1": [{}],
    "top_k 50": [{"top_k": 50}],
    "top_p 0.95": [{"top_p": 0.95}],
    "min_p 0.05": [{"min_p": 0.05}],
    "mixed": [{"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}],
}
PROMPT, OUTPUT = 1000, 500  # tokens
CHANGES: dict[str, dict[str, Any]] = {  # of logits, beside temperature 1
    "three penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "100 biases": {"logit_bias": dict.fromkeys(range(0, 700, 7), 0.5)},
    "100 bad words": {"bad_words_ids": tuple((token % 30, token) for token in range(100))},
    "16,384 allowed ids": {"allowed_token_ids": tuple(range(0, 32_768, 2))},
}
CHANGES["all of these"] = {name: value for each in CHANGES.values() for name, value in each.items()}
GOALS = {("temperature 1", 64): "≤ 15 ms", ("top_p 0.95", 64): "≤ 40 ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--changes-only", action="store_true", help="the second table alone")
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(args.threads)
    cpu_library().set_threads(args.threads)
    rows: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    for num_rows in (1, 64):
        logits = torch.randn(num_rows, args.vocab, generator=torch.Generator().manual_seed(0))
        changes += measure_changes(logits, 3 * args.rounds)
        if args.changes_only:
            continue
        for name, parameters in PARAMETERS.items():
            rows.append(measure(logits, name, sampling_rows(num_rows, parameters), args.rounds))
    inputs = f"Vocabulary {args.vocab}, {args.threads} threads, float32 logits of standard deviation 1. "
    load = f" Load average at the end: {os.getloadavg()[0]:.2f}."
    notes = (
        f"{inputs}Calls of the engine's sampler at temperature 1, its Python included; prompts of {PROMPT} tokens, "
        f"outputs that grow from {OUTPUT}. Median of {3 * args.rounds} rounds, the best one in brackets. The ratio is "
        f"the median of each round's time over that of the same call without changes.{load}"
    )
    print(save("sampling_changes", "Drawing tokens from changed logits", changes, facts, notes, per_cpu=True))
    if args.changes_only:
        return
    notes = (
        f"{inputs}Median of {args.rounds} rounds, the best one in brackets (2 rounds of torch and the loop with 64 "
        "rows); the ratio is that of the medians. All three ways gave the same tokens; the loop has no "
        f"min_p.{load}"
    )
    print(save("sampling", "Drawing the tokens of a step", rows, facts, notes, per_cpu=True))


def sampling_rows(num_rows: int, parameters: list[dict[str, float]]) -> SamplingRows:
    rows = np.zeros(num_rows, SAMPLING_ROW)
    rows["temperature"], rows["top_p"], rows["top_k"] = 1.0, 1.0, -1
    rows["seed"], rows["output_index"] = np.arange(num_rows) * 7919, np.arange(num_rows) % 50
    for index in range(num_rows):
        for field, value in parameters[index % len(parameters)].items():
            rows[field][index] = value
    return SamplingRows(rows)


def measure(logits: Tensor, name: str, rows: SamplingRows, rounds: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], list[int]]] = {
        "compiled": lambda: sample_rows(logits, rows),
        "torch": lambda: sample_rows_reference(logits, rows),
    }
    if not rows.rows["min_p"].any():
        ways["loop"] = lambda: loop_over_rows(logits, rows)
    took: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, list[int]] = {}
    for index in range(rounds + 1):
        for way, draw in ways.items():
            if way != "compiled" and index > 2 and len(logits) > 1:
                continue
            start = time.perf_counter()
            tokens[way] = draw()
            took[way].append(time.perf_counter() - start)
    assert all(found == tokens["compiled"] for found in tokens.values()), "ways differ"
    ms = {way: [1000 * value for value in values[1:]] for way, values in took.items()}  # the first round warms up
    median = {way: statistics.median(values) for way, values in ms.items()}
    shown = {
        way: f"{median[way]:.3g} ({min(ms[way]):.3g})" if way in ms else "" for way in ("compiled", "torch", "loop")
    }
    return {
        "rows": len(logits),
        "parameters": name,
        **{f"{way}, ms": text for way, text in shown.items()},
        "loop / compiled": median["loop"] / median["compiled"] if "loop" in median else "",
        "goal": GOALS.get((name, len(logits)), ""),
    }


def measure_changes(logits: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of change of logits, of all requests of a batch."""
    draw = random.Random(0)
    words = [draw.randrange(len(logits[0])) for _ in range(PROMPT)]
    batches = {
        name: [
            Request(str(i), 0, words, draw.choices(words, k=OUTPUT), SamplingParams(**changes), i)
            for i in range(len(logits))
        ]
        for name, changes in {"": {}, **CHANGES}.items()
    }
    samplers = {name: Sampler([1], compiled=True) for name in batches}
    took: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(rounds + 1):
        for name, requests in batches.items():
            changed = logits.clone()
            start = time.perf_counter()
            tokens = samplers[name](changed, requests)
            took[name].append(time.perf_counter() - start)
            for request, token in zip(requests, tokens, strict=True):
                request.output_ids.append(token)
    ms = {name: [1000 * value for value in values[1:]] for name, values in took.items()}
    plain = ms.pop("")
    return [
        {
            "rows": len(logits),
            "changes": name,
            "sampler, ms": f"{statistics.median(values):.3g} ({min(values):.3g})",
            "without, ms": f"{statistics.median(plain):.3g} ({min(plain):.3g})",
            "with / without": statistics.median(value / base for value, base in zip(values, plain, strict=True)),
        }
        for name, values in ms.items()
    ]


def loop_over_rows(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns the tokens as the server drew them before: row by row, in numpy, with sorts."""
    best_ids = logits.argmax(dim=-1).tolist()
    return [
        best_id if row["temperature"] == 0 else _draw_row(values.double().numpy(), row)
        for values, row, best_id in zip(logits, sampling.rows, best_ids, strict=True)
    ]


def _draw_row(logits: np.ndarray, row: np.void) -> int:
    ids = _candidates(logits, row)
    words = _philox(ids.astype(np.uint64), int(row["output_index"]), int(row["seed"]))
    bits = (words[0] >> np.uint64(5)) * np.uint64(2**26) + (words[1] >> np.uint64(6))
    noise = -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2.0**53))
    return int(ids[np.argmax((logits[ids] - logits.max()) / row["temperature"] + noise)])


def _candidates(logits: np.ndarray, row: np.void) -> np.ndarray:
    top_k = len(logits) if row["top_k"] < 0 else int(row["top_k"])
    if top_k == len(logits) and row["top_p"] >= 1.0:
        return np.arange(len(logits))
    likely = np.flatnonzero(logits >= np.partition(logits, -top_k)[-top_k])
    order = likely[np.argsort(-logits[likely], kind="stable")][:top_k]
    if row["top_p"] < 1.0:
        weights = np.exp((logits[order] - logits[order[0]]) / row["temperature"])
        order = order[np.cumsum(weights) - weights < row["top_p"] * weights.sum()]
    return np.sort(order)


def _philox(ids: np.ndarray, output_index: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = ids, np.full_like(ids, output_index)
    c2 = c3 = np.zeros_like(ids)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> shift) ^ c1 ^ k0, product1 & low
        c2, c3 = (product0 >> shift) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1


if __name__ == "__main__":
    main()
