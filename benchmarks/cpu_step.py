"""A step of the bench model by the compiled CPU kernels: against the memory's speed, plain torch and transformers.

    python -m benchmarks.cpu_step [--threads 2] [--rounds 12]

Decode: the time of an engine's whole step (scheduling, forward, sampling) at batch 1 and 16, behind 64 tokens of
prompt. Contestants take turns: the kernels with float32 weights, the kernels with bfloat16 weights, and
`engine.cpu_kernels: torch`. Roofline: the bytes of weights that a step must read (dense weights, and each expert that a
token of the step chose) over what the same threads read a second in the same round. Bound: the longer of that time and
the one that its fused multiply-adds take at the speed that the same threads reach in registers, in the same round and
instruction set; of plain torch nothing is said, which uses what the processor has. Outside of kernels: CPU time of the
step's own thread outside of calls of the library, which other work on the machine hardly adds to.

Prefill: from a submitted prompt to its first token, against one forward of transformers, and the bound as above.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_model import CONFIG, write_bench_model
from benchmarks.conditions import add_isa, conditions, save, table
from benchmarks.machine_peaks import buffer_to_read, product_rate, read_bandwidth
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.kernels.cpu.library import cpu_library
from tests.engine.queue_mailbox import QueueMailbox

NUM_PROMPT, STEPS_A_ROUND, MAX_POSITION = 64, 6, 4096
PREFILLS = (512, 2048)
KERNELS, HALF, TORCH = "kernels, float32", "kernels, bfloat16 weights", "plain torch, float32"
CALLED_BY_PYTHON = ("run_calls", "attend_plan", "sample_rows")  # of the library, in a step
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    facts = conditions("transformers")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        float32 = with_long_positions(write_bench_model(Path(folder) / "float32"))
        bfloat16 = in_bfloat16(float32, Path(folder) / "bfloat16")
        clock = Clock()
        contestants = [
            Contestant(KERNELS, float32, args.threads, clock),
            Contestant(HALF, bfloat16, args.threads, clock),
            Contestant(TORCH, float32, args.threads, clock, "engine.cpu_kernels=torch"),
        ]
        rows = [row for batch in args.batches for row in decode(contestants, batch, args.threads, args.rounds)]
        prefills = [prefill(contestants, float32, length, args.threads, args.rounds // 2) for length in PREFILLS]
    notes = (
        f"Bench model: hidden 512, 8 layers, 32 experts top-4, width 256, vocabulary 8192. {args.threads} threads, "
        f"{args.rounds} rounds in which contestants take turns; a round's time is the least of {STEPS_A_ROUND} steps, "
        "the table shows medians over rounds, ratios are medians of ratios within rounds. Load average at the end: "
        f"{os.getloadavg()[0]:.2f}. Kernels built for {cpu_library().form}.\n\n## Prefill\n\n{table(prefills)}"
    )
    print(
        save(f"cpu_step_{args.threads}_threads", "A step by the compiled CPU kernels", rows, facts, notes, per_cpu=True)
    )


class Clock:
    """CPU seconds of this thread in calls of the compiled library, inside_s, since it was set to 0."""

    def __init__(self) -> None:
        self.inside_s = 0.0
        library = cpu_library().call
        for name in CALLED_BY_PYTHON:
            if hasattr(library, name):
                setattr(library, name, self.timed(getattr(library, name)))

    def timed(self, function: Callable[..., int]) -> Callable[..., int]:
        """Returns the function, measured."""

        def call(*arguments: int) -> int:
            started_s = time.thread_time()
            result = function(*arguments)
            self.inside_s += time.thread_time() - started_s
            return result

        return call


class Contestant:
    """An engine of one rank. threads: of whatever computes"""

    def __init__(self, name: str, model: Path, threads: int, clock: Clock, *overrides: str):
        self.name = name
        settings = [
            f"model.path={model}",
            "parallel.device=cpu",
            f"parallel.threads_per_rank={threads}",
            "cache.memory_gib=0.25",
            "cache.prefix_cache=false",
            "engine.max_batch_tokens=2048",
            *overrides,
        ]
        group, exchange = EpGroup(0, 1, torch.device("cpu")), make_exchange("auto", dist.group.WORLD, True, 60.0)
        self._mailbox = QueueMailbox()
        self.engine: Engine = build_engine(load_config(overrides=settings), group, exchange, self._mailbox)
        self._torch_threads = threads if name == TORCH else 1
        self._num_submitted = 0
        self._clock = clock

    def submit(self, num_requests: int, length: int) -> None:
        """Adds requests with prompts of their own, which go on until they are dropped, and runs until all decode."""
        torch.set_num_threads(self._torch_threads)
        params = SamplingParams(max_new_tokens=MAX_POSITION - length, temperature=0, ignore_eos=True)
        vocab: Any = CONFIG["vocab_size"]
        for _ in range(num_requests):
            self._num_submitted += 1
            draw = torch.Generator().manual_seed(self._num_submitted)
            prompt = torch.randint(3, vocab, (length,), generator=draw).tolist()
            self.engine.requests.submit(Submit(str(self._num_submitted), 0, prompt, params, seed=0))
        waiting = {str(self._num_submitted - number) for number in range(num_requests)}
        while waiting:
            self.engine.run_step()
            events = [
                event for message in self._mailbox.sent if isinstance(message, Tokens) for event in message.events
            ]
            waiting -= {event.request_id for event in events}
            self._mailbox.sent.clear()

    def drop_all(self) -> None:
        """Ends all requests."""
        for number in range(self._num_submitted + 1):
            self.engine.requests.abort(str(number))

    def load(self) -> torch.Tensor:
        """Returns how many rows each expert of each layer has had."""
        served = self.engine.served
        assert served.recorder is not None
        return torch.stack([served.recorder.row(layer) for layer in range(served.placement.num_layers)])

    def step(self) -> tuple[float, float]:
        """Returns the seconds of one step, and the CPU seconds of this thread outside of the library."""
        torch.set_num_threads(self._torch_threads)
        self._clock.inside_s = 0.0
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self.engine.run_step()
        return time.perf_counter() - started_s, time.thread_time() - started_cpu_s - self._clock.inside_s


def decode(contestants: list[Contestant], batch: int, threads: int, rounds: int) -> list[Row]:
    """Returns a row of the table for each contestant."""
    for contestant in contestants:
        contestant.submit(batch, NUM_PROMPT)
    buffer = buffer_to_read()
    times: dict[str, list[tuple[float, float]]] = {contestant.name: [] for contestant in contestants}
    shares: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    bounds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(rounds):
        bandwidth, rate = read_bandwidth(buffer, threads), product_rate(threads)
        for contestant in contestants:
            steps = []
            for _ in range(STEPS_A_ROUND):
                before = contestant.load()
                steps.append((*contestant.step(), int((contestant.load() > before).sum())))
            step_s, outside_s, num_experts = min(steps)
            times[contestant.name].append((step_s, outside_s))
            read_bytes = weight_bytes(2 if contestant.name == HALF else 4, num_experts)
            shares[contestant.name].append(read_bytes / bandwidth / step_s)
            products = batch * products_of(1, NUM_PROMPT)
            bounds[contestant.name].append(max(read_bytes / bandwidth, products / rate) / step_s)
    for contestant in contestants:
        contestant.drop_all()
    steps_of = {name: [step_s for step_s, _ in own] for name, own in times.items()}
    return [
        {
            "batch": batch,
            "contestant": name,
            "step ms": round(1e3 * statistics.median(steps_of[name]), 2),
            "share of the roofline": round(statistics.median(shares[name]), 2),
            "share of the bound": "" if name == TORCH else round(statistics.median(bounds[name]), 2),
            "outside of kernels ms": "" if name == TORCH else round(1e3 * statistics.median(o for _, o in own), 2),
            "over plain torch": ratio(steps_of[TORCH], steps_of[name]),
            "over float32 kernels": ratio(steps_of[KERNELS], steps_of[name]),
        }
        for name, own in times.items()
    ]


def prefill(contestants: list[Contestant], model: Path, length: int, threads: int, rounds: int) -> Row:
    """Returns how long the first token of a prompt takes, and one forward of transformers over as many tokens."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="grouped_mm")
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants} | {"transformers": []}
    least_s = []
    for number in range(rounds + 1):  # the first round warms up
        least_s.append(products_of(length, 0) / product_rate(threads))
        for contestant in contestants:
            started_s = time.perf_counter()
            contestant.submit(1, length)
            times[contestant.name].append(time.perf_counter() - started_s)
            contestant.drop_all()
        vocab: Any = CONFIG["vocab_size"]
        ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(number))
        torch.set_num_threads(threads)
        started_s = time.perf_counter()
        with torch.inference_mode():
            theirs(ids, use_cache=True, logits_to_keep=1)
        times["transformers"].append(time.perf_counter() - started_s)
    kept = {name: own[1:] for name, own in times.items()}
    row: Row = {"prompt": length}
    row |= {f"{name} ms": round(1e3 * statistics.median(own), 1) for name, own in kept.items()}
    row["float32 kernels' share of the bound"] = ratio(least_s[1:], kept[KERNELS])
    return row | {"transformers over float32 kernels": ratio(kept["transformers"], kept[KERNELS])}


