"""Reads what only the configs of Step 3.5 and 3.7 have: own names, lists by layer, limits of gates and ups. Imports no torch.

Published configs have the number of heads in layers with a window in `attention_other_setting`, and their lists also have entries
for the layers of multi-token prediction, which come last and are not read. Transformers saves configs in common words
(`per_layer_config`, `rope_parameters` by layer type), which stay as they are.

Source: `transformers/models/step3p7/configuration_step3p7.py` and `modeling_step3p7.py`, and configs on the hub.
"""

import math
from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError

Config = Mapping[str, Any]
Limits = tuple[float, float]  # (g, u): gates are clamped to at most g, and ups to [-u, u]

STEP = "step3p5"
_NAMES = {
    **{"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"},
    **{"num_experts_per_tok": "moe_top_k", "share_expert_dim": "share_expert_dims"},
}
_OTHER_HEADS = {"num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_attention_groups"}
_LISTS = (
    *("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors"),
    *("swiglu_limits", "swiglu_limits_shared"),
)
_ONLY = {
    **{"sink": False, "use_rope_layers": [], "norm_expert_weight": True, "use_head_wise_attn_gate": True},
    **{"moe_router_activation": "sigmoid", "use_moe_router_bias": True, "zero_centered": True},
}
_LARGEST_LIMIT = 1e30


def with_common_names(config: Config) -> Config:
    """Return a config of Step 3.5 in transformers' words; other families' configs unchanged.

    Raises:
        ModelError: a field has a value that the published models do not have.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") != STEP:
        return config
    for name, only in _ONLY.items():
        if config.get(name, only) not in (only, None):
            raise ModelError(f"config.json says {name} {config[name]!r}; only {only!r} is possible.")
    config = {**config, **{name: config[alias] for name, alias in _NAMES.items() if config.get(alias) is not None}}
    num_layers = int(config["num_hidden_layers"])
    padded = num_layers + int(config.get("num_nextn_predict_layers") or 0)
    for name in _LISTS:
        if isinstance(config.get(name), list) and len(config[name]) == padded:
            config[name] = config[name][:num_layers]
    types = config.get("layer_types") or ["full_attention"]
    if not config.get("per_layer_config"):
        other = config.get("attention_other_setting") or {}
        own = {name: other[alias] for name, alias in _OTHER_HEADS.items() if alias in other}
        own |= {"num_attention_heads": config.get("num_sliding_attention_heads") or own.get("num_attention_heads")}
        config["per_layer_config"] = {i: own for i, kind in enumerate(types) if kind == "sliding_attention"}
    ropes = config.get("rope_parameters") or {}
    if not all(isinstance(ropes.get(kind), Mapping) for kind in types):
        ropes = {kind: _rope(config, types.index(kind)) for kind in types}
        ropes.get("full_attention", {}).update(config.get("rope_scaling") or {})
    return {**config, "rope_parameters": ropes, "rope_scaling": None}


def _rope(config: Config, index: int) -> dict[str, Any]:
    """Return the RoPE of layer `index`, without scaling."""
    thetas, shares = config.get("rope_theta") or 10_000.0, config.get("partial_rotary_factors")
    theta = thetas[index] if isinstance(thetas, list) else thetas
    return {"rope_theta": theta, "partial_rotary_factor": shares[index] if shares else None}


def read_limits(config: Config, name: str, num_layers: int) -> tuple[tuple[int, Limits], ...]:
    """Return (layer, limits) for each layer that has a number c in the list `name`; 0 and null mean that it has none.

    A layer computes min(silu(gate), c) * clamp(up, -c, c). Silu grows above -1.28 and is negative below, so min(silu(gate), c) is
    silu(min(gate, s)) with silu(s) = c, which `_inverse_silu` finds.
    """
    clamps = [float(clamp or 0.0) for clamp in config.get(name) or [None] * num_layers]
    if len(clamps) != num_layers or not all(0.0 <= clamp <= _LARGEST_LIMIT for clamp in clamps):
        raise ValueError(f"{name} is no list with a number from 0 to {_LARGEST_LIMIT} for each layer")
    return tuple((index, (_inverse_silu(clamp), clamp)) for index, clamp in enumerate(clamps) if clamp)


def _inverse_silu(clamp: float) -> float:
    """Return s with s / (1 + exp(-s)) = clamp, by s = clamp * (1 + exp(-s)); each turn leaves at most 0.28 of the error."""
    found = clamp
    for _ in range(40):
        found = clamp * (1.0 + math.exp(-found))
    return found
