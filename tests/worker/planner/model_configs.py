"""The parts of published `config.json` files that say what a layer's cache holds."""

from typing import Any

from transom_core.model_config.attention_layers import CHUNKED, COMPRESSED_HEAVILY, COMPRESSED_SPARSE, FULL, SLIDING


def _config(
    model_type: str, layers: list[str] | int, heads: int, kv_heads: int, size: int, length: int, **more: Any
) -> Any:
    sizes = {
        **{"model_type": model_type, "num_hidden_layers": layers if isinstance(layers, int) else len(layers)},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "rms_norm_eps": 1e-6},
        **{"hidden_size": heads * size, "intermediate_size": 1024, "vocab_size": 1024, "dtype": "bfloat16"},
        "max_position_embeddings": length,
    }
    return sizes | ({} if isinstance(layers, int) else {"layer_types": layers}) | more


def _gemma(layers: int) -> list[str]:
    return [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(layers)]


def _v4(layers: list[str], heads: int) -> Any:
    sizes = dict(sliding_window=128, qk_rope_head_dim=64, index_head_dim=128)
    return _config("deepseek_v4", layers, heads, 1, 512, 1_048_576, **sizes)


def _mla(model_type: str, layers: int, heads: int, length: int, **sizes: Any) -> Any:
    experts = dict(n_routed_experts=64, num_experts_per_tok=4, kv_lora_rank=512, qk_rope_head_dim=64)
    return _config(model_type, layers, heads, heads, 64, length, **experts, **sizes)


_KIMI: Any = {
    **{"hidden_size": 2304, "num_experts": 256, "num_experts_per_token": 8, "moe_renormalize": True},
    "mla_use_nope": True,
    **{"q_lora_rank": None, "num_shared_experts": 1, "num_expert_group": 1, "moe_router_activation_func": "sigmoid"},
    "linear_attn_config": {
        **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [*range(4, 28, 4), 27]},
        "kda_layers": [index for index in range(1, 27) if index % 4],
    },
}
_NEMOTRON_3_NANO: Any = {
    **{"hidden_size": 2688, "mamba_num_heads": 64, "vocab_size": 131_072, "n_routed_experts": 128},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
_FALCON_H1_SMALL: Any = {
    **{"hidden_size": 1024, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
    **{"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.390625},
    **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25},
    **{"ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375]},
    **{"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
    **{"attn_layer_indices": None, "mamba_use_mlp": True},
}
# 45 layers, and 3 for multi-token prediction
_STEP: Any = {
    **{"num_hidden_layers": 45, "num_nextn_predict_layers": 3, "num_attention_groups": 8, "sliding_window": 512},
    "attention_other_setting": {
        **{"attention_type": SLIDING, "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
        "true_head_dim": 128,
    },
    **{"rope_theta": [5e6, 1e4, 1e4, 1e4] * 12, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131_072},
        **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
    },
    **{"moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8, "sink": False},
    **{"moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0},
    **{"swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3, "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3},
    **{"moe_router_activation": "sigmoid", "use_head_wise_attn_gate": True, "use_rope_layers": []},
}
_GLOBAL = {str(index).zfill(2): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _config("llama", 32, 32, 8, 128, 8192),
    "llama-3-70b": _config("llama", 80, 64, 8, 128, 8192),
    "mistral-7b-v0.1": _config("mistral", 32, 32, 8, 128, 32_768, sliding_window=4096),
    "gpt-oss-20b": _config("gpt_oss", [SLIDING, FULL] * 12, 64, 8, 64, 131_072, sliding_window=128),
    "gpt-oss-120b": _config("gpt_oss", [SLIDING, FULL] * 18, 64, 8, 64, 131_072, sliding_window=128),
    "gemma-3-27b": _config("gemma3_text", _gemma(62), 32, 16, 128, 131_072, sliding_window=1024),
    "gemma-4-31b-like": _config(
        "gemma4_text", _gemma(60), 32, 16, 256, 262_144, sliding_window=1024, per_layer_config=_GLOBAL
    ),
    "llama-4-scout": _config(
        "llama4_text", [CHUNKED, CHUNKED, CHUNKED, FULL] * 12, 40, 8, 128, 1_048_576, attention_chunk_size=8192
    ),
    "step-3.5-flash": _config("step3p5", [FULL, SLIDING, SLIDING, SLIDING] * 12, 64, 8, 128, 262_144, **_STEP),
    "lfm2-1.2b": _config(
        "lfm2", 16, 32, 8, 64, 128_000, full_attn_idxs=[2, 5, 8, 10, 12, 14], block_ff_dim=12_288, conv_L_cache=3
    ),
    "granite-4.0-h-small": _config(
        "granitemoehybrid",
        ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
        *(32, 8, 128, 131_072),
        **{"mamba_d_head": 64, "mamba_d_state": 128, "num_local_experts": 72, "num_experts_per_tok": 10},
        position_embedding_type="nope",
    ),
    "nemotron-3-nano-30b-a3b": _config("nemotron_h", 52, 32, 2, 128, 262_144, **_NEMOTRON_3_NANO),
    "falcon-h1-0.5b": _config("falcon_h1", 36, 8, 2, 64, 16_384, **_FALCON_H1_SMALL),
    "jamba-1.5-mini": _config("jamba", 32, 32, 8, 128, 262_144),
    "qwen3-next-80b": _config("qwen3_next", 48, 16, 2, 256, 262_144),
    "qwen3.5-35b-a3b": _config("qwen3_5_moe_text", 40, 16, 2, 256, 262_144),
    "kimi-linear-48b": _config("kimi_linear", 27, 32, 32, 72, 1_048_576, **_KIMI),
    "deepseek-v2-lite": _mla("deepseek_v2", 27, 16, 163_840, q_lora_rank=None),
    "deepseek-v3": _mla("deepseek_v3", 61, 128, 163_840),
    "deepseek-v3.2": _mla("deepseek_v32", 61, 128, 163_840),
    "glm-5.1": _mla("glm_moe_dsa", 78, 64, 202_752, index_topk_freq=4),
    "deepseek-v4-flash": _v4([SLIDING] * 2 + ([COMPRESSED_SPARSE, COMPRESSED_HEAVILY] * 21)[:-1], 64),
    "deepseek-v4-pro-like": _v4([COMPRESSED_HEAVILY] * 2 + ([COMPRESSED_SPARSE, COMPRESSED_HEAVILY] * 30)[:-1], 128),
}
