"""Adds `config.json` fields that published configs leave out. This module imports no torch.

The values are the defaults of transformers' configuration class for the family (`model_type`). Example: a Gemma 2 config without
`sliding_window` gets 4096.
"""

from collections.abc import Mapping
from typing import Any

_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    **{"vocab_size": 256_000, "num_hidden_layers": 26, "max_position_embeddings": 8192},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
_INDEXED = _MLA | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_DELTA_NET = {
    **{"head_dim": 256, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
_MAMBA = {
    **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
}
_GRANITE_MOE = {"rms_norm_eps": 1e-6, "shared_intermediate_size": 0}
_GLM = {
    **{"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    "num_key_value_heads": 2,
}
_ERNIE = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_EXAONE = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_NET),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _MLA),
    "phi3": {"original_max_position_embeddings": 4096},  # which a longrope alone asks for
    "granitemoehybrid": _MAMBA | {"shared_intermediate_size": 1024, "rms_norm_eps": 1e-6},
    "falcon_h1": {
        **_MAMBA,
        **{"mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True, "rms_norm_eps": 1e-5},
        "projectors_bias": False,
    },
    "jamba": {
        **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True},
        **{"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144},
    },
    "nemotron_h": {
        **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        **{"use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2"},
        **{"moe_shared_expert_intermediate_size": 7688, "moe_intermediate_size": 7688},
    },
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "gpt_oss": {"torch_dtype": "bfloat16"},  # an MXFP4 checkpoint does not name the number format of its activations
    "mimo_v2_flash": {"rms_norm_eps": 1e-5, "attention_value_scale": 0.707},
    "gemma": {
        **{"head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        **{"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    },
    **dict.fromkeys(("gemma2", "vaultgemma"), _GEMMA2),
    "gemma3_text": _GEMMA | {"vocab_size": 262_208, "num_hidden_layers": 26},
    "gemma4_text": _GEMMA
    | {
        "vocab_size": 262_144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "global_head_dim": 512,
    },
    "cohere2": {"layer_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True},
    "smollm3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo_hybrid": {"rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    **dict.fromkeys(("exaone4", "exaone_moe"), _EXAONE),
    "cwm": {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "sliding_window": 8192},
    "afmoe": {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024},
    "mellum": {"rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 1024},
    "granite_swa": {
        **{"rms_norm_eps": 1e-5, "sliding_window": 128, "num_key_value_heads": 4},
        "tie_word_embeddings": True,
    },
    "granitemoe_swa": _GRANITE_MOE | {"sliding_window": 128},
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE_MOE),
    "arcee": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    "olmoe": {"rms_norm_eps": 1e-5},
    "solar_open": {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8},
    "ernie4_5": _ERNIE | {"head_dim": 128},
    "ernie4_5_moe": _ERNIE,
    "step3p5": {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8},
    # its published configs name no number format, and the weights are bfloat16
    "hy_v3": {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "torch_dtype": "bfloat16"},
    "flint": {"rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 513},
    "dots1": {"rms_norm_eps": 1e-6, "sliding_window": 4096},
    **dict.fromkeys(("glm", "glm4"), _GLM),
    "mistral4": _MLA | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "minimax_m2": {"head_dim": 128},
    "kimi_linear": {
        **{**_MLA, "q_lora_rank": None, "rms_norm_eps": 1e-5},
        **{"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
    },
    "bailing_hybrid": {
        **{**_MLA, "q_lora_rank": None, "head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6},
        "rope_theta": 6_000_000.0,
    },
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": {
        **{**_INDEXED, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **{"rms_norm_eps": 1e-5, "index_n_heads": 32},
    },
    "glm4_moe_lite": _MLA | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
    "youtu": _MLA | {"tie_word_embeddings": True},
    "lfm2": {
        **{"conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {"conv_L_cache": 3},
    "lfm3": {"conv_L_cache": 7, "sliding_window": 256, "head_dim": 128, "num_key_value_heads": 4},
}


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with its family's defaults for the fields that it lacks."""
    return {**_DEFAULTS.get(str(config.get("model_type", "")), {}), **config}
