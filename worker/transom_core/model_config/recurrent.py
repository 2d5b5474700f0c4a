"""Reads what only configs with recurrent layers have: the gated delta nets of Qwen3-Next and Qwen3.5. Imports no torch.

A field `linear_*` that is not known here is refused, since it may change what the model computes.

Source: `transformers/models/qwen3_next/configuration_qwen3_next.py`, and those of `qwen3_5` and `qwen3_5_moe`.
"""

from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config.layer_attention import LayerAttention

Config = Mapping[str, Any]

DELTA_NET_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = "linear_attention"  # the layer type
_SIZES = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def delta_net_layer(config: Config) -> LayerAttention:
    """Return a layer with a gated delta net.

    Raises:
        ModelError: a field is unknown.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    for name in config:
        if name.startswith("linear_") and name.removeprefix("linear_") not in _SIZES:
            raise ModelError(f"config.json has the field {name!r}, which is not known of models with gated delta nets.")
    heads, key_heads, key_size, value_size, length = (int(config[f"linear_{name}"]) for name in _SIZES)
    return LayerAttention(
        num_heads=heads, num_kv_heads=key_heads, head_size=key_size, value_size=value_size, recurrent=length
    )


def layer_type(config: Config, index: int) -> str:
    """Return the type of layer `index` of a config without `layer_types`: each n-th layer has full attention."""
    interval = int(config.get("full_attention_interval") or 4)
    return LINEAR if (index + 1) % interval else "full_attention"
