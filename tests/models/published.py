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
_LLAMA4_TEXT: dict[str, Any] = {
    "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "no_rope_layers": [], "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1, "max_position_embeddings": 10485760, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192},
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
}  # fmt: skip
LLAMA4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
    "image_token_index": 200092, "text_config": _LLAMA4_TEXT,
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34},
}  # fmt: skip
LLAMA4_MAVERICK = LLAMA4_SCOUT | {
    "text_config": _LLAMA4_TEXT
    | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None}
    | {"max_position_embeddings": 1048576}
}
DEEPSEEK_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 129280,
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
PHI_35_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "vocab_size": 32064, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": True,
    "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 6400, "lm_head_bias": True,
    "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "sliding_window": 131072, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
                     "long_factor": [1.02 + i for i in range(64)], "short_mscale": 1.243163121016122,
                     "long_mscale": 1.243163121016122},
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 32000,
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
    "hidden_size": 8192, "num_hidden_layers": 54, "num_attention_heads": 64, "num_key_value_heads": 8, "moe_k": 8,
    "moe_num_shared_experts": 0, "moe_intermediate_size": 3584, "intermediate_size": 28672, "moe_layer_start_index": 3,
    "tie_word_embeddings": False,
}  # fmt: skip

QWEN_15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1, "max_position_embeddings": 8192,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 32768,
    "max_window_layers": 21, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151643, "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
QWEN2_57B = QWEN_15_MOE | {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "intermediate_size": 18944,
    "shared_expert_intermediate_size": 20480, "max_window_layers": 28, "max_position_embeddings": 131072,
}  # fmt: skip
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048,
    "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None, "attention_bias": False,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 50279,
}  # fmt: skip
GRANITE_1B: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1024,
    "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 32, "num_experts_per_tok": 8, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
    "logits_scaling": 6.0, "residual_multiplier": 0.22, "attention_bias": False, "max_position_embeddings": 131072,
    "rope_theta": 10000000.0, "rope_scaling": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GRANITE_3B = GRANITE_1B | {
    "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24, "num_local_experts": 40,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0, "attn_type_list": [1] * 62, "use_mtp": True, "num_mtp_modules": 3,
    "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128],
                            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}  # fmt: skip

MINIMAX_TEXT_01: dict[str, Any] = {
    "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "vocab_size": 200064, "hidden_size": 6144,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
    "intermediate_size": 9216, "num_local_experts": 32, "num_experts_per_tok": 2, "rope_theta": 10000000,
    "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10, "block_size": 256, "rms_norm_eps": 1e-5,
    "full_attn_alpha_factor": 3.5565588200778455, "full_attn_beta_factor": 1.0, "mlp_beta_factor": 1.0,
    "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0, "hidden_act": "silu",
    "mlp_alpha_factor": 3.5565588200778455, "max_position_embeddings": 10240000, "tie_word_embeddings": False,
}  # fmt: skip
MIMO_V2_FLASH: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576,
    "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
    "v_head_dim": 128, "swa_num_key_value_heads": 8, "intermediate_size": 16384, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": None, "routed_scaling_factor": None,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "sliding_window_size": 128,
    "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
    "hybrid_layer_pattern": [0, *[int((layer + 1) % 6 != 0) for layer in range(1, 48)]], "hidden_act": "silu",
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_value_scale": 0.707,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "vocab_size": 128167,
    "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32,
    "num_shared_expert": [1] * 32, "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "use_cla": False,
    "use_qk_norm": True, "use_mixed_mlp_moe": True, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 0.0, "type": "dynamic"},
    "torch_dtype": "bfloat16", "eos_token_id": 127960, "pad_token_id": 127961, "bos_token_id": 1,
}  # fmt: skip

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_scaling": None, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
GRANITE_4_H_TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100352,
    "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "position_embedding_type": "nope", "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
    "rope_theta": 10000, "rope_scaling": None, "max_position_embeddings": 131072, "hidden_act": "silu",
    "tie_word_embeddings": True, "eos_token_id": 100257, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE_4_H_SMALL = GRANITE_4_H_TINY | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "mamba_n_heads": 128,
}
# As published but for its number of parameters, of which its name says 48e9 and its sizes make 49.1e9.
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
    "moe_intermediate_size": 1024, "intermediate_size": 9216, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    },
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 163586, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False, "mlp_bias": False,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2,
    "use_conv_bias": True, "use_bias": False, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "chunk_size": 128,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_8B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048,
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3,
    "conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "norm_eps": 1e-5,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "rope_theta": 1000000.0, "max_position_embeddings": 128000, "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
    "dtype": "bfloat16",
}  # fmt: skip

GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880,
    "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
    "intermediate_size": 10240, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False, "num_nextn_predict_layers": 1,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": [154820, 154827, 154829],
}  # fmt: skip
GLM_5 = GLM_47_FLASH | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 12288,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 2048,
}  # fmt: skip
SOLAR_OPEN: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "vocab_size": 196608, "hidden_size": 4096,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1280,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 1000000, "attention_bias": False, "hidden_act": "silu",
    "tie_word_embeddings": False, "first_k_dense_replace": 0, "use_qk_norm": False, "eos_token_id": 2,
}  # fmt: skip
K_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe", "vocab_size": 153600, "hidden_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_experts": 128, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "sliding_window": 128, "sliding_window_pattern": "LLLG", "rms_norm_eps": 1e-5,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "hidden_act": "silu", "eos_token_id": 53,
    "tie_word_embeddings": False,
}  # fmt: skip
HY_3: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 13312, "moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "router_scaling_factor": 2.826, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 120025,
}  # fmt: skip

