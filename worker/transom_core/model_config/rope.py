"""Reads the rotary position embedding (RoPE) of each layer from a `config.json`. This module imports no torch.

Configs have one of three forms: `rope_theta` with `rope_scaling` for all layers, `rope_parameters` for all layers, or
`rope_parameters` by layer type. Gemma 3's first configs have `rope_local_base_freq` for the layers with a window. Layers without
RoPE are NoPE layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config.layer_attention import LayerAttention

Config = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional", "longrope")
# pairs are neighbours; MLA configs may say otherwise (`rope_interleave`)
INTERLEAVED_FAMILIES = (
    *("cohere2", "llama4_text", "deepseek_v2", "deepseek_v3", "deepseek_v4"),
    *("deepseek_v32", "kimi_k2", "mistral4", "glm4_moe_lite", "glm_moe_dsa", "youtu", "glm", "glm4"),
    *("ernie4_5", "ernie4_5_moe", "bailing_hybrid"),
)
_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_THETA = {
    "smollm3": 2_000_000.0,
    "olmo3": 500_000.0,
    "gpt_oss": 150_000.0,
    "llama4_text": 500_000.0,
    "mixtral": 1_000_000.0,
    "gemma3_text": 1_000_000.0,
    "minimax_m2": 5_000_000.0,
    "cwm": 1_000_000.0,
    "hy_v3": 11_158_840.0,
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), 500_000.0),
    "lfm3": 1_000_000.0,
    "solar_open": 1_000_000.0,
    "lfm2": 1_000_000.0,
    "lfm2_moe": 1_000_000.0,
}
_DEFAULT_PARAMETERS: dict[str, Config] = {
    "mimo_v2_flash": {
        "full_attention": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
    },
    "cwm": {
        **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
    "mellum": {"full_attention": {"rope_theta": 500_000.0}, "sliding_attention": {"rope_theta": 10_000.0}},
    "lfm3": {
        "sliding_attention": {"rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    },
    "gemma4_text": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    },
}
_OWN_THETAS = ("granite_swa", "granitemoe_swa")
_SCALED_WITHOUT_WINDOW = ("gemma3_text", "olmo3")  # in these families rope_scaling applies to full layers only


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The RoPE of a layer: `size` of a head's `head_size` elements rotate, with frequencies of base `theta`.

    `kind` is transformers' `rope_type`. It decides which of the fields from `factor` on are used; they mean what they mean in
    transformers. A longrope multiplies the wavelength of each pair by a factor of its own, and has one set of factors for sequences
    of up to `original_max_position` tokens and one for longer ones.
    """

    kind: str = "default"
    theta: float = 10_000.0
    head_size: int
    size: int
    interleaved: bool = False  # True: a pair is elements (2i, 2i + 1); False: elements half a head apart
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cosine and sine
    pair_factors: tuple[float, ...] = ()  # the set in use; the long one before `for_length` has chosen
    short_factors: tuple[float, ...] = ()

    @property
    def stays_interleaved(self) -> bool:
        """Return whether pairs lie in memory as the checkpoint has them. Those of a whole head are moved half a head apart."""
        return self.interleaved and self.size < self.head_size

    def for_length(self, length: int) -> Rope:
        """Return the RoPE for a server whose longest sequence has `length` tokens.

        Transformers chooses a longrope's set by the length that a sequence has. Its cached keys are rotated already when it
        outgrows the short set, so here, as in vLLM, all sequences have the set of the longest one.
        """
        return self if length > self.original_max_position else replace(self, pair_factors=self.short_factors)


def read_ropes(config: Config, layers: Sequence[LayerAttention]) -> tuple[Rope | None, ...]:
    """Return the RoPE of each layer; None for NoPE layers.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
        ModelError: a longrope has too few or too many factors.
    """
    rotates = _rotates(config, layers)
    # Granite Swash's: a base for each layer
    thetas = config.get("layer_rope_theta") if config.get("model_type") in _OWN_THETAS else None
    if thetas and not isinstance(thetas, list):
        raise ValueError("layer_rope_theta is no list")
    own = thetas or [None] * len(layers)
    return tuple(_rope(config, layer, own[i]) if rotates[i] else None for i, layer in enumerate(layers))


def _rotates(config: Config, layers: Sequence[LayerAttention]) -> list[bool]:
    """Return, by layer, whether the layer has RoPE."""
    match config.get("model_type"):
        case "llama4_text" | "smollm3":
            flags = config.get("no_rope_layers")  # 1: the layer has RoPE, despite the field's name
            interval = int(config.get("no_rope_layer_interval", 4))
            return [bool(flags[i]) if flags else bool((i + 1) % interval) for i in range(len(layers))]
        case "exaone4" | "exaone_moe":
            return [layer.window is not None or config.get("sliding_window") is None for layer in layers]
        case "cohere2" | "afmoe" | "flint":
            return [layer.window is not None for layer in layers]
        case "nemotron_h" | "kimi_linear" | "jamba":
            return [False] * len(layers)
        case "olmo_hybrid" if not {**config, **(config.get("rope_parameters") or {})}.get("rope_theta"):
            return [False] * len(layers)
        case family if family in _OWN_THETAS and config.get("layer_rope_theta"):
            return [bool(config["layer_rope_theta"][index]) for index in range(len(layers))]
        case "granitemoehybrid" if config.get("position_embedding_type") != "rope":
            return [False] * len(layers)
    return [layer.convolution is None and layer.recurrent is None for layer in layers]


