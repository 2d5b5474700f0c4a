"""Reads what only configs with Mamba-2 layers have: Granite 4's hybrids, Nemotron-H and Falcon-H1. Imports no torch.

A Mamba-2 layer is a recurrent layer. Its heads form `mamba_n_groups` *groups*. A group has queries (C) and keys (B) of its own, as
a key head of other recurrent layers has, and one norm over the outputs of all its heads.

A field `mamba_*` or `time_step_*` that is not known here is refused, since it may change what the model computes.

Source: `transformers/models/granitemoehybrid/configuration_granitemoehybrid.py` and `modeling_granitemoehybrid.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config import falcon_h1, nemotron_h
from transom_core.model_config.layer_attention import LayerAttention

Config = Mapping[str, Any]

MAMBA_FAMILIES = ("granitemoehybrid", nemotron_h.NEMOTRON_H, falcon_h1.FALCON_H1)
_KNOWN = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    "mamba_chunk_size",  # how many tokens a kernel of theirs computes at a time
)
_LARGEST_FLOAT32 = 3.4028235e38
_LAYER_TYPES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
}  # published name -> transformers' later name


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """What all Mamba-2 layers of a model have in common besides their sizes, which are in `LayerAttention`."""

    norm_eps: float  # of the gated norm
    convolution_bias: bool
    projection_bias: bool  # of the projection of inputs
    output_bias: bool
    has_norm: bool = True
    norm_first: bool = False  # gates multiply the norm's result, not what it norms


def with_common_names(config: Config) -> Config:
    """Return a config with Mamba-2 layers in which layer types and widths have the names that other families' have; other families'
    configs unchanged.

    Raises:
        ModelError: a field is unknown, or has a value that the family's models do not have.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") not in MAMBA_FAMILIES:
        return config
    is_nemotron, is_falcon = (config["model_type"] == name for name in (nemotron_h.NEMOTRON_H, falcon_h1.FALCON_H1))
    config = nemotron_h.with_own_names(config) if is_nemotron else config
    known = nemotron_h.KNOWN_FIELDS if is_nemotron else (*_KNOWN, *(falcon_h1.KNOWN_FIELDS if is_falcon else ()))
    for name in config:
        if name.startswith(("mamba_", "time_step_")) and name not in known:
            raise ModelError(f"config.json has the field {name!r}, which is not known of models with Mamba-2 layers.")
    # transformers applies the limits to the steps of a prompt, and not to those of single tokens.
    if [_number(limit) for limit in config.get("time_step_limit") or ()] not in ([], [0.0, math.inf]):
        raise ModelError(
            f"config.json says time_step_limit {config['time_step_limit']}; only 0 to infinity is possible."
        )
    for name, only in (nemotron_h.ONLY if is_nemotron else falcon_h1.ONLY if is_falcon else {}).items():
        if config.get(name, only) != only:
            raise ModelError(f"config.json says {name} {config[name]!r}; only {only!r} is possible.")
    if is_nemotron:
        return nemotron_h.with_common_names(config)
    if is_falcon:
        return falcon_h1.with_common_names(config)
    if config.get("position_embedding_type") not in (None, "nope", "rope"):
        raise ModelError(
            f"config.json says position_embedding_type {config['position_embedding_type']!r}; known are 'nope' and 'rope'."
        )
    types = config.get("layer_types") or config.get("layers_block_type")
    has_experts = int(config.get("num_local_experts", 1)) > 0
    return {
        **config,
        "layer_types": types and [_LAYER_TYPES.get(kind, kind) for kind in types],
        "intermediate_size": config["intermediate_size" if has_experts else "shared_intermediate_size"],
    }


def mamba_layer(config: Config) -> LayerAttention:
    """Return a Mamba-2 layer.

    Raises:
        ModelError: the heads do not make up the inner width.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    names = ("n_heads", "n_groups", "d_state", "d_conv")
    heads, groups, state, length = (int(config[f"mamba_{name}"]) for name in names)
    given, expand = config["mamba_d_head"], config.get("mamba_expand")  # Nemotron-H's heads may have any size
    inner = heads * int(given) if expand is None else int(expand) * int(config["hidden_size"])
    own = config.get("mamba_d_ssm")  # Falcon-H1's inner width
    inner = inner if own is None else int(own)
    size = inner // heads if given == "auto" else int(given)
    if size * heads != inner:
        raise ModelError(
            f"config.json gives Mamba-2 layers {heads} heads of {size}; "
            f"{'mamba_expand times hidden_size' if own is None else 'mamba_d_ssm'} is {inner}."
        )
    return LayerAttention(num_heads=heads, num_kv_heads=groups, head_size=state, value_size=size, recurrent=length)


def read_mamba(config: Config) -> Mamba | None:
    """Return what the Mamba-2 layers of a model have in common; None if the family has none."""
    if config.get("model_type") not in MAMBA_FAMILIES:
        return None
    return Mamba(
        norm_eps=float(config["rms_norm_eps"]),
        convolution_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        output_bias=bool(config.get("projectors_bias", config["mamba_proj_bias"])),
        has_norm=bool(config.get("mamba_rms_norm", True)),
        norm_first=bool(config.get("mamba_norm_before_gate", False)),
    )


def _number(value: Any) -> float:
    """Return a number of a config. Infinity is written as {"__float__": "Infinity"}, or as a number that float32 does not hold."""
    number = float(value["__float__"] if isinstance(value, Mapping) else value)
    return math.inf if number > _LARGEST_FLOAT32 else number
