"""Tokens per second with drafts and without, by kind of prompt and batch; parts of a layer that predicts; the index.

    python -m benchmarks.speculation [--models demo,bench] [--batches 1,4,16,64] [--kinds "code edit,..."]
                                     [--seconds 25] [--modes auto] [--threads 1] [--max-drafts 8]

An engine of one rank in this process, without front end, for each mode. It takes turns of some prompts with drafts and
without, the same prompts, of which `batch` run at once; a turn ends where fewer are left. Outputs have 48 to 96 tokens,
so that requests begin and end one by one, as they do in a server. The tokens are compared, and must be equal.
One engine for both, since of two without drafts one may be 3 % faster, by where their weights lie in memory; in an
order that is drawn anew each time, and with a second turn without drafts, which shows how far equal steps differ. Only
steps are timed: by the CPU time of their thread where there is one, which other work on the machine hardly changes. A
row takes about --seconds, at least three turns; the first row of a model has a turn more, which warms up. With both
models it takes about 20 minutes.

    code edit   code, and the beginning of it with two words changed; the output goes on
    quotes      sentences; the output quotes three of them
    chat        turns of two speakers, who say other things each time
    prose       sentences that do not come again
    random ids  tokens drawn at random
    JSON keys   prose; the output is a JSON object with long names and short values. Demo model: the other has no words

The demo model writes its own outputs. Those of the bench model, whose weights are random, are written here, letter by
letter: it would repeat itself. Everything else runs as it would, the drawing of tokens included.

Model `predicting` is the bench model with a layer for multi-token prediction that is made to be right about 7 times of
10; it has no prompts but random ids. `--models predicting,demo --modes auto,mtp --batches 1,4` writes a table of its
own, with what the parts of a step take; the demo model has such a layer, too. `--models index` does so with the index
of texts: what looks at it take, and how many there are where outputs do not repeat themselves.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_model import write_bench_model, write_predicting_model
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.speculation import MTP, Speculator
from moe_serve.config import SpeculationConfig, load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.output.sampler import Sampler
from moe_serve.engine.protocol.messages import Submit, Tokens
from moe_serve.engine.step.exchange import OneRankExchange
from moe_serve.kernels.sampling import LogitChanges
from moe_serve.launcher.preflight import load_tokenizer
from moe_serve.process_facts import resident_bytes
from tests.engine.queue_mailbox import QueueMailbox

NUM_OUTPUT = 96
MAX_DRAFTS = SpeculationConfig().max_drafts
INDEX_BYTES = int(SpeculationConfig().index_mib * 2**20)
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


def code_edit(draw: random.Random) -> tuple[str, str]:
    code = function(draw)
    edited = code.replace(draw.choice(_NOUNS), draw.choice(_NOUNS)).replace(draw.choice(_NOUNS), draw.choice(_NOUNS))
    cut = draw.randrange(len(code) // 4)
    return code + edited[:cut], edited[cut:]


def quotes(draw: random.Random) -> tuple[str, str]:
    sentences = [sentence(draw) for _ in range(5)]
    quoted = draw.sample(sentences, 3)
    return "".join(sentences) + "It says: " + quoted[0][:9], quoted[0][9:] + "And: ".join(quoted[1:])


def chat(draw: random.Random) -> tuple[str, str]:
    said = [f"{name}: {sentence(draw)}\n" for name in ("User", "Assistant") * 4]
    return "".join(said[:4]), "".join(said[4:])


def prose(draw: random.Random) -> tuple[str, str]:
    return "".join(sentence(draw) for _ in range(5)), "".join(sentence(draw) for _ in range(4))


KINDS: dict[str, Callable[[random.Random], tuple[str, str]] | None] = {
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


class Asked(NamedTuple):
    """A prompt of ids. written: what comes out, whatever the model says; (): what it says"""

    ids: list[int]
    params: SamplingParams
    written: Sequence[int] = ()


class Written:
    """A sampler that draws tokens, and returns those that are written, where some are."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self.outputs: dict[str, Sequence[int]] = {}  # by request

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int]:
        return self._instead(self._sampler(logits, requests), requests, [0] * len(requests))

    def again(self, logits: Tensor, requests: list[Request], ahead: Sequence[int], changes: Any = None) -> list[int]:
        return self._instead(self._sampler.again(logits, requests, ahead, changes), requests, ahead)

    def behind(self, request: Request, drafts: Sequence[int]) -> list[LogitChanges]:
        return self._sampler.behind(request, drafts)

    def _instead(self, drawn: list[int], requests: list[Request], ahead: Sequence[int]) -> list[int]:
        if not self.outputs:
            return drawn
        places = [len(request.output_ids) + later for request, later in zip(requests, ahead, strict=True)]
        outputs = [self.outputs[request.request_id] for request in requests]
        return [output[min(place, len(output) - 1)] for output, place in zip(outputs, places, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--models", default="demo,bench")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--modes", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-drafts", type=int, default=MAX_DRAFTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts, rows = conditions(), []
    name, title = "speculation", "Drafts of tokens against none"
    clock = "CPU time" if args.threads == 1 else "time"
    notes = (
        f"{NUM_OUTPUT // 2} to {NUM_OUTPUT} tokens for each prompt (JSON: until it is complete), temperature 0, "
        f"one rank with {args.threads} threads, without front end, {clock} of its steps. "
        "`speed` is tokens per second over those without drafts, which had the same prompts in turn, and `speed off` "
        "that of another turn without drafts; in brackets, 95 % of what other draws of the turns would give "
        "(bootstrap). "
    )
    if args.models == "index":
        name, title, rows = "speculation_index", "The index of texts that drafts come from", index_rows()
        notes = (
            "Looks at a batch of requests that decode, in an index that is full: in a loop, where outputs repeat their "
            "prompts and where they are random; and in steps of prompts and outputs of random ids, with mode auto. "
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            for model in args.models.split(","):
                make = {"demo": None, "bench": write_bench_model, "predicting": write_predicting_model}[model]
                path = model if make is None else str(make(Path(folder) / model))
                rows += compare(model, path, args)
        if "mtp" in args.modes.split(","):
            name, title = "speculation_predicting", "Drafts of a layer for multi-token prediction"
            notes += PARTS
    notes += f"Load average at the end: {os.getloadavg()[0]:.2f}."
    print(save(name, title, rows, facts, notes, per_cpu=True))


PARTS = (
    "`rows`: a step with one draft for each request, over one without; `layer`: its runs, over the same; `right`: "
    "drafts that were; `bound`: the speed that follows, (1 + right) / (rows + layer). "
)


class Rank:
    """An engine of one rank in this process, with drafts or without, and the time of its steps.

    plain, decodes: of steps of decodes alone without drafts, requests and seconds; of those that the gate was told of,
                    requests, drafts, seconds, and those of the layer
    looks:          seconds of each look for drafts
    """

    def __init__(self, path: str, mode: str, threads: int, max_drafts: int = MAX_DRAFTS):
        self._mailbox = QueueMailbox(end_when_idle=False)
        settings = [
            f"model.path={path}", "model.dtype=float32", f"speculation.mode={mode}", "parallel.device=cpu",
            f"parallel.threads_per_rank={threads}", "cache.memory_gib=0.25", f"speculation.max_drafts={max_drafts}",
        ]  # fmt: skip
        config = load_config(overrides=settings)
        group = EpGroup(0, 1, torch.device("cpu"))
        self.engine: Engine = build_engine(config, group, OneRankExchange(), self._mailbox)
        self._written = Written(self.engine.sampler)
        self.engine.sampler = self._written  # type: ignore[assignment]
        self.tokenizer = load_tokenizer(config)
        self.plain: list[tuple[int, float]] = []
        self.decodes: list[tuple[int, int, float, float]] = []
        self.looks: list[float] = []
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._number = 0
        speculator = self.engine.scheduler.speculator
        assert speculator is not None, "drafts are made"
        self.speculator, self._predictor = speculator, self.engine.predictor
        self._log(speculator)

    def _log(self, speculator: Speculator) -> None:
        ended, draft = speculator.gate.ended, speculator.draft

        def logged(step: Any, num_like: int) -> None:
            self.decodes.append((step.num_requests, step.num_drafts, step.seconds - step.layer_s, step.layer_s))
            ended(step, num_like)

        def timed(requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
            began_s = self._clock()
            found = draft(requests, num_rows)
            self.looks.append(self._clock() - began_s)
            return found

        speculator.gate.ended = logged  # type: ignore[method-assign]
        speculator.draft = timed  # type: ignore[method-assign]

    def turn(self, prompts: Sequence[Asked], batch: int, drafts: bool) -> tuple[float, list[list[int]]]:
        """Returns the seconds of all steps with so many requests, and the tokens of each prompt. Nothing is cached of
        turns before."""
        self.engine.requests.flush_cache()
        self.engine.scheduler.speculator = self.speculator if drafts else None
        self.engine.predictor = self._predictor if drafts else None
        waiting, found, seconds = deque(prompts), {}, 0.0
        first, num_open, engine = self._number, 0, self.engine
        while True:
            while waiting and num_open < batch:
                ids, params, written = waiting.popleft()
                if written:
                    self._written.outputs[str(self._number)] = written
                engine._receive([Submit(str(self._number), 0, ids, params, seed=0)])
                found[str(self._number)] = []
                self._number, num_open = self._number + 1, num_open + 1
            if num_open < batch:
                break
            engine._schedule_compiled()
            if not engine.scheduler.has_work:
                time.sleep(0.001)  # a grammar is being compiled
                continue
            num_running, wall_s, began_s = engine.scheduler.num_running, time.perf_counter(), self._clock()
            plan = engine.run_step()
            seconds += self._clock() - began_s
            if not drafts and plan.phase == "decode":
                self.plain.append((num_running, time.perf_counter() - wall_s))
            for message in self._mailbox.sent:
                for event in message.events if isinstance(message, Tokens) else ():
                    found[event.request_id] += event.token_ids
                    num_open -= event.finish is not None
            self._mailbox.sent.clear()
        engine.requests.drop_all()
        self._written.outputs.clear()
        return seconds, [found[str(number)] for number in range(first, self._number)]


def compare(model: str, path: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    modes = args.modes.split(",")
    ranks = {mode: Rank(path, mode, args.threads, args.max_drafts) for mode in modes}
    for batch in map(int, args.batches.split(",")):
        for kind in args.kinds.split(","):
            if (kind == "JSON keys" and model != "demo") or (model == "predicting" and kind != "random ids"):
                continue
            # By mode and kind of turn: without drafts, without them again, and with them.
            turns = [(modes[0], "again"), *((mode, name) for mode in modes for name in ("off", "on"))]
            rates: dict[tuple[str, str], list[tuple[int, float]]] = {turn: [] for turn in turns}  # tokens and seconds
            began_s, number = time.perf_counter(), 0 if rows else -1
            while number < 3 or time.perf_counter() - began_s < args.seconds:
                draw = random.Random(f"{kind} {batch} {number}")
                num_prompts = {1: 1, 4: 16, 16: 32}.get(batch, batch + 16)
                prompts = [prompt(kind, draw, model, ranks[modes[0]]) for _ in range(num_prompts)]
                expected = None
                draw.shuffle(turns)
                for mode, name in turns:
                    taken_s, found = ranks[mode].turn(prompts, batch, drafts=name == "on")
                    expected = found if expected is None else expected
                    for mine, other in zip(found, expected, strict=False):
                        both = min(len(mine), len(other))
                        assert mine[:both] == other[:both], (
                            f"drafts have changed tokens: {model}, {kind}, batch {batch}"
                        )
                    if number >= 0:
                        rates[mode, name].append((sum(map(len, found)), taken_s))
                number += 1
            row: dict[str, Any] = {"model": model, "batch": batch, "prompts": kind, "turns": number}
            tokens, seconds = np.array(rates[modes[0], "off"]).sum(0)
            row["tok/s"] = f"{tokens / seconds:.0f}"
            row["speed off"] = speed(rates[modes[0], "off"], rates[modes[0], "again"])
            for mode in modes:
                row[f"speed {mode}"] = speed(rates[mode, "off"], rates[mode, "on"])
            if "mtp" in modes:
                row |= parts_of(ranks["mtp"], batch)
            rows.append(row)
            print(row, flush=True)
    return rows


def parts_of(mtp: Rank, batch: int) -> dict[str, str]:
    """Returns what the parts of a step with a draft for each request take, and the speed that follows."""
    plain_s = statistics.median(step_s for num, step_s in mtp.plain if num == batch)
    steps = [(step_s, layer_s) for num, drafts, step_s, layer_s in mtp.decodes if num == drafts == batch]
    rows, layer = (statistics.median(each) / plain_s for each in zip(*steps, strict=True))
    counters = mtp.speculator.counters
    right = counters.num_accepted[MTP] / counters.num_drafts[MTP]
    return {
        "plain step, ms": f"{1e3 * plain_s:.2f}", "rows": f"{rows:.2f}", "layer": f"{layer:.2f}",
        "right": f"{right:.0%}", "bound": f"{(1 + right) / (rows + layer):.2f}",
    }  # fmt: skip


def index_rows() -> list[dict[str, Any]]:
    """Returns what a look takes in an index that is full, in a loop and in steps, and its share of their time."""
    before, draw = resident_bytes(), np.random.default_rng(0)
    speculator = Speculator(MAX_DRAFTS, INDEX_BYTES, shares_text=True, always=True)
    fill(speculator, draw)
    memory, rows = resident_bytes() - before, []
    with tempfile.TemporaryDirectory() as folder:
        paths = {"demo": "demo", "bench": str(write_bench_model(Path(folder)))}
        ranks = {model: Rank(path, "auto", 1) for model, path in paths.items()}
        for rank in ranks.values():
            fill(rank.speculator, draw)
        for batch in (1, 4, 16, 64):
            in_loop = [looks(speculator, batch, repeats, draw) for repeats in (True, False)]
            row = {"batch": batch, "in a loop, us": " to ".join(f"{1e6 * each:.0f}" for each in sorted(in_loop))}
            for model, rank in ranks.items():
                pick, seconds = random.Random(batch), 0.0
                rank.looks.clear()
                first = rank.engine.step
                for _ in range(max(2, 24 // batch)):
                    prompts = [prompt("random ids", pick, model, rank) for _ in range(batch)]
                    seconds += rank.turn(prompts, batch, drafts=True)[0]
                row[f"in a step, us, {model}"] = f"{1e6 * statistics.median(rank.looks):.0f}" if rank.looks else "none"
                row[f"steps that look, {model}"] = f"{len(rank.looks) / (rank.engine.step - first):.0%}"
                row[f"of their time, {model}"] = f"{sum(rank.looks) / seconds:.2%}"
            rows.append(row | {"memory of the index, MiB": f"{memory / 2**20:.1f}"})
    return rows


def fill(speculator: Speculator, draw: np.random.Generator) -> None:
    """Fills an index with texts of others."""
    for _ in range(7000):
        text = Request("", 0, draw.integers(3, 8192, 999).tolist(), [7], SamplingParams(), 0)
        speculator.draft([text], 0)
        speculator.end(text)


def looks(speculator: Speculator, batch: int, repeats: bool, draw: np.random.Generator) -> float:
    """Returns the median CPU time of a look at some requests, each of which has one new token."""
    prompts = [draw.integers(3, 8192, 200).tolist() for _ in range(batch)]
    requests = [Request("", 0, each, each[:3], SamplingParams(), 0) for each in prompts]
    times = []
    for number in range(180):
        began_s = time.thread_time()
        found = speculator.draft(requests, MAX_DRAFTS * batch)
        times.append(time.thread_time() - began_s)
        assert not repeats or number < 3 or all(found), "an output that repeats its prompt has drafts"
        for request in requests:
            request.output_ids.append(request.prompt_ids[number + 3] if repeats else int(draw.integers(3, 8192)))
    for request in requests:
        speculator.end(request)
    return statistics.median(times)


def speed(off: Sequence[tuple[int, float]], on: Sequence[tuple[int, float]]) -> str:
    """Returns the ratio of tokens per second of all turns, and where 95 % of those of other draws of turns lie.

    off, on: tokens and seconds of each turn
    """
    turns = np.array([off, on])  # [2, turns, 2]
    picks = np.random.default_rng(0).integers(0, len(off), (1000, len(off)))
    tokens, seconds = np.moveaxis(np.concatenate([turns.sum(1)[:, None], turns[:, picks].sum(2)], 1), 2, 0)
    ratios = (tokens[1] / seconds[1]) / (tokens[0] / seconds[0])  # the first is that of all turns
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return f"{ratios[0]:.3f} ({low:.3f}-{high:.3f})"


def prompt(kind: str, draw: random.Random, model: str, rank: Rank) -> Asked:
    """Returns a prompt, with its output where the model has no tokenizer."""
    vocab, make = 2048 if model == "demo" else 8192, KINDS[kind]
    params = SamplingParams(draw.randint(NUM_OUTPUT // 2, NUM_OUTPUT), temperature=0, ignore_eos=True)
    if kind == "JSON keys":
        params = SamplingParams(max_new_tokens=2 * NUM_OUTPUT, temperature=0, constraint=_FORM)
    if make is None:
        ids, written = ([draw.randrange(3, vocab) for _ in range(number)] for number in (64, NUM_OUTPUT))
        return Asked(ids, params, written if model == "bench" else ())
    text, output = make(draw)
    if rank.tokenizer is not None:
        return Asked(rank.tokenizer.encode(text), params)
    ids, written = ([3 + ord(letter) * 61 % (vocab - 3) for letter in each] for each in (text, output))
    assert len(written) >= NUM_OUTPUT, f"{kind}: an output of {len(written)} letters"
    return Asked(ids, params, written)


if __name__ == "__main__":
    main()