def _rope(config: Config, layer: LayerAttention, own_theta: float | None) -> Rope:
    """Return the RoPE of a layer, with its own base if it has one. Fields that the config lacks have transformers' defaults."""
    parameters = _parameters(config, layer)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    short, long = (_factors(parameters.get(name)) for name in ("short_factor", "long_factor"))
    if short or long:
        kind = "longrope"  # Phi 3's first configs call it su or yarn
    elif kind == "mrope":
        kind = "default"  # Qwen's for images, which have positions of three axes; in a text the three are equal
    given = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = float(given or int(config.get("rotary_dim") or layer.head_size) / layer.head_size)
    longest = int(config["max_position_embeddings"])
    original = int((kind == "longrope" and config.get(_ORIGINAL)) or parameters.get(_ORIGINAL) or longest)
    factor = float(parameters.get("factor") or longest / original)
    size = layer.rope_size or 2 * int(share * layer.head_size // 2)
    if not 0 < size <= layer.head_size:
        raise ValueError(
            f"partial_rotary_factor {share}: {size} of the {layer.head_size} numbers of a head would rotate"
        )
    if kind == "longrope" and not 2 * len(short) == 2 * len(long) == size:
        raise ModelError(
            f"config.json has {len(short)} and {len(long)} numbers as short_factor and long_factor of its longrope; "
            f"a head has {size // 2} pairs, so each needs {size // 2}."
        )
    return Rope(
        kind=kind,
        theta=float(own_theta or parameters["rope_theta"]),
        head_size=layer.head_size,
        size=size,
        interleaved=config.get("model_type") in INTERLEAVED_FAMILIES and config.get("rope_interleave") is not False,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(kind, parameters, factor, original),
        pair_factors=long,
        short_factors=short,
    )


def _factors(values: Any) -> tuple[float, ...]:
    """Return a set of longrope's factors; none if the config has none."""
    factors = tuple(map(float, values or ()))
    if isinstance(values, str) or not all(0 < factor < math.inf for factor in factors):
        raise ValueError("a factor of longrope")
    return factors


def _parameters(config: Config, layer: LayerAttention) -> Config:
    """Return the RoPE parameters of this layer, `rope_theta` included."""
    family = str(config.get("model_type", ""))
    if family == "deepseek_v4":
        return _deepseek_v4_parameters(config, compresses=layer.compression is not None)
    found = config.get("rope_parameters") or _DEFAULT_PARAMETERS.get(family, {})
    windowed = layer.window is not None and layer.compression is None
    if any(isinstance(value, Mapping) for value in found.values()):  # by layer type
        found = found.get("sliding_attention" if windowed else "full_attention") or {}
    elif windowed and family in _SCALED_WITHOUT_WINDOW:
        found = {}
    if not windowed or family not in _SCALED_WITHOUT_WINDOW:
        found = {**found, **(config.get("rope_scaling") or {})}
    theta = found.get("rope_theta") or (
        (config.get("rope_local_base_freq") or 10_000.0)
        if windowed and family == "gemma3_text"
        else config.get("rope_theta") or _DEFAULT_THETA.get(family, 10_000.0)
    )
    return {**found, "rope_theta": theta}


def _deepseek_v4_parameters(config: Config, *, compresses: bool) -> Config:
    """Return DeepSeek V4's parameters. Layers with compression have their own theta, and YaRN without its attention factor."""
    found = config.get("rope_parameters") or {}
    if "main" in found and "compress" in found:
        parameters: Config = found["compress" if compresses else "main"]
        return parameters
    if not compresses:
        return {"rope_theta": config.get("rope_theta") or 10_000.0}
    scaling = {**found, **(config.get("rope_scaling") or {})}
    return {"attention_factor": 1.0, **scaling, "rope_theta": config.get("compress_rope_theta") or 160_000.0}


def _attention_factor(kind: str, parameters: Config, factor: float, original: int) -> float:
    """Return the factor of cosine and sine: the config's if it gives one, otherwise that of YaRN's or LongRoPE's paper."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    given, scale, all_dim = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scale and all_dim:
        return yarn_magnitude(factor, float(scale)) / yarn_magnitude(factor, float(all_dim))
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    """Return 0.1 * scale * ln(factor) + 1, YaRN's correction of attention for stretched positions; 1 if `factor` is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
