"""The config.json of published models, without what does not change their form, and how many parameters they have."""

from typing import Any

GLM_45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 131072, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329,
}  # fmt: skip
GLM_45_AIR = GLM_45 | {
    "hidden_size": 4096, "num_hidden_layers": 46, "n_routed_experts": 128, "moe_intermediate_size": 1408,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
DOTS_LLM1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "vocab_size": 152064, "hidden_size": 4096,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": False,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "max_position_embeddings": 32768,
    "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-5, "sliding_window": None, "max_window_layers": 62,
    "use_sliding_window": False, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151649,
}  # fmt: skip
ERNIE_45_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "vocab_size": 103424,
    "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536,
    "intermediate_size": 12288, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_use_aux_free": True, "use_bias": False, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_nextn_predict_layers": 1,
}  # fmt: skip
ERNIE_45_300B = ERNIE_45_21B | {
    "hidden_size": 8192,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_k": 8,
    "moe_num_shared_experts": 0,
    "moe_intermediate_size": 3584,
    "intermediate_size": 28672,
    "moe_layer_start_index": 3,
    "tie_word_embeddings": False,
}

# name -> (config.json, parameters as its authors say)
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "GLM-4.5": (GLM_45, 355e9),
    "GLM-4.5-Air": (GLM_45_AIR, 106e9),
    "dots.llm1": (DOTS_LLM1, 142e9),
    "ERNIE-4.5-21B-A3B": (ERNIE_45_21B, 21.8e9),
    "ERNIE-4.5-300B-A47B": (ERNIE_45_300B, 300e9),
}
