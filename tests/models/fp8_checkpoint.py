"""Small FP8 checkpoints: e4m3 values with `weight_scale_inv` blocks of 128 x 128, as DeepSeek-V3 writes them, or with
`weight_scale` per channel or tensor, as compressed-tensors does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import Part, dense_tensors, expert_tensors

# Widths that are not multiples of 128, so that blocks are partial and gate and up would share one if they were stacked.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 200,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 136, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_interleave": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip


QWEN3_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_hidden_layers": 2,
}
BLOCKS = Fp8Block(128, 128)
SCALES = {"blocks": BLOCKS, "channels": PER_CHANNEL, "tensors": PER_TENSOR}


def compressed(**weights: object) -> dict[str, Any]:
    """The quantization_config of compressed-tensors with weights of this kind."""
    kind = {
        "type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "group_size": None, "actorder": None,
        "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
    }  # fmt: skip
    inputs = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": kind | weights, "input_activations": inputs, "output_activations": None}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {"group_0": group}, "kv_cache_scheme": None, "quantization_status": "compressed",
            "global_compression_ratio": None,
        }
    }  # fmt: skip


def write_fp8_checkpoint(folder: Path, block: Fp8Block = BLOCKS, **changes: Any) -> Path:
    """Writes a random tiny model whose projections are FP8; returns the folder."""
    folder.mkdir(exist_ok=True)
    how = {} if block == BLOCKS else compressed(strategy="channel" if block == PER_CHANNEL else "tensor")
    (folder / "config.json").write_text(json.dumps(CONFIG | how | changes))
    spec = read_spec(folder)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def add(part: Part) -> None:
        values = torch.randn(part.shape, generator=generator)
        if "_proj" in part.source:
            # Each matrix has its own size, so that another one's scale would show.
            size = float(torch.rand((), generator=generator)) + 0.5
            values = values * size * part.shape[-1] ** -0.5
            if block == BLOCKS:
                values, tensors[part.source + "_scale_inv"] = quantise(values)
            else:
                values, tensors[part.source + "_scale"] = quantise_whole_rows(values, block)
        elif len(part.shape) == 1:
            values = 1 + 0.1 * values if "norm" in part.source else 0.1 * values
        else:
            values *= part.shape[-1] ** -0.5
        tensors[part.source] = values

    for dense in dense_tensors(spec):
        for part in dense.parts:
            add(part)
    for plan in expert_tensors(spec):
        for expert in range(spec.num_logical):
            for part in plan.parts_of(expert):
                add(part)
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantise(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Returns (fp8 values, scales), block by block as the format defines it."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            square = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[square].abs().max() / 448
            values[square] = (weight[square] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def quantise_whole_rows(weight: Tensor, block: Fp8Block) -> tuple[Tensor, Tensor]:
    """Returns (fp8 values, bfloat16 scales) with a scale for each row, [n, 1], or for all, [1]."""
    amax = weight.abs().amax(1, keepdim=True) if block == PER_CHANNEL else weight.abs().max().view(1)
    scales = (amax / 448).bfloat16()
    return (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scales
