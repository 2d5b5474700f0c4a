"""A model's shape, read from its `config.json` (or GGUF metadata under the same names). No torch.

Which layers look how far is decided here, once: from the checkpoint, or overridden by `--window`, `--sinks`, `--chunk` and
`--window-pattern`. Groups, the planner's bytes and the attention masks all follow from `LayerAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transom_worker.errors import ModelError
from transom_worker.models.attention_layers import attention_layers
from transom_worker.models.layer_attention import LayerAttention

__all__ = ["RUNNABLE_FAMILIES", "Architecture", "LayerAttention", "read_architecture", "runnable", "with_windows"]

RUNNABLE_FAMILIES = ("llama",)  # the others can be planned; `models.registry` has a class for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder."""

    family: str  # config.json's model_type
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
    activation: str = "silu"
    rope_type: str = "default"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def served_dtype(self) -> str:
        """The number format that `auto` takes: bfloat16, float32 for a float32 checkpoint."""
        return "float32" if self.checkpoint_dtype == "float32" else "bfloat16"


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a `config.json` describes; of a model that also sees or hears, its text decoder's.

    Raises:
        ModelError: an unknown family, or a missing or wrong value; names it.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}
    family = str(config.get("model_type", ""))
    parameters = _rope_parameters(config)
    scaling = config.get("rope_scaling") or {}
    try:
        return Architecture(
            family=family,
            layers=attention_layers(config),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config.get("rope_theta") or parameters.get("rope_theta") or 10_000.0),
            rope_type=str(scaling.get("rope_type") or scaling.get("type") or parameters.get("rope_type") or "default"),
            activation=str(config.get("hidden_act") or config.get("hidden_activation") or "silu"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}, which a {family} model needs.") from None
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError) as error:
        raise ModelError(f"config.json has a value that is no size or number: {error}.") from None


def runnable(architecture: Architecture) -> Architecture:
    """The same architecture, if there is code that computes it.

    Raises:
        ModelError: it can only be planned; says what is supported.
    """
    if architecture.family not in RUNNABLE_FAMILIES:
        supported = ", ".join(map(repr, RUNNABLE_FAMILIES))
        raise ModelError(
            f"config.json says model_type {architecture.family!r}; supported so far: {supported}. "
            "`transom plan` can still plan its cache."
        )
    if architecture.rope_type != "default":
        raise ModelError(f"config.json asks for rope scaling {architecture.rope_type!r}; supported so far: 'default'.")
    if architecture.activation != "silu":
        raise ModelError(f"config.json asks for hidden_act {architecture.activation!r}; llama models have 'silu'.")
    return architecture


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a config that has them by layer type, the first ones."""
    parameters = config.get("rope_parameters") or {}
    return next((value for value in parameters.values() if isinstance(value, Mapping)), parameters)


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
