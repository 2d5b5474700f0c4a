"""Reads what only Jamba's configs have: Mamba-1 layers, and periods of layers. Imports no torch.

A Mamba-1 layer is a recurrent layer whose heads are neighbouring channels. All have one query (C) and one key (B), and each channel
has a step of its own. These come from projections of the convolution's result, which therefore reads values alone.

A field `mamba_*` that is not known here is refused, since it may change what the model computes.

Source: `transformers/models/jamba/configuration_jamba.py` and `modeling_jamba.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.recurrent import LINEAR

Config = Mapping[str, Any]

JAMBA = "jamba"
HEAD_CHANNELS = 64  # that always stay on one rank; the CPU kernel's work item
_KNOWN = ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias")
_ONLY = {"mamba_proj_bias": False, "mamba_inner_layernorms": True, "sliding_window": None, "hidden_act": "silu"}


def with_common_names(config: Config) -> Config:
    """Return a Jamba config with the types of its layers; other families' configs unchanged.

    Raises:
        ModelError: a field is unknown, or has a value that the family's models do not have.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") != JAMBA:
        return config
    for name, value in config.items():
        if name.startswith("mamba_") and name not in (*_KNOWN, *_ONLY):
            raise ModelError(f"config.json has the field {name!r}, which is not known of Jamba models.")
        if name in _ONLY and value != _ONLY[name]:
            raise ModelError(f"config.json says {name} {value!r}; only {_ONLY[name]!r} is possible.")
    layers, sizes = range(int(config["num_hidden_layers"])), ("layer_period", "layer_offset")
    (period, offset), (step, first) = ([int(config[f"{of}_{size}"]) for size in sizes] for of in ("attn", "expert"))
    return {
        **config,
        "layer_types": ["full_attention" if i % period == offset else LINEAR for i in layers],
        "mlp_layer_types": ["sparse" if i % step == first else "dense" for i in layers],
        "conv_bias": config["mamba_conv_bias"],
    }


def mamba1_layer(config: Config) -> LayerAttention:
    """Return a Mamba-1 layer."""
    hidden, given = int(config["hidden_size"]), config["mamba_dt_rank"]
    inner = int(config["mamba_expand"]) * hidden
    size = math.gcd(inner, HEAD_CHANNELS)
    return LayerAttention(
        num_heads=inner // size,
        num_kv_heads=inner // size,
        head_size=int(config["mamba_d_state"]),
        value_size=size,
        recurrent=int(config["mamba_d_conv"]),
        step_rank=-(-hidden // 16) if given == "auto" else int(given),
    )
