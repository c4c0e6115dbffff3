"""The model of the serving benchmarks: a Qwen3-MoE of 114 M parameters (26 M active) with random weights."""

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, Self

NUM_PROMPT, NUM_OUTPUT = 64, 64

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_bench_model(folder: Path, dtype: str = "float32", seed: int = 0, **sizes: int) -> Path:
    """Returns a folder with config.json and model.safetensors, written by transformers.

    dtype: in which the weights are stored, "float32" or "bfloat16";  sizes: other ones than those of CONFIG
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = CONFIG | sizes
    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**known)).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    return folder


def write_packed_bench_model(folder: Path, method: str) -> Path:
    """Returns a folder with the bench model, whose projections are rounded to four bits in groups of 128.

    method: "gptq", symmetric, or "awq", with zero points
    """
    import torch
    from safetensors.torch import load_file, save_file

    from tests.models.packed_checkpoint import Packing, pieces_of

    packing = Packing(method, group=128, symmetric=method == "gptq")
    write_bench_model(folder, "bfloat16")
    packed = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            packed[name] = weight
            continue
        groups = weight.float().unflatten(1, (-1, packing.group))
        least, most = groups.amin(2), groups.amax(2)
        if packing.symmetric:
            scale, zero = torch.maximum(-least / 8, most / 7).half(), torch.full_like(least, 8)
        else:
            scale = ((most - least) / 15).half()
            zero = (-least / scale).round()
        codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15).flatten(1).long()
        index = torch.arange(codes.shape[1]) // packing.group
        pieces = pieces_of(packing, codes, zero.long(), scale, index)
        packed |= {name.removesuffix("weight") + end: piece for end, piece in pieces.items()}
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    coding = packing.quantization_config | ({"lm_head": False} if method == "gptq" else {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": coding}))
    return folder


_NOISE = 2.6  # of what layers add to the residual; with it the layer that predicts is right about 7 times of 10


def write_predicting_model(folder: Path) -> Path:
    """Returns a folder with a GLM-4.5 of the bench model's sizes and a layer for multi-token prediction.

    The head is a permutation of the embedding, so that each token has a usual successor, which the layers' random
    weights often overrule. The layer that predicts adds little to the embedding of the token just drawn, so it says
    that token's usual successor. What it costs is what any layer of these sizes costs.
    """
    import torch
    from safetensors.torch import save_file

    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.weight_plan import dense_tensors, expert_tensors

    config = CONFIG | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": CONFIG["num_experts"],
        "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "torch_dtype": "float32",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder).with_predictor()
    draw = torch.Generator().manual_seed(0)
    parts = [(part, plan.kind) for plan in dense_tensors(spec) for part in plan.parts]
    for experts in expert_tensors(spec):
        parts += [(part, "matrix") for expert in range(spec.num_logical) for part in experts.parts_of(expert)]
    tensors, predictor = {}, f"model.layers.{spec.predictor_id}."
    for part, kind in parts:
        values = torch.randn(part.shape, generator=draw) * part.shape[-1] ** -0.5
        if kind != "matrix":
            values = torch.ones(part.shape) if kind == "norm" else torch.zeros(part.shape)
        if part.source.endswith(("o_proj.weight", "down_proj.weight")):
            values *= 0.01 if part.source.startswith(predictor) else _NOISE
        tensors[part.source] = values
    embedding = torch.randn(spec.vocab_size, spec.hidden, generator=draw)
    successors = torch.randperm(spec.vocab_size, generator=draw)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding[successors.argsort()] * spec.hidden**-0.5
    tensors[predictor + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[predictor + "eh_proj.weight"] = torch.eye(spec.hidden, 2 * spec.hidden)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def draw_prompts(batch: int, seed: int, length: int = NUM_PROMPT) -> list[list[int]]:
    """Returns prompts of random ids. A new seed gives new ones: nothing comes from a prefix cache."""
    draw = random.Random(seed)
    vocab: Any = CONFIG["vocab_size"]
    return [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(batch)]


class BenchLLM:
    """moe_serve on the bench model: greedy, as many tokens a prompt as are asked for, whatever they are."""

    def __init__(self, path: Path, num_ranks: int, num_threads: int, **overrides: Any):
        from moe_serve import LLM

        settings = {
            "threads_per_rank": num_threads,
            "skip_tokenizer": True,
            "max_batch_tokens": 2048,
            "memory_gib": 0.25,
        }
        self._llm = LLM(str(path), num_ranks=num_ranks, dtype="float32", **settings, **overrides)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: Any) -> None:
        self._llm.close()

    def generate(self, prompts: list[list[int]], num_output: int = NUM_OUTPUT) -> list[list[int]]:
        from moe_serve import SamplingParams

        params = SamplingParams(max_new_tokens=num_output, temperature=0, ignore_eos=True)
        return [list(output.token_ids) for output in self._llm.generate(prompts, params)]


def compare(of: dict[str, BenchLLM], batch: int, rounds: int, what: str) -> dict[str, Any]:
    """Returns a row of a table: tokens a second of two, by name, in turn, and the times of the second over the first's.

    what: the ratio's name
    """
    times: dict[str, list[float]] = {name: [] for name in of}
    for number in range(rounds + 1):
        prompts = draw_prompts(batch, seed=1000 * batch + number)
        for name, llm in of.items():
            started = time.perf_counter()
            llm.generate(prompts)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    speeds = {f"{name} tok/s": round(batch * NUM_OUTPUT / statistics.median(each)) for name, each in times.items()}
    return {
        "batch": batch, **speeds, f"{what} (median)": round(statistics.median(ratios), 2),
        f"{what} (min … max)": f"{min(ratios):.2f} … {max(ratios):.2f}", "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip
