"""Tokens per second with drafts from text and without, by kind of prompt and batch.

    python -m benchmarks.speculation [--models demo,bench] [--batches 1,4,16,64] [--kinds "code edit,..."] [--rounds 5]
                                     [--modes auto,lookup,mtp]

One `LLM` of one rank with all cores for each mode, in alternation. Every round gives all of them the same new prompts
of one kind, and compares their tokens, which must be equal. Ratios are medians of those within a round. With 5 rounds
and both models it takes about 15 minutes. Model `predicting` is the bench model with a layer for multi-token prediction
that is made to be right about 7 times of 10, for mode mtp; it has no prompts but random ids.

    code edit   a piece of code twice, the second time cut off where it is to be edited
    quotes      a text, then the beginning of one of its sentences
    chat        turns of two speakers, who say other things each time
    prose       sentences that do not come again
    random ids  tokens drawn at random
    JSON keys   prose; the output is a JSON object with long names and short values. Demo model: the other has no words
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_model import write_bench_model, write_predicting_model
from benchmarks.conditions import conditions, save
from moe_serve import LLM, SamplingParams
from moe_serve.attention_dp.constraint import Constraint

NUM_OUTPUT = 96
_NOUNS = ("server", "cache", "request", "token", "expert", "rank", "page", "queue", "model", "step", "layer", "weight")
_VERBS = ("holds", "reads", "writes", "counts", "moves", "checks", "sends", "takes", "keeps", "sorts", "finds", "makes")


def sentence(draw: random.Random) -> str:
    return f"The {draw.choice(_NOUNS)} {draw.choice(_VERBS)} each {draw.choice(_NOUNS)} of the {draw.choice(_NOUNS)}. "


def function(draw: random.Random) -> str:
    name, first, second = (draw.choice(_NOUNS) for _ in range(3))
    return (
        f"def {draw.choice(_VERBS)}_{name}(self, {first}, {second}):\n"
        f'    """Returns the {name} of {first} and {second}."""\n'
        f"    result = {first}.{draw.choice(_VERBS)}({second})\n    for {name} in result:\n"
        f"        if {name} is None:\n            raise ValueError('no {name}')\n        yield {name}, {first}\n\n\n"
    )


def code_edit(draw: random.Random) -> str:
    code = "".join(function(draw) for _ in range(3))
    return code + code[: len(code) // 3]


def quotes(draw: random.Random) -> str:
    sentences = [sentence(draw) for _ in range(8)]
    return "".join(sentences) * 2 + "It says: " + sentences[0] + sentences[1][:20]


def chat(draw: random.Random) -> str:
    return "".join(f"{name}: {sentence(draw)}\n" for name in ("User", "Assistant") * 3)


def prose(draw: random.Random) -> str:
    return "".join(sentence(draw) for _ in range(8))


KINDS: dict[str, Callable[[random.Random], str] | None] = {
    "code edit": code_edit, "quotes": quotes, "chat": chat, "prose": prose, "random ids": None, "JSON keys": prose,
}  # fmt: skip
_NAMES = (
    "number_of_requests", "first_request_in_queue", "seconds_until_first_token", "tokens_of_all_prompts", "model_name",
)  # fmt: skip
_SCHEMA = {
    "type": "object", "properties": {name: {"enum": [1, 2, 30, None, True]} for name in _NAMES},
    "required": list(_NAMES), "additionalProperties": False,
}  # fmt: skip
_FORM = Constraint("json_schema", json.dumps(_SCHEMA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,bench")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--modes", default="auto,lookup")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    facts, rows = conditions(), []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            make = {"demo": None, "bench": write_bench_model, "predicting": write_predicting_model}[model]
            path = model if make is None else str(make(Path(folder) / model))
            rows += compare(model, path, args)
    notes = (
        f"{args.rounds} rounds, {NUM_OUTPUT} tokens for each prompt (JSON: until it is complete), temperature 0, one "
        f"rank with {os.cpu_count()} threads. `speed` is tokens per second over those without drafts in the same "
        f"round, in brackets the slowest and fastest round. Load average at the end: {os.getloadavg()[0]:.2f}."
    )
    name = "speculation_predicting" if args.models == "predicting" else "speculation"
    print(save(name, "Drafts of tokens against none", rows, facts, notes, per_cpu=True))


def compare(model: str, path: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    modes = ["off", *args.modes.split(",")]
    with ExitStack() as stack:
        llms = {
            mode: stack.enter_context(
                LLM(path, num_ranks=1, speculation={"mode": mode}, threads_per_rank=os.cpu_count(), memory_gib=0.5)
            )
            for mode in modes
        }
        for batch in map(int, args.batches.split(",")):
            for kind in args.kinds.split(","):
                make, params = KINDS[kind], SamplingParams(max_new_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)
                if model == "predicting" and kind != "random ids":
                    continue
                if kind == "JSON keys":
                    if model != "demo":
                        continue
                    params = SamplingParams(max_new_tokens=2 * NUM_OUTPUT, temperature=0, constraint=_FORM)
                seconds: dict[str, list[float]] = {mode: [] for mode in modes}
                for number in range(-1, args.rounds):  # the first one warms up
                    draw = random.Random(f"{kind} {batch} {number}")
                    prompts = [prompt(make, draw, model) for _ in range(batch)]
                    expected = None
                    for mode in modes if number % 2 else reversed(modes):
                        started_s = time.perf_counter()
                        found = [each.token_ids for each in llms[mode].generate(prompts, params)]
                        if number >= 0:
                            seconds[mode].append(time.perf_counter() - started_s)
                        expected = found if expected is None else expected
                        assert found == expected, f"drafts have changed tokens: {model}, {kind}, batch {batch}"
                row: dict[str, Any] = {"model": model, "batch": batch, "prompts": kind}
                row["tok/s"] = f"{sum(map(len, found)) / statistics.median(seconds['off']):.0f}"
                for mode in modes[1:]:
                    ratios = [off / on for off, on in zip(seconds["off"], seconds[mode], strict=True)]
                    row[f"speed {mode}"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                rows.append(row)
                print(row, flush=True)
    return rows


def prompt(make: Callable[[random.Random], str] | None, draw: random.Random, model: str) -> Any:
    """Returns a text, or token ids where the model has no tokenizer or the kind has no text."""
    vocab = 2048 if model == "demo" else 8192
    if make is None:
        return [draw.randrange(3, vocab) for _ in range(64)]
    text = make(draw)
    if model == "demo":
        return text
    return [3 + ord(letter) * 61 % (vocab - 3) for letter in text[:400]]


if __name__ == "__main__":
    main()
