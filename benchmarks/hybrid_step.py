"""A decode step of a model with linear attention by the compiled CPU kernels, over the memory's speed.

    python -m benchmarks.hybrid_step [--threads 2] [--rounds 8]

The layers have Qwen3-Next's shapes: three of linear attention and one with attention, 32 experts instead of 512, random
weights in bfloat16. The time is that of an engine's whole step, behind 64 tokens of prompt. Roofline: the bytes that a
step must move (dense weights, each expert that a token of the step chose, and each request's state, which is read and
written), over what the same threads read a second in the same round.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.cpu_step import NUM_PROMPT, STEPS_A_ROUND, Clock, Contestant
from benchmarks.machine_peaks import buffer_to_read, read_bandwidth
from moe_serve.attention_dp.kv_cache import state_bytes
from moe_serve.config import load_config
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.models.decoder.moe_decoder import state_shapes
from moe_serve.models.families.registry import read_spec

MODEL: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 16384, "hidden_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "num_experts": 32, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 4096, "rope_theta": 1e7,
    "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    facts = conditions()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        dummy = "model.load_format=dummy", "engine.max_running_requests=16"
        contestant = Contestant("kernels, bfloat16 weights", model, args.threads, Clock(), *dummy)
        plan = ModelPlan.of(
            load_config(overrides=[f"model.path={model}", dummy[0]]), read_spec(model), torch.device("cpu")
        )
        rows = [decode(contestant, plan, batch, args.threads, args.rounds) for batch in args.batches]
    notes = (
        f"{args.threads} threads, {args.rounds} rounds; the time is the least of {STEPS_A_ROUND} steps, the table "
        f"shows medians over rounds. Load average at the end: {os.getloadavg()[0]:.2f}. Kernels built for "
        f"{cpu_library().form}."
    )
    title = "A decode step with linear attention"
    print(save(f"hybrid_step_{args.threads}_threads", title, rows, facts, notes, per_cpu=True))


def decode(contestant: Contestant, plan: ModelPlan, batch: int, threads: int, rounds: int) -> dict[str, Any]:
    """Returns a row of the table. plan: of the same model, which counts its bytes"""
    contestant.submit(batch, NUM_PROMPT)
    buffer, shares, steps_ms = buffer_to_read(), [], []
    share = plan.share(0)
    dense = sum(size for name, size in share.dense_bytes.items() if name != "embed")
    states = 2 * batch * state_bytes(state_shapes(plan.spec))
    for _ in range(rounds):
        bandwidth, steps = read_bandwidth(buffer, threads), []
        for _ in range(STEPS_A_ROUND):
            before = contestant.load()
            steps.append((contestant.step()[0], int((contestant.load() > before).sum())))
        step_s, num_experts = min(steps)
        moved = dense + states + num_experts * share.slot_form.num_bytes
        steps_ms.append(1e3 * step_s)
        shares.append(moved / bandwidth / step_s)
    contestant.drop_all()
    return {
        "batch": batch,
        "step ms": round(statistics.median(steps_ms), 2),
        "moved MB": round(moved / 1e6),
        "of it states MB": round(states / 1e6),
        "share of the roofline": round(statistics.median(shares), 2),
    }


if __name__ == "__main__":
    main()
