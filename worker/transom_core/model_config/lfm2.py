"""Reads what only LFM2's and LFM3's configs have: short convolutions beside attention, and names of their own for common sizes.

Older configs have fields in blocks (`block_dim`, `block_ff_dim`, ...), newer ones the common names. A field `block_*` or `conv_*`
that is not known here is refused, since it may change what the model computes. This module imports no torch.

Source: transformers' `models/lfm2/configuration_lfm2.py`, `modeling_lfm2.py` (the feed-forward layer's width), and `models/lfm3`.
"""

import math
from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config.layer_attention import LayerAttention

Config = Mapping[str, Any]

LFM2_FAMILIES = ("lfm2", "lfm2_moe", "lfm3")
CONVOLUTION = "conv"  # the layer type
# Channels that always stay on one rank and lie side by side in a cached row: a vector of the CPU kernels.
UNIT_CHANNELS = 16
_WIDTHS = ("block_dim", "conv_dim", "conv_dim_out")  # the hidden width under other names
_KNOWN = (
    *_WIDTHS,
    *("block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "block_norm_eps"),
    *("block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_L_cache", "conv_bias", "conv_use_xavier_init"),
)
_LFM3_SWITCHES = ("use_sandwich_norm", "use_attention_gate")  # on in all published models


def with_common_names(config: Config) -> Config:
    """Return an LFM2 config in which sizes have the names that other families' have; other families' configs unchanged.

    Raises:
        ModelError: a field of a block or convolution is unknown, or has a value that the family's models do not have.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") not in LFM2_FAMILIES:
        return config
    for name, value in config.items():
        if name.startswith(("block_", "conv_")) and name not in _KNOWN:
            raise ModelError(f"config.json has the field {name!r}, which is not known of LFM2 models.")
        if name in _WIDTHS and value != config["hidden_size"]:
            raise ModelError(f"config.json says {name} {str(value)[:20]}; only the hidden_size is possible.")
        if name in _LFM3_SWITCHES and not value:
            raise ModelError(f"config.json says {name} false; only true is supported.")
    if not config.get("block_use_swiglu", True):
        raise ModelError("config.json says block_use_swiglu false; LFM2's feed-forward layers are gated.")
    tied = config.get("tie_embedding")
    return {
        **config,
        "intermediate_size": _intermediate_size(config),
        "rms_norm_eps": config.get("norm_eps") or config.get("block_norm_eps") or 1e-5,
        "tie_word_embeddings": config.get("tie_word_embeddings", True) if tied is None else tied,
    }


def convolution_layer(config: Config) -> LayerAttention:
    """Return a layer with a short convolution, whose channels are dealt to ranks in units."""
    hidden = int(config["hidden_size"])
    width = math.gcd(hidden, UNIT_CHANNELS)
    units = hidden // width
    length = int(config["conv_L_cache"])
    return LayerAttention(num_heads=units, num_kv_heads=units, head_size=width, convolution=length)


def layer_type(config: Config, index: int) -> str:
    """Return the type of layer `index` of a config without `layer_types`: LFM2's lists the attention layers instead."""
    if config["model_type"] == "lfm3":
        return ("sliding_attention" if index else CONVOLUTION, CONVOLUTION, "full_attention", CONVOLUTION)[index % 4]
    return "full_attention" if index in config["full_attn_idxs"] else CONVOLUTION


def _intermediate_size(config: Config) -> int:
    """Return the inner width of the dense feed-forward layers.

    `block_auto_adjust_ff_dim` says that the config's width is that of a layer without a gate: two thirds of it, times a factor and
    rounded up, give a gated layer as many weights. LFM2's MoE models and LFM3 never adjust it.
    """
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config["model_type"] != "lfm2" or not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return size
    unit = int(config["block_multiple_of"])
    return -(-int(config["block_ffn_dim_multiplier"] * size) // unit) * unit