DEEPSEEK_V3 = {key: value for key, value in DEEPSEEK_V32.items() if not key.startswith("index_")} | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5, "sliding_window": None, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 48, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536, "max_window_layers": 94,
}  # fmt: skip
_SEEING: dict[str, Any] = {"vision_config": {"hidden_size": 1152}, "tie_word_embeddings": False}
QWEN3_VL_30B = _SEEING | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
    "text_config": QWEN3_30B | {
        "model_type": "qwen3_vl_moe_text", "max_position_embeddings": 262144, "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
}  # fmt: skip
QWEN3_OMNI_30B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe",
    "thinker_config": _SEEING | {
        "model_type": "qwen3_omni_moe_thinker", "audio_config": {"d_model": 1280},
        "text_config": QWEN3_30B | {
            "model_type": "qwen3_omni_moe_text", "vocab_size": 152064, "max_position_embeddings": 65536,
            "rope_scaling": {"rope_type": "default", "interleaved": True, "mrope_section": [24, 20, 20]},
        },
    },
}  # fmt: skip
GLM_45V = _SEEING | {
    "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
    "text_config": GLM_45_AIR | {
        "model_type": "glm4v_moe_text", "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    },
}  # fmt: skip
KIMI_K25 = _SEEING | {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": KIMI_K2 | {"max_position_embeddings": 262144, "quantization_config": None},
}  # fmt: skip
LONGCAT_FLASH: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "vocab_size": 131072,
    "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, "attention_method": "MLA", "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256,
    "zero_expert_type": "identity", "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "router_bias": False,
    "routed_scaling_factor": 6.0, "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rms_norm_eps": 1e-5,
    "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
DBRX: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "vocab_size": 100352, "d_model": 6144, "n_heads": 48,
    "n_layers": 40, "max_seq_len": 32768, "emb_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
    "attn_config": {"model_type": "", "kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"model_type": "", "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
                   "moe_jitter_eps": 0, "moe_loss_weight": 0.05},
    "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_dt_rank": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_inner_layernorms": True,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Without expert_dtype and quantization_config, as a checkpoint in bfloat16 has it.
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096,
    "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                     "beta_slow": 1},
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "num_hash_layers": 3,
    "num_nextn_predict_layers": 1, "swiglu_limit": 10.0, "sliding_window": 128, "max_position_embeddings": 1048576,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# name -> (config.json, parameters as its authors say)
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3-VL-30B-A3B": (QWEN3_VL_30B, 30.5e9),  # without what sees images, as the next three
    "Qwen3-Omni-30B-A3B": (QWEN3_OMNI_30B, 30.5e9),  # its thinker
    "GLM-4.5V": (GLM_45V, 106e9),
    "Kimi-K2.5": (KIMI_K25, 1.026e12),
    "GLM-4.7-Flash": (GLM_47_FLASH, 30e9),
    "GLM-5": (GLM_5, 744e9),
    "Solar-Open-100B": (SOLAR_OPEN, 102.6e9),
    "K-EXAONE-236B-A23B": (K_EXAONE, 236e9),
    "Hy3": (HY_3, 295e9),
    "GLM-4.5": (GLM_45, 355e9),
    "GLM-4.5-Air": (GLM_45_AIR, 106e9),
    "dots.llm1": (DOTS_LLM1, 142e9),
    "Llama-4-Scout": (LLAMA4_SCOUT, 107.8e9),  # 109e9 with what sees images
    "Llama-4-Maverick": (LLAMA4_MAVERICK, 400.7e9),
    "DeepSeek-V3.2": (DEEPSEEK_V32, 671.9e9),
    "DeepSeek-V4-Flash": (DEEPSEEK_V4_FLASH, 284e9),
    "Phi-3.5-MoE": (PHI_35_MOE, 41.9e9),
    "ERNIE-4.5-21B-A3B": (ERNIE_45_21B, 21.8e9),
    "ERNIE-4.5-300B-A47B": (ERNIE_45_300B, 300e9),
    "Qwen1.5-MoE-A2.7B": (QWEN_15_MOE, 14.3e9),
    "Qwen2-57B-A14B": (QWEN2_57B, 57.4e9),
    "OLMoE-1B-7B": (OLMOE_1B_7B, 6.92e9),
    "Granite-3.1-1B-A400M": (GRANITE_1B, 1.33e9),
    "Granite-3.1-3B-A800M": (GRANITE_3B, 3.30e9),
    "MiniMax-M2": (MINIMAX_M2, 230e9),
    "MiMo-V2-Flash": (MIMO_V2_FLASH, 309e9),
    "MiniMax-Text-01": (MINIMAX_TEXT_01, 456e9),
    "Hunyuan-A13B": (HUNYUAN_A13B, 80e9),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B, 80e9),
    "LFM2-8B-A1B": (LFM2_8B, 8.34e9),
    "Granite-4.0-H-Tiny": (GRANITE_4_H_TINY, 6.94e9),
    "Granite-4.0-H-Small": (GRANITE_4_H_SMALL, 32.2e9),
    "LongCat-Flash": (LONGCAT_FLASH, 560e9),
    "DBRX": (DBRX, 132e9),
    "Jamba-v0.1": (JAMBA, 51.6e9),
    "Nemotron-3-Nano-30B-A3B": (NEMOTRON_3_NANO, 31.6e9),
}
# Those that the cost model prices (moe_serve/eplb/cost/profiles/models).
PRICED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen3-235B-A22B": QWEN3_235B,
    "Qwen3-30B-A3B": QWEN3_30B,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000, "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
    "eos_token_id": 200002, "pad_token_id": 199999, "tie_word_embeddings": False, "hidden_act": "silu",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip
