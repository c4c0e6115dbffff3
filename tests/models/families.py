"""Tiny random models of every family, made by transformers, the oracle of parity.

What transformers initialises to zero or one (norms, correction biases, the gate of some families) is randomised:
otherwise a forgotten norm or a bias added in the wrong place would not show.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec

Oracle = Callable[[str], tuple[Any, Path]]  # name -> transformers model, folder it was saved in
COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MLA: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
QWEN: dict[str, Any] = COMMON | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
}  # fmt: skip
SIGMOID: dict[str, Any] = QWEN | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN2: dict[str, Any] = COMMON | {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
QWEN_NEXT: dict[str, Any] = QWEN2 | {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "partial_rotary_factor": 0.25,
}  # fmt: skip
OLMOE: dict[str, Any] = COMMON | {"num_experts": 8, "num_experts_per_tok": 3}
GRANITE: dict[str, Any] = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 3.5, "residual_multiplier": 0.22,
    "attention_multiplier": 0.4, "logits_scaling": 0.3,
}  # fmt: skip
MINIMAX: dict[str, Any] = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8, "intermediate_size": 40,
}  # fmt: skip
LIGHTNING: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "block_size": 32,
    "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.6,
    "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.4, "mlp_beta_factor": 1.2,
}  # fmt: skip
HYBRID: dict[str, Any] = GRANITE | {
    "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 32,
    "shared_intermediate_size": 40,
}  # fmt: skip
# Transformers limits steps of prompts by time_step_min, and steps of decodes not.
NEMOTRON: dict[str, Any] = {
    key: value for key, value in COMMON.items() if key not in ("num_hidden_layers", "intermediate_size")
} | {
    "hybrid_override_pattern": "M*EME", "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 24, "chunk_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 48, "time_step_min": 1e-30,
    "routed_scaling_factor": 2.5, "moe_latent_size": 36,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_head_dim": 20, "linear_num_heads": 3, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4,
}  # fmt: skip
LING3: dict[str, Any] = {
    key: value for key, value in KIMI_LINEAR.items() if not key.startswith("linear_") and key != "layer_types"
} | {"layer_group_size": 3, "head_dim": 20, "first_k_dense_replace": 1}
LFM2: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
    "zero_expert_num": 5, "moe_topk": 4, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 48,
}  # fmt: skip
HUNYUAN: dict[str, Any] = COMMON | {"num_experts": 8, "moe_topk": 3, "head_dim": 16, "intermediate_size": 40}
SPARSE: dict[str, Any] = MLA | {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 17}
AXK2: dict[str, Any] = {
    key: value for key, value in SPARSE.items() if key not in ("first_k_dense_replace", "n_group", "topk_group")
} | {"gated_norm_rank": 6}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
HEATED = YARN | {"original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4}
LLAMA4: dict[str, Any] = COMMON | {
    "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 8, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2, "head_dim": 16, "num_hidden_layers": 5, "attention_chunk_size": 20,
    "attn_scale": 0.5, "floor_scale": 16, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
PHI: dict[str, Any] = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
    "router_jitter_noise": 0.1, "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 3.0 * i for i in range(8)],
        "short_mscale": 1.2, "long_mscale": 1.3,
    },
}  # fmt: skip
COHERE: dict[str, Any] = QWEN | {
    "num_experts_per_tok": 3, "num_hidden_layers": 3, "intermediate_size": 40, "prefix_dense_intermediate_size": 72,
    "first_k_dense_replace": 1, "sliding_window_pattern": 2, "sliding_window": 20, "num_shared_experts": 2,
    "logit_scale": 0.4, "layer_norm_eps": 1e-4,
}  # fmt: skip
ERNIE: dict[str, Any] = COMMON | {
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "num_hidden_layers": 3,
    "moe_layer_start_index": 1, "tie_word_embeddings": False, "head_dim": 16,
}  # fmt: skip

# The window is shorter than most prompts and no multiple of a tile, and many gates and ups reach the limit.
GPT_OSS: dict[str, Any] = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 20,
    "swiglu_limit": 0.7, "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip

_SIGMOID_QWEN: dict[str, Any] = QWEN | {"num_experts_per_tok": 3, "num_hidden_layers": 5, "sliding_window": 20}
EXAONE = _SIGMOID_QWEN | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
AFMOE: dict[str, Any] = _SIGMOID_QWEN | {"num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 1.7}
KOLIBRI = _SIGMOID_QWEN | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}
FLINT = _SIGMOID_QWEN | {"shared_expert_intermediate_size": 48}
MELLUM: dict[str, Any] = QWEN | {
    "num_hidden_layers": 4, "sliding_window": 20, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
    "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"], "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
MIMO: dict[str, Any] = QWEN | {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20, "head_dim": 18,
    "v_head_dim": 12, "routed_scaling_factor": 1.7, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.45},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67},
    },
}  # fmt: skip
LAGUNA: dict[str, Any] = QWEN2 | {
    "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 20, "moe_routed_scaling_factor": 1.7,
    "layer_types": ["full_attention", *["sliding_attention"] * 2], "num_attention_heads_per_layer": [4, 6, 6],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
DBRX: dict[str, Any] = {
    "vocab_size": 256, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 5000.0},
    "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 3},
}  # fmt: skip
JAMBA: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8, "num_experts_per_tok": 3,
    "mamba_d_state": 8, "mamba_dt_rank": 12,
}  # fmt: skip
# Groups of three tokens, and of ten, end in the middle of blocks; limits of choices, window and gates are met.
V4: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 24,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "q_lora_rank": 32,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_hash_layers": 2, "o_groups": 2,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 10}, "sliding_window": 20,
    "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 20, "index_topk": 9, "partial_rotary_factor": 1 / 3,
    "swiglu_limit": 0.7, "hc_mult": 3, "hc_sinkhorn_iters": 4,
}  # fmt: skip
SOLAR = SIGMOID | {"first_k_dense_replace": 0}
HY_V3: dict[str, Any] = QWEN | {"num_experts_per_tok": 3, "router_scaling_factor": 2.1, "rms_norm_eps": 1e-5}
SWA: dict[str, Any] = GRANITE | {"num_hidden_layers": 3, "sliding_window": 20, "shared_intermediate_size": 40}

# Models of the least size for images and sound, beside a text model.
EYE = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
EAR = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 64}
SEEING: dict[str, Any] = {"vision_config": EYE, "tie_word_embeddings": False}

# A family that is another's form, by other names or keys, has a dash in all its names: default tests do not repeat
# there what they have done with that one.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-mha-window": (
        "mixtral",
        COMMON | {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "qwen3_moe-dense-bias-window": (
        "qwen3_moe",
        QWEN
        | {"use_sliding_window": True, "sliding_window": 64}
        | {"mlp_only_layers": [0], "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2),
    "qwen2_moe-step-window": (
        "qwen2_moe",
        QWEN2
        | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 3, "tie_word_embeddings": True},
    ),
    "qwen2_moe-no-bias": ("qwen2_moe", QWEN2 | {"qkv_bias": False, "num_key_value_heads": 4}),
    "qwen3_next": ("qwen3_next", QWEN_NEXT),
    # Attention first, tiles of 32 and 8 columns, keys of an odd width, a convolution of 3 taps, and a dense layer.
    "qwen3_next-odd": (
        "qwen3_next",
        QWEN_NEXT
        | {"layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"], "mlp_only_layers": [1]}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 7}
        | {"linear_value_head_dim": 40, "linear_conv_kernel_dim": 3, "attention_bias": True}
        | {"num_key_value_heads": 4, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", QWEN_NEXT),
    "lfm2_moe": ("lfm2_moe", LFM2),
    # Attention first and last, convolutions of 5 taps with biases, a row of columns that is no multiple of 16.
    "lfm2_moe-bias-tied": (
        "lfm2_moe",
        LFM2
        | {"layer_types": ["full_attention", "conv", "conv", "full_attention"], "conv_L_cache": 5, "conv_bias": True}
        | {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 6, "use_expert_bias": False}
        | {"norm_topk_prob": False, "num_dense_layers": 0, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe-mha-bias-clip": (
        "olmoe",
        OLMOE | {"num_key_value_heads": 4, "attention_bias": True, "clip_qkv": 0.7, "norm_topk_prob": True},
    ),
    "granitemoe": ("granitemoe", GRANITE),
    "granitemoe-bias-tied": (
        "granitemoe",
        GRANITE | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "granitemoeshared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 40}),
    "granitemoehybrid": ("granitemoehybrid", HYBRID),
    # Heads of 40 columns with a state of 7 rows, one group, a convolution of 3 taps without biases, and rotation.
    "granitemoehybrid-odd-rotated": (
        "granitemoehybrid",
        HYBRID
        | {"layer_types": ["attention", "mamba", "mamba", "attention"], "mamba_n_heads": 2, "mamba_d_head": 40}
        | {"hidden_size": 80, "mamba_expand": 1, "mamba_d_state": 7, "mamba_n_groups": 1, "mamba_d_conv": 3}
        | {"mamba_conv_bias": False, "mamba_proj_bias": True, "position_embedding_type": "rope"}
        | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR),
    "bailing_hybrid": ("bailing_hybrid", LING3),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    # Attention first, an MLP, heads of 40 columns with a state of 7 rows, one group, biases of state spaces.
    "nemotron_h-odd": (
        "nemotron_h",
        NEMOTRON
        | {"hybrid_override_pattern": "*-MMEE*", "mamba_num_heads": 2, "mamba_head_dim": 40, "ssm_state_size": 7}
        | {"n_groups": 1, "conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "num_key_value_heads": 4}
        | {"intermediate_size": 72, "moe_intermediate_size": 100, "n_group": 1}
        | {"topk_group": 1, "norm_topk_prob": False, "moe_latent_size": None},
    ),
    "minimax_m2": ("minimax_m2", MINIMAX),
    "minimax_m2-mha-whole": ("minimax_m2", MINIMAX | {"num_key_value_heads": 4, "rotary_dim": 16}),
    "minimax": ("minimax", LIGHTNING),
    # Attention first and last, heads of an uneven width, factors of 1, an epsilon that lightning attention lacks.
    "minimax-odd": (
        "minimax",
        LIGHTNING
        | {"layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"], "num_key_value_heads": 1}
        | {"num_attention_heads": 3, "head_dim": 34, "block_size": 7, "mlp_beta_factor": 1}
        | {"linear_attn_alpha_factor": 1, "tie_word_embeddings": True, "rms_norm_eps": 0.1},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-long-window-mha": (
        "gpt_oss",
        GPT_OSS
        | {
            "num_key_value_heads": 4,
            "sliding_window": 70,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "attention_bias": False},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", HUNYUAN),
    "hunyuan_v1_moe-alpha-bias": (
        "hunyuan_v1_moe",
        HUNYUAN
        | {"num_key_value_heads": 4, "attention_bias": True, "moe_topk": [2, 2]}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "dots1": ("dots1", SIGMOID),
    "dots1-window-bias": (
        "dots1",
        SIGMOID
        | {"sliding_window": 33, "max_window_layers": 1, "attention_bias": True, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0, "n_shared_experts": 2, "tie_word_embeddings": True},
    ),
    "glm4_moe": ("glm4_moe", SIGMOID | {"use_qk_norm": True, "attention_bias": True}),
    # 6 of 16 elements rotate, without the norm over heads, over YaRN's frequencies.
    "glm4_moe-quarter-yarn": (
        "glm4_moe",
        SIGMOID
        | {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.375}},
    ),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text-all-moe": (
        "llama4_text",
        LLAMA4
        | {"interleave_moe_layer_step": 1, "num_hidden_layers": 3, "use_qk_norm": False, "num_key_value_heads": 4}
        | {"attention_chunk_size": 70, "attn_temperature_tuning": False, "attention_bias": True}
        | {"no_rope_layers": [1, 0, 1], "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "phimoe": ("phimoe", PHI),
    "phimoe-plain": (
        "phimoe",
        PHI
        | {"attention_bias": False, "lm_head_bias": False, "num_key_value_heads": 4, "sliding_window": 33}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "router_jitter_noise": 0.3},
    ),
    "cohere2_moe": ("cohere2_moe", COHERE),
    "cohere2_moe-rms-sigmoid-lists": (
        "cohere2_moe",
        COHERE
        | {"rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"}
        | {"layer_types": [*["full_attention"] * 2, "sliding_attention"], "prefix_dense_sliding_window_pattern": 2}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "tie_word_embeddings": False},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe-by-turns-mha": (
        "ernie4_5_moe",
        ERNIE
        | {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 3}
        | {"num_key_value_heads": 4, "moe_num_shared_experts": 0, "tie_word_embeddings": True, "moe_norm_min": 0.5},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        MLA
        | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5}
        | {"rope_parameters": YARN, "kv_lora_rank": 24, "attention_bias": True},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        MLA | {"topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None, "n_shared_experts": 2},
    ),
    "deepseek_v32": ("deepseek_v32", SPARSE),
    "deepseek_v32-yarn": ("deepseek_v32", SPARSE | {"rope_parameters": YARN, "index_topk": 48, "attention_bias": True}),
    "glm4_moe_lite-list": ("glm4_moe_lite", MLA | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "solar_open-plain": ("solar_open", SOLAR),
    "solar_open-bias-yarn": (
        "solar_open",
        SOLAR | {"attention_bias": True, "n_shared_experts": 2, "rope_parameters": YARN},
    ),
    "exaone_moe": ("exaone_moe", EXAONE),
    "exaone_moe-lists": (
        "exaone_moe",
        EXAONE
        | {"layer_types": ["full_attention", *["sliding_attention"] * 4], "num_shared_experts": 2, "n_group": 1}
        | {"mlp_layer_types": ["sparse", "dense", *["sparse"] * 3], "topk_group": 1, "norm_topk_prob": False},
    ),
    "afmoe": ("afmoe", AFMOE),
    "afmoe-scaled-list": (
        "afmoe",
        AFMOE
        | {"layer_types": ["full_attention", *["sliding_attention"] * 4], "mup_enabled": True, "num_dense_layers": 0}
        | {"num_shared_experts": 2, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "kolibri1-plain": ("kolibri1", KOLIBRI),
    "kolibri1-normed-list": (
        "kolibri1",
        KOLIBRI
        | {"layer_types": ["full_attention", *["sliding_attention"] * 4], "norm_topk_prob": True}
        | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "flex_olmo-plain": ("flex_olmo", OLMOE),
    "flex_olmo-mha-bias": (
        "flex_olmo",
        OLMOE | {"num_key_value_heads": 4, "attention_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "flint": ("flint", FLINT),
    "flint-bias-lists": (
        "flint",
        FLINT
        | {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [3], "decoder_sparse_step": 2}
        | {"layer_types": ["sliding_attention", *["full_attention"] * 4]},
    ),
    "hy_v3-plain": ("hy_v3", HY_V3),
    "hy_v3-bias-list": (
        "hy_v3",
        HY_V3 | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense"], "num_shared_experts": 2},
    ),
    "mellum": ("mellum", MELLUM),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    # A dense layer in the middle, values as wide as keys, biases, groups of experts.
    "mimo_v2_flash-bias-lists": (
        "mimo_v2_flash",
        MIMO
        | {"v_head_dim": 18, "attention_bias": True, "attention_value_scale": None, "num_key_value_heads": 1}
        | {"layer_types": ["sliding_attention", *["full_attention"] * 2], "sliding_window": 70, "n_group": 4}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "topk_group": 2, "tie_word_embeddings": True},
    ),
    "laguna": ("laguna", LAGUNA),
    "laguna-bias-lists": (
        "laguna",
        LAGUNA
        | {"attention_bias": True, "layer_types": ["sliding_attention", *["full_attention"] * 2], "gating": "per-head"}
        | {"num_attention_heads_per_layer": [2, 6, 6], "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"tie_word_embeddings": True, "partial_rotary_factor": 0.5},  # unread, beside rotations by kind
    ),
    "dbrx": ("dbrx", DBRX),
    "dbrx-mha-unnormed": (
        "dbrx",
        DBRX
        | {"attn_config": {"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 5000.0}}
        | {"ffn_config": DBRX["ffn_config"] | {"moe_normalize_expert_weights": None}},
    ),
    "jamba": ("jamba", JAMBA),
    "deepseek_v4": ("deepseek_v4", V4),
    "deepseek_v4-yarn": (
        "deepseek_v4",
        V4
        | {"hc_mult": 4, "num_hash_layers": 0, "index_topk": 512, "compress_rates": None, "qk_rope_head_dim": 16}
        | {"partial_rotary_factor": None, "layer_types": None, "rope_parameters": YARN},
    ),
    # Attention first, 80 channels, which end within a tile, with a state of 7 rows, other biases.
    "jamba-odd-tied": (
        "jamba",
        JAMBA
        | {"hidden_size": 80, "attn_layer_offset": 0, "expert_layer_offset": 0, "mamba_expand": 1, "mamba_d_state": 7}
        | {"mamba_dt_rank": "auto", "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True}
        | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "granitemoe_swa": ("granitemoe_swa", SWA),
    "granitemoe_swa-unrotated": (
        "granitemoe_swa",
        SWA | {"layer_rope_theta": [5000.0, 0, 5000.0], "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    ),
    "axk1": ("axk1", MLA | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "axk2": ("axk2", AXK2 | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "axk2-groups-bias": (
        "axk2",
        AXK2 | {"n_group": 4, "topk_group": 2, "attention_bias": True, "gated_norm_rank": 5, "rope_parameters": YARN},
    ),
    "mistral4-heated": ("mistral4", MLA | {"rope_parameters": HEATED, "n_shared_experts": 2}),
    "mistral4-no-q-lora": (
        "mistral4",
        MLA | {"rope_parameters": HEATED, "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False},
    ),
    "qwen3_5_moe-text": ("qwen3_5_moe", SEEING | {"text_config": QWEN_NEXT}),
    "qwen3_vl_moe-text": ("qwen3_vl_moe", SEEING | {"text_config": QWEN | {"moe_intermediate_size": 24}}),
    "qwen3_omni_moe_thinker-text": ("qwen3_omni_moe_thinker", SEEING | {"audio_config": EAR, "text_config": QWEN}),
    "glm4v_moe-text": (
        "glm4v_moe",
        SEEING | {"text_config": SIGMOID | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}},
    ),
    "kimi_k25-text": ("kimi_k25", SEEING | {"text_config": MLA}),
    "longcat_flash": ("longcat_flash", LONGCAT),
    "longcat_flash-bias-yarn": (
        "longcat_flash",
        LONGCAT
        | {"zero_expert_num": 1, "attention_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True}
        | {"q_lora_rank": 31, "kv_lora_rank": 15, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v3-no-q-lora": (
        "deepseek_v3",
        MLA | {"q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    # A latent of 24 makes the expanded form of MLA the cheaper one from 48 query rows on.
    "deepseek_v3-yarn": ("deepseek_v3", MLA | {"rope_parameters": YARN, "kv_lora_rank": 24}),
    "deepseek_v3-halves-bias": ("deepseek_v3", MLA | {"rope_interleave": False, "attention_bias": True}),
    "deepseek_v3-odd": (
        "deepseek_v3",
        MLA | {"q_lora_rank": 31, "kv_lora_rank": 15, "qk_nope_head_dim": 13, "v_head_dim": 11},
    ),
}

# Model types that keep a state of each request: on CPUs alone, and without guesses of tokens.
WITH_STATES = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "bailing_hybrid",
    "minimax",
    "jamba",
)
# Experts that give back their input, values narrower than keys, and entries of tokens, which no kernel of GPUs has.
ON_CPUS_ALONE = (*WITH_STATES, "longcat_flash", "mimo_v2_flash", "deepseek_v4")
LIGHTNING_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # computed from the configuration
ANOTHERS_FORM = {name for name, (kind, _) in FAMILIES.items() if kind not in FAMILIES}


def spec_of(name: str, folder: Path) -> ModelSpec:
    """Returns the spec of a tiny model, without its weights."""
    from transformers import AutoConfig

    model_type, keys = FAMILIES[name]
    AutoConfig.for_model(model_type, **keys).save_pretrained(folder)
    return read_spec(folder)


def make_oracle(name: str, seed: int = 0) -> Any:
    """Returns the transformers model of a family, float32, in evaluation mode."""
    return make_random(*FAMILIES[name], seed)


def make_random(model_type: str, keys: dict[str, Any], seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **keys)
    config._attn_implementation = "eager"
    is_multimodal = "vision_config" in keys or model_type == "mistral4"  # which transformers lists there alone
    make = AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in key.replace("norm_attn_norm", ""):  # a block of DBRX, with its projections
                tensor.copy_(1 + 0.3 * noise)
            elif "e_score_correction_bias" in key or key.endswith(".bias"):
                tensor.copy_(0.2 * noise)  # partly negative
            elif key.endswith("tid2eid"):
                shuffled = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
                tensor.copy_(shuffled.argsort(1)[:, : tensor.shape[1]])
            elif not key.endswith(("inv_freq", *LIGHTNING_BUFFERS)):
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


def save(model: Any, folder: Path) -> Path:
    """Writes config.json and safetensors as a user would find them; returns the folder."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    # Published in other forms than written:
    if (kind := model.config.model_type) in ("kimi_k25", "kimi_linear", "qwen3_vl_moe"):
        tensors = load_file(folder / "model.safetensors")
        save_file(dict(as_published(kind, *each) for each in tensors.items()), folder / "model.safetensors")
    return folder


def as_published(kind: str, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if kind == "qwen3_vl_moe":
        return name, tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
    if kind == "kimi_linear":
        return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name), tensor
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.replace("model.mm_projector.", "mm_projector."), tensor


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Returns [len(ids), vocab] float32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def logits_behind(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Returns the logits that each token of the output was chosen from, [len(output), vocab] float32.

    The output is greedy where every token is the argmax of its row: one forward says so for all of them.
    """
    return oracle_logits(model, prompt + output)[len(prompt) - 1 : -1]
