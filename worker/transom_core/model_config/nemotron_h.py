"""Reads what only Nemotron-H's configs have: blocks that are one sublayer each, and names of their own. Imports no torch.

A published *block* is a mixer (Mamba-2 or attention) or a feed-forward network (MLP or experts), with one norm. A layer of Transom
is a mixer and the feed-forward networks that follow it: mostly one, none where a mixer follows, in Nemotron-H 47B up to three.
Example: the pattern M-M*E has the layers M-, M and *E. A feed-forward network before the first mixer is refused.

Source: `transformers/models/nemotron_h/configuration_nemotron_h.py`; NVIDIA's `modeling_nemotron_h.py`.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from transom_core.errors import ModelError

Config = Mapping[str, Any]

NEMOTRON_H = "nemotron_h"
MIXERS = {"M": "linear_attention", "*": "full_attention"}  # letter of a pattern -> layer type
_FEED_FORWARDS = {"-": "dense", "E": "sparse"}
_LETTERS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"},
    **{"mlp": "-", "moe": "E"},
}
# Nemotron-H's name -> that of other families with Mamba-2 layers.
_NAMES = {
    **{"mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups"},
    **{"ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    **{"use_bias": "mamba_proj_bias", "layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act"},
    "moe_shared_expert_intermediate_size": "shared_intermediate_size",
}
# Names that some configs have for Nemotron-H's own: those of transformers 5.2 to 5.8, and of Nemotron Nano 9B v2.
_OTHER_NAMES = {
    **{"mamba_n_groups": "n_groups", "mamba_num_groups": "n_groups", "mamba_state_dim": "ssm_state_size"},
    **{"mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias", "mamba_dt_limit": "time_step_limit"},
}
# Steps of a prompt are clamped at `time_step_min` in transformers, and nowhere in NVIDIA's code, for which this field, as others
# of steps, only says how a new model is drawn; states are kept in float32 in any case.
KNOWN_FIELDS = (
    *("mamba_num_heads", "mamba_head_dim", "mamba_proj_bias", "mamba_hidden_act", "mamba_ssm_cache_dtype"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank"),
    *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor", "mamba_expand", "mamba_chunk_size"),
)
# What NVIDIA's code could do otherwise, and no published model does.
ONLY = {"mamba_hidden_act": "silu", "residual_in_fp32": False, "sliding_window": None, "n_shared_experts": 1}


def with_own_names(config: Config) -> Config:
    """Return a Nemotron-H config in which no field has one of the other names."""
    kept = {name: value for name, value in config.items() if name not in _OTHER_NAMES}
    return kept | {own: config[name] for name, own in _OTHER_NAMES.items() if name in config}


def with_common_names(config: Config) -> Config:
    """Return a Nemotron-H config in which sizes have the names that other families' have, and layers are those of Transom.

    Raises:
        ModelError: a block is unknown or cannot follow the one before it, or two fields contradict each other.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("mamba_proj_bias", config["use_bias"]) != config["use_bias"]:
        raise ModelError(f"config.json says mamba_proj_bias {config['mamba_proj_bias']}; its use_bias says otherwise.")
    layers = _layers(_pattern(config))
    has_experts = any("E" in layer for layer in layers)
    return {
        **{name: value for name, value in config.items() if name not in KNOWN_FIELDS},
        **{common: config[own] for own, common in _NAMES.items()},
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "layer_types": [MIXERS[layer[0]] for layer in layers],
        "num_hidden_layers": len(layers),
        "feed_forwards": [len(layer) - 1 for layer in layers],
        "mlp_layer_types": [_FEED_FORWARDS.get(layer[-1], "") for layer in layers] if has_experts else None,
        "moe_intermediate_size": config["moe_intermediate_size"] if has_experts else None,
    }


def blocks_of_layers(feed_forwards: Sequence[int]) -> list[int]:
    """Return the number of each layer's first block, the mixer's; `feed_forwards` are those that follow, by layer."""
    return [0, *accumulate(1 + count for count in feed_forwards)][: len(feed_forwards)]


def _pattern(config: Config) -> str:
    """Return the letter of each block. As in transformers, a list of types counts more than a pattern."""
    types = config.get("layers_block_type") or config.get("layer_types")
    pattern = "".join(_LETTERS.get(kind, "?") for kind in types) if types else str(config["hybrid_override_pattern"])
    unknown = [
        types[i] if types else letter for i, letter in enumerate(pattern) if letter not in MIXERS | _FEED_FORWARDS
    ]
    if unknown:
        raise ModelError(
            f"config.json has the block {unknown[0]!r}; known are M or mamba, * or attention, - or mlp, E or moe."
        )
    if int(config.get("num_hidden_layers") or len(pattern)) != len(pattern):
        raise ModelError(
            f"config.json lists {len(pattern)} blocks for num_hidden_layers {config['num_hidden_layers']}."
        )
    return pattern


def _layers(pattern: str) -> list[str]:
    """Return the letters of each layer: its mixer's, then those of the feed-forward networks that follow."""
    layers: list[str] = []
    for number, letter in enumerate(pattern):
        if letter in MIXERS:
            layers.append(letter)
        elif not layers or layers[-1][1:].strip(letter):
            before = f"block {number - 1} is {layers[-1][-1]!r}" if layers else "no block is before it"
            raise ModelError(
                f"config.json: block {number} is {letter!r}, and {before}; feed-forward blocks follow a mixer or one of their kind."
            )
        else:
            layers[-1] += letter
    return layers
