"""A decode step of models whose layers keep a state, over what memory and products allow.

    python -m benchmarks.hybrid_step [--threads 2] [--rounds 8] [--models NAME ..] [--batches 1 4 16]

Shapes are those of published models (Ling-3.0 has none), of which a few layers with at most 32 experts fit the memory,
with random weights in bfloat16. The time is that of an engine's whole step, behind 64 tokens of prompt. Takes five
minutes and 6 GB.

Memory's roofline: the bytes that a step must move (dense weights, each expert that a token of the step chose, each
request's state, which is read and written, and what is cached of its tokens), over what the same threads read a second
in the same round. Bound: the parts of a step come one after the other, and each takes as long as its bytes or as its
fused multiply-adds in registers, whichever is longer: each expert for itself, all dense layers, and the rest, which is
bytes alone. At 16 rows dense layers are bound by products, so no kernel that adds float32 numbers reaches the roofline.
"""

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.cpu_step import NUM_PROMPT, STEPS_A_ROUND, Clock, Contestant
from benchmarks.machine_peaks import buffer_to_read, product_rate, read_bandwidth
from moe_serve.attention_dp.kv_cache import bytes_per_block, state_bytes
from moe_serve.config import load_config
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.models.decoder.moe_decoder import kv_layouts, state_shapes
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_tensors
from tests.models.published import GRANITE_4_H_TINY, KIMI_LINEAR_48B, LFM2_8B, NEMOTRON_3_NANO, QWEN3_NEXT_80B

SMALL: dict[str, Any] = {"vocab_size": 16384, "num_hidden_layers": 4, "eos_token_id": 2}
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 16,
    "num_key_value_heads": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_NEXT_80B | SMALL | {"num_experts": 32},
    "kimi_linear": KIMI_LINEAR_48B
    | SMALL
    | {"num_experts": 32, "first_k_dense_replace": 0}
    | {
        "linear_attn_config": KIMI_LINEAR_48B["linear_attn_config"] | {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    },
    "bailing_hybrid": SMALL
    | LATENT
    | {"model_type": "bailing_hybrid", "hidden_size": 2048, "head_dim": 128, "layer_group_size": 4}
    | {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "first_k_dense_replace": 0}
    | {"intermediate_size": 5120, "n_group": 4, "topk_group": 2, "max_position_embeddings": 8192}
    | {"torch_dtype": "bfloat16"},
    "granitemoehybrid": GRANITE_4_H_TINY
    | SMALL
    | {"num_local_experts": 32, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "nemotron_h": NEMOTRON_3_NANO
    | SMALL
    | {"hybrid_override_pattern": "MEM*EME", "num_hidden_layers": 7, "n_routed_experts": 32},
    "lfm2_moe": LFM2_8B | SMALL | {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}


@dataclass(frozen=True)
class StepWork:
    """What a step must move and add. Bytes and products of an expert, of dense layers, and bytes of each request."""

    expert_bytes: int
    expert_products: int
    dense_bytes: int
    dense_products: int
    request_bytes: int

    @classmethod
    def of(cls, plan: ModelPlan) -> "StepWork":
        share, spec = plan.share(0), plan.spec
        unread = "" if spec.tie_embeddings else "embed"  # a row or so of it
        matrices = [each.shape for each in dense_tensors(spec) if each.name != unread and len(each.shape) > 1]
        cached = NUM_PROMPT * bytes_per_block(kv_layouts(spec), 1, plan.cache_dtype)
        return cls(
            share.slot_form.num_bytes,
            share.slot_form.num_bytes // torch.bfloat16.itemsize,
            sum(size for name, size in share.dense_bytes.items() if name != unread),
            sum(math.prod(shape) for shape in matrices),
            2 * state_bytes(state_shapes(spec)) + cached,
        )

    def moved(self, batch: int, expert_rows: list[int]) -> int:
        """Returns the bytes that a step moves. expert_rows: of each expert with rows, over all layers"""
        return self.dense_bytes + len(expert_rows) * self.expert_bytes + batch * self.request_bytes

    def least_s(self, batch: int, expert_rows: list[int], bandwidth: float, rate: float) -> float:
        """Returns the time of its parts one after the other, each by its bytes or its products."""
        dense_s = max(self.dense_bytes / bandwidth, batch * self.dense_products / rate)
        experts_s = (max(self.expert_bytes / bandwidth, rows * self.expert_products / rate) for rows in expert_rows)
        return dense_s + sum(experts_s) + batch * self.request_bytes / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    facts = conditions()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for name in args.models:
        rows += model_rows(name, args.batches, args.threads, args.rounds)
        gc.collect()  # its weights, before those of the next one
    notes = (
        f"{args.threads} threads, {args.rounds} rounds; the time is the least of {STEPS_A_ROUND} steps, the table "
        f"shows medians over rounds. Load average at the end: {os.getloadavg()[0]:.2f}. Kernels built for "
        f"{cpu_library().form}."
    )
    title = "A decode step of models with a state"
    print(save(f"hybrid_step_{args.threads}_threads", title, rows, facts, notes, per_cpu=True))


def model_rows(name: str, batches: list[int], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the rows of a model of MODELS, by an engine that serves it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODELS[name]))
        dummy = "model.load_format=dummy", f"engine.max_running_requests={max(batches)}"
        contestant = Contestant(name, model, threads, Clock(), *dummy)
        settings = load_config(overrides=[f"model.path={model}", dummy[0]])
        work = StepWork.of(ModelPlan.of(settings, read_spec(model), torch.device("cpu")))
    return [decode(contestant, work, batch, threads, rounds) for batch in batches]


def decode(contestant: Contestant, work: StepWork, batch: int, threads: int, rounds: int) -> dict[str, Any]:
    """Returns a row of the table."""
    contestant.submit(batch, NUM_PROMPT)
    buffer, shares, bounds, steps_ms = buffer_to_read(), [], [], []
    for _ in range(rounds):
        bandwidth, rate, steps = read_bandwidth(buffer, threads), product_rate(threads), []
        for _ in range(STEPS_A_ROUND):
            before = contestant.load()
            step_s = contestant.step()[0]
            chosen = contestant.load() - before
            steps.append((step_s, chosen[chosen > 0].tolist()))
        step_s, expert_rows = min(steps)
        moved = work.moved(batch, expert_rows)
        steps_ms.append(1e3 * step_s)
        shares.append(moved / bandwidth / step_s)
        bounds.append(work.least_s(batch, expert_rows, bandwidth, rate) / step_s)
    contestant.drop_all()
    return {
        "model": contestant.name,
        "batch": batch,
        "step ms": round(statistics.median(steps_ms), 2),
        "moved MB": round(moved / 1e6),
        "of requests MB": round(batch * work.request_bytes / 1e6),
        "share of the roofline": round(statistics.median(shares), 2),
        "share of the bound": round(statistics.median(bounds), 2),
    }


if __name__ == "__main__":
    main()
