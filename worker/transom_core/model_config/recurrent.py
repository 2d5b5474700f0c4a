"""Reads what only configs with recurrent layers have: gated delta nets of Qwen3-Next, Qwen3.5, Kimi Linear, Ling 3 and Olmo
Hybrid. This module imports no torch.

A field `linear_*` that is not known here is refused, since it may change what the model computes.

Source: `transformers/models/qwen3_next/configuration_qwen3_next.py`, and those of `qwen3_5`, `qwen3_5_moe`,
`kimi_linear`, `bailing_hybrid` (Ling 3) and `olmo_hybrid`.
"""

import math
from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config.layer_attention import LayerAttention

Config = Mapping[str, Any]

DELTA_NET_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = "linear_attention"  # the layer type
KIMI_LINEAR, LING, OLMO_HYBRID = "kimi_linear", "bailing_hybrid", "olmo_hybrid"
KDA_FAMILIES = (KIMI_LINEAR, LING)
WITH_DELTA_NETS = (*DELTA_NET_FAMILIES, *KDA_FAMILIES, OLMO_HYBRID)
# transformers' name of a field -> Kimi Linear's and Ling's
_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
_KIMI_SIZES = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# Ling's fields that change what is computed -> the only value that is supported
_LING_VALUES = {
    **{"no_kda_lora": True, "use_mla_nope": False, "gated_attention_proj_granularity_type": "head_wise"},
    **{"moe_router_enable_expert_bias": True, "use_qkv_bias": False, "use_bias": False},
}
_OLMO_FIELDS = (
    *("linear_allow_neg_eigval", "linear_a_log_min", "linear_a_log_max"),  # all but the first are of training
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
_SIZES = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def delta_net_layer(config: Config) -> LayerAttention:
    """Return a layer with a gated delta net.

    Raises:
        ModelError: a field is unknown.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    is_kda = config.get("model_type") in KDA_FAMILIES
    known = (*_KIMI_SIZES, "linear_attn_config") if is_kda else tuple(f"linear_{name}" for name in _SIZES)
    known += _OLMO_FIELDS if config.get("model_type") == OLMO_HYBRID else ()
    for name in config:
        if name.startswith("linear_") and name not in known:
            raise ModelError(f"config.json has the field {name!r}, which is not known of models with gated delta nets.")
    if is_kda:
        heads, size, length = (int(config[name]) for name in _KIMI_SIZES)
        return LayerAttention(num_heads=heads, num_kv_heads=heads, head_size=size, value_size=size, recurrent=length)
    heads, key_heads, key_size, value_size, length = (int(config[f"linear_{name}"]) for name in _SIZES)
    return LayerAttention(
        num_heads=heads, num_kv_heads=key_heads, head_size=key_size, value_size=value_size, recurrent=length
    )


def with_common_names(config: Config) -> Config:
    """Return a config of Kimi Linear or Ling with transformers' names, and with its layers' types; of Olmo Hybrid with the sizes
    that it derives from others; other configs as they are.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") == OLMO_HYBRID:
        return _with_olmo_sizes(config)
    if config.get("model_type") not in KDA_FAMILIES:
        return config
    found = {name: config[alias] for name, alias in _KIMI_NAMES.items() if config.get(alias) is not None}
    if config.get("model_type") == LING:
        return {**_ling_sizes(config), **config, **found}
    own = dict(config.get("linear_attn_config") or {})
    full, others = (own.pop(name, ()) for name in ("full_attn_layers", "kda_layers"))
    if unknown := sorted(set(own) - set(_KIMI_SIZES.values())):
        raise ValueError(f"linear_attn_config has the field {unknown[0]!r}, which is not known")
    if config.get("mla_use_nope") is False:
        raise ValueError("mla_use_nope false, attention with rotation, is not supported")
    found |= {name: own[field] for name, field in _KIMI_SIZES.items() if field in own}
    if full and not config.get("layer_types"):
        types = dict.fromkeys(full, "full_attention") | dict.fromkeys(others, LINEAR)  # numbers from 1
        found["layer_types"] = [types[number] for number in range(1, int(config["num_hidden_layers"]) + 1)]
    return {**config, **found}


def _ling_sizes(config: Config) -> Config:
    """Return the sizes of Ling's delta nets by Kimi Linear's names.

    Raises:
        ValueError: the config asks for what is not supported.
    """
    for name, value in _LING_VALUES.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} {config[name]!r}; supported is {value!r}")
    sizes = (config[name] for name in ("num_attention_heads", "head_dim", "short_conv_kernel_size"))
    return dict(zip(_KIMI_SIZES, sizes, strict=True))


def most_decay(config: Config) -> float:
    """Return the bound of -log of the decays of Ling's delta nets; 0 if there is none.

    Raises:
        TypeError, ValueError: the bound is no number below 0.
    """
    if config.get("model_type") != LING or not config.get("kda_safe_gate", True):
        return 0.0
    bound = -float(config.get("kda_lower_bound", -5.0))
    if not 0 < bound < math.inf:
        raise ValueError(f"kda_lower_bound {-bound}; it must be below 0")
    return bound


def _with_olmo_sizes(config: Config) -> Config:
    given = {name: value for name, value in config.items() if value is not None}
    heads = int(config["num_attention_heads"])
    key_heads = int(given.get("linear_num_key_heads", heads))
    key_size = int(given.get("linear_key_head_dim", 0.75 * int(config["hidden_size"]) / max(1, key_heads)))
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}
    return {**sizes, "linear_key_head_dim": key_size, "linear_value_head_dim": 2 * key_size, **given}


def layer_type(config: Config, index: int) -> str:
    """Return the type of layer `index` of a config without `layer_types`: each n-th layer has full attention."""
    if config.get("model_type") == KIMI_LINEAR:
        return "full_attention" if index and index % 4 == 0 else LINEAR
    interval = int(config.get("full_attention_interval") or config.get("layer_group_size") or 4)
    return LINEAR if (index + 1) % interval else "full_attention"
