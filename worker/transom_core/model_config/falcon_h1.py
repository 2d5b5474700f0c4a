"""Reads what only Falcon-H1's configs have: Mamba-2 and attention side by side, and factors of projections. Imports no torch.

In a published layer, a Mamba-2 mixer and attention read the same normed rows, and both outputs are added to the residual; an MLP
follows. It is two layers of Transom, so that each has a cache of one kind:

    layer 2i        Mamba-2 without a feed-forward network
    layer 2i + 1    attention and the MLP; attention reads the rows that layer 2i read (`Architecture.beside`)

A field `*_multiplier` or `*_multipliers` that is not known here is refused, since it may change what the model computes.

Source: `transformers/models/falcon_h1/configuration_falcon_h1.py` and `modeling_falcon_h1.py`.
"""

from collections.abc import Mapping
from typing import Any

from transom_core.errors import ModelError

Config = Mapping[str, Any]

FALCON_H1 = "falcon_h1"
KNOWN_FIELDS = ("mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "mamba_use_mlp")
_FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
_KNOWN_FACTORS = (*(f"{name}_multiplier" for name in _FACTORS), "ssm_multipliers", "mlp_multipliers")
ONLY = {"mamba_use_mlp": True, "attn_layer_indices": None}  # what all published models have
_MAX_LAYERS = 4096  # whose list is written; `attention_layers` refuses more


def with_common_names(config: Config) -> Config:
    """Return a Falcon-H1 config in which layers are those of Transom.

    Raises:
        ModelError: a factor is unknown.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    for name in config:
        if name.endswith(("_multiplier", "_multipliers")) and name not in _KNOWN_FACTORS:
            raise ModelError(f"config.json has the field {name!r}, which is not known of Falcon-H1.")
    layers = int(config["num_hidden_layers"])
    return {
        **config,
        "layer_types": ["linear_attention", "full_attention"] * min(layers, _MAX_LAYERS),
        "num_hidden_layers": 2 * layers,
        "feed_forwards": [0, 1] * min(layers, _MAX_LAYERS),
    }


def layers_beside(config: Config) -> frozenset[int]:
    """Return the layers that read the rows that the layer before them read; none in other families."""
    is_falcon = config.get("model_type") == FALCON_H1
    return frozenset(range(1, int(config["num_hidden_layers"]), 2)) if is_falcon else frozenset()


def factor(config: Config, name: str) -> float:
    """Return the factor `<name>_multiplier`."""
    value = config.get(f"{name}_multiplier")
    return 1.0 if value is None else float(value)


def projection_factors(config: Config) -> tuple[tuple[str, float, float], ...]:
    """Return, of each projection with factors, its name in a layer, its weight's factor and its bias's.

    A factor f of a projection's input and a factor g of its output make g (W f x + b) = (f g W) x + g b.
    """
    attention, ssm = factor(config, "attention_in"), factor(config, "ssm_in")
    z, x, b, c, dt = map(float, config.get("ssm_multipliers") or [1.0] * 5)
    gate, down = map(float, config.get("mlp_multipliers") or [1.0] * 2)
    # Factors of a projection's input and output. Mamba-2's x, B, C and dt have the names of values, keys, queries and steps.
    factors = {
        "self_attn.q_proj": (attention, 1.0),
        "self_attn.k_proj": (attention, factor(config, "key")),
        "self_attn.v_proj": (attention, 1.0),
        "self_attn.o_proj": (1.0, factor(config, "attention_out")),
        **{f"mamba.in_proj_{name}": (ssm, out) for name, out in zip("zvkqa", (z, x, b, c, dt), strict=True)},
        "mamba.out_proj": (1.0, factor(config, "ssm_out")),
        "mlp.gate_proj": (1.0, gate),
        "mlp.up_proj": (1.0, 1.0),
        "mlp.down_proj": (1.0, down),
    }
    return tuple((name, into * out, out) for name, (into, out) in factors.items())