def ratio(first: list[float], second: list[float]) -> float:
    """Returns the median of the ratios within rounds."""
    return round(statistics.median(a / b for a, b in zip(first, second, strict=True)), 2)


def weight_bytes(itemsize: int, num_experts: int) -> int:
    """Returns the bytes of weights that a step reads in which so many experts of all layers have rows."""
    facts: dict[str, Any] = CONFIG
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    num_heads, num_kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    dense = facts["num_hidden_layers"] * (attention + facts["num_experts"] * hidden) + facts["vocab_size"] * hidden
    return itemsize * int(dense + num_experts * 3 * hidden * facts["moe_intermediate_size"])


def products_of(num_tokens: int, num_cached: int) -> int:
    """Returns the fused multiply-adds of so many tokens of one sequence behind cached ones, and one row of logits."""
    facts: dict[str, Any] = CONFIG
    hidden, head_dim, num_heads = facts["hidden_size"], facts["head_dim"], facts["num_attention_heads"]
    attention = hidden * head_dim * (2 * num_heads + 2 * facts["num_key_value_heads"])
    experts = facts["num_experts_per_tok"] * 3 * hidden * facts["moe_intermediate_size"]
    num_keys = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
    rows = num_tokens * (attention + experts + facts["num_experts"] * hidden)
    return int(facts["num_hidden_layers"] * (rows + 2 * num_heads * head_dim * num_keys) + hidden * facts["vocab_size"])


def with_long_positions(model: Path) -> Path:
    """Lets the model of random weights know more positions; returns its folder."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": MAX_POSITION}))
    return model


def in_bfloat16(model: Path, folder: Path) -> Path:
    """Writes the model with weights rounded to bfloat16; returns the folder."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(model / "config.json", folder)
    return folder


if __name__ == "__main__":
    main()
