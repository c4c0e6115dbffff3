"""The shipped GPU configurations leave room on the GPUs they name, what a step needs at its largest included."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config import load_config
from moe_serve.launcher.examination.check import examine

CONFIGS = Path(__file__).parents[3] / "configs"
GPU_BYTES = 80e9 * 0.97  # the driver and the libraries take the rest
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "hidden_act": "silu", "head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "eos_token_id": 151645,
    "bos_token_id": 151643, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "num_key_value_heads": 4,
    },
    "Qwen3-235B-A22B": QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [path.name for path in sorted(CONFIGS.glob("*.yaml")) if "device: cuda" in path.read_text()]
)
def test_a_rank_fits_its_gpu(name: str, tmp_path: Path) -> None:
    path = load_config(CONFIGS / name).model.path
    (tmp_path / "config.json").write_text(json.dumps(MODELS[Path(path).name]))
    report = examine(load_config(CONFIGS / name, [f"model.path={tmp_path}", "model.load_format=dummy"]))
    sizes = {memory.name: memory.num_bytes for memory in report.memory}
    assert sizes["a step at its largest"] > 0.1 * 2**30
    assert report.memory_bytes < GPU_BYTES, sizes
