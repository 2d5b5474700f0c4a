"""A model's shape, read from its `config.json` (or GGUF metadata under the same names). No torch.

Which layers look how far is decided here, once: from the checkpoint, or overridden by `--window`, `--sinks`, `--chunk` and
`--window-pattern`. Groups, the planner's bytes and the attention masks all follow from `LayerAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transom_worker.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer's attention reads: everything, the last `window` tokens (the query included) and the first `sinks`, or the
    tokens since the last multiple of `chunk`."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder."""

    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str  # torch's name of it
    layers: tuple[LayerAttention, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a `config.json` describes.

    Raises:
        ModelError: an unknown family, a missing key or an option that is not supported; names it.
    """
    family = str(config.get("model_type", ""))
    if family != "llama":
        raise ModelError(f"config.json says model_type {family!r}; supported so far: 'llama'.")
    scaling = config.get("rope_scaling") or {}
    parameters = config.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type") or scaling.get("type") or parameters.get("rope_type") or "default"
    if rope_type != "default":
        raise ModelError(f"config.json asks for rope scaling {rope_type!r}; supported so far: 'default'.")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json asks for hidden_act {config['hidden_act']!r}; llama models have 'silu'.")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        layer = LayerAttention(
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
        )
        return Architecture(
            family=family,
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config.get("rope_theta") or parameters.get("rope_theta") or 10_000.0),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            layers=(layer,) * int(config["num_hidden_layers"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}, which a {family} model needs.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json has a value that is no size or number: {error}.") from None


def with_windows(
    architecture: Architecture, *, window: int | None, sinks: int = 0, pattern: str, chunk: int | None = None
) -> Architecture:
    """The same model with the layers that `pattern` marks (repeated): S sliding windows, C chunks, F unchanged."""

    def marked(layer: LayerAttention, letter: str) -> LayerAttention:
        match letter:
            case "S":
                return replace(layer, window=window, sinks=sinks)
            case "C":
                return replace(layer, chunk=chunk)
            case _:
                return layer

    layers = tuple(marked(layer, pattern[i % len(pattern)]) for i, layer in enumerate(architecture.layers))
    return replace(architecture, layers=layers)
