"""A step of a model in four bits whose dense layers keep their codes, against the same with them widened to float32.

    python -m benchmarks.dense_groups [--isa avx512|avx2|plain] [--rounds 12] [--threads 2]

The model is a GGUF file of a Qwen3-MoE with random weights, types mixed as llama.cpp mixes them in Q4_K_M: Q6_K for the
head, values of attention and the experts' down projections, Q4_K for the rest. Experts are in groups on all sides.
Every round times all sides, one after the other; ratios are medians of those within a round, and above 1 where codes
win. Takes two minutes and 3 GB.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from benchmarks.cpu_step import NUM_PROMPT, STEPS_A_ROUND, Clock, Contestant, Row, ratio
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.models import weight_share
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_parameters
from tests.models.gguf_checkpoint import as_q4_k_m, write_gguf

SIZES = {
    "hidden_size": 1024, "num_experts": 16, "num_experts_per_tok": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 16384, "max_position_embeddings": 4096,
}  # fmt: skip
KEPT, WIDENED = "in groups", "widened"
PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    facts = conditions("gguf")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        file = write_gguf(write_bench_model(Path(folder) / "model", **SIZES), Path(folder) / "mixed.gguf", as_q4_k_m)
        clock, num_dense = Clock(), dense_parameters(read_spec(file))
        sides = [
            side(f"{how}, {activations}", file, args.threads, clock, activations)
            for activations in ("int8", "float")
            for how in (KEPT, WIDENED)
        ]
        rows = [row for batch in (1, 16) for row in measured(f"decode, batch {batch}", sides, batch, args.rounds)]
        rows += measured(f"prefill of {PROMPT}", sides, 0, args.rounds // 2)
    notes = (
        f"{args.threads} threads, {args.rounds} rounds; a round's time of decoding is the least of {STEPS_A_ROUND} "
        "steps, the table shows medians over rounds, `widened over this` the median of the ratios within rounds. The "
        f"model: {SIZES}, 8 layers, of width 256; {num_dense / 1e6:.0f} M parameters are dense. Kernels built for "
        f"{cpu_library().form}. Load average at the end: {os.getloadavg()[0]:.2f}."
    )
    print(save("dense_groups", "Dense layers in groups and widened", rows, facts, notes, per_cpu=True))


def side(name: str, file: Path, threads: int, clock: Clock, activations: str) -> Contestant:
    find = weight_share._dense_groups if name.startswith(KEPT) else lambda spec, parts: {}
    with mock.patch.object(weight_share, "_dense_groups", find):
        settings = ["model.skip_tokenizer=true", f"model.activations={activations}"]
        return Contestant(name, file, threads, clock, *settings)


def measured(case: str, sides: list[Contestant], batch: int, rounds: int) -> list[Row]:
    """Returns a row for each side. batch: requests that decode; 0: the time of a prompt's first token is measured"""
    for each in sides:
        each.submit(batch or 1, NUM_PROMPT)
    times: dict[str, list[float]] = {each.name: [] for each in sides}
    for _ in range(rounds):
        for each in sides:
            if batch:
                times[each.name].append(min(each.step()[0] for _ in range(STEPS_A_ROUND)))
                continue
            each.drop_all()
            started_s = time.perf_counter()
            each.submit(1, PROMPT)
            times[each.name].append(time.perf_counter() - started_s)
    for each in sides:
        each.drop_all()
    return [
        {
            "case": case, "dense layers, activations": name, "ms": round(1e3 * statistics.median(own), 2),
            "widened over this": ratio(times[name.replace(KEPT, WIDENED)], own),
        }
        for name, own in times.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
