"""Reads the factors and soft caps that model families apply to embeddings, attention scores, values and logits.

A soft cap replaces a score `s` by `cap * tanh(s / cap)`. This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.model_config import falcon_h1


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """A factor for queries at position `p`: `1 + factor * log(1 + floor((p + first) / interval))`.

    Llama 4 applies it in NoPE layers and counts positions from 1; Ministral 3 applies it in all layers and counts from 0.
    """

    factor: float
    interval: int
    first: int = 1
    in_all_layers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The factors and caps of a model; 1 and None leave values unchanged."""

    embedding: float = 1.0  # factor of token embeddings
    query: float | None = None  # factor of attention scores; None: head size ** -0.5
    query_by_position: PositionScale | None = None
    attention_cap: float | None = None  # soft cap of attention scores
    value: float = 1.0  # factor of attention's values
    logit: float = 1.0  # factor of logits
    logit_cap: float | None = None  # soft cap of logits
    projections: tuple[tuple[str, float, float], ...] = ()  # name in a layer, factor of the weight, factor of the bias


NO_SCALES = Scales()
_GRANITE_FAMILIES = (
    *("granite", "granite_swa", "granitemoe", "granitemoeshared", "granitemoe_swa", "granitemoehybrid"),
)


def read_scales(config: Mapping[str, Any]) -> Scales:
    """Return the scales of the config's family.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    match config.get("model_type"):
        case "gemma":
            return Scales(embedding=_root_of_hidden_size(config))
        case "gemma2" | "vaultgemma" | "gemma3_text":
            return Scales(
                embedding=_root_of_hidden_size(config),
                query=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
                attention_cap=_cap(config, "attn_logit_softcapping"),
                logit_cap=_cap(config, "final_logit_softcapping"),
            )
        case "gemma4_text":
            return Scales(
                embedding=_root_of_hidden_size(config), query=1.0, logit_cap=_cap(config, "final_logit_softcapping")
            )
        case "llama4_text":
            return Scales(query_by_position=_llama4_scale(config))
        case "mimo_v2_flash":
            return Scales(value=float(config.get("attention_value_scale") or 1.0))
        case "cohere2":
            return Scales(logit=float(config.get("logit_scale", 0.0625)))
        case "afmoe" if config.get("mup_enabled"):
            return Scales(embedding=_root_of_hidden_size(config))
        case family if family in _GRANITE_FAMILIES:
            return Scales(
                embedding=float(config.get("embedding_multiplier", 1.0)) / residual_factor(config),
                query=float(config.get("attention_multiplier", 1.0)),
                logit=1.0 / float(config.get("logits_scaling", 1.0)),
            )
        case "falcon_h1":
            return Scales(
                embedding=falcon_h1.factor(config, "embedding"),
                logit=falcon_h1.factor(config, "lm_head"),
                projections=falcon_h1.projection_factors(config),
            )
        case "mistral4":
            return Scales(query_by_position=_ministral3_scale({"rope_parameters": config["rope_parameters"]}))
        case "step3p5" if config.get("query_pre_attn_scalar"):
            return Scales(query=float(config["query_pre_attn_scalar"]) ** -0.5)
        case "ministral3":
            return Scales(query_by_position=_ministral3_scale(config))
    return NO_SCALES


def residual_factor(config: Mapping[str, Any]) -> float:
    """Return Granite's `residual_multiplier` m, by which sublayers' outputs are multiplied; 1 in other families.

    The model is computed without this factor, with the residual divided by m: x + m y = m (x / m + y). So embeddings are divided by
    m, and since rms_norm(x, eps) = rms_norm(x / m, eps / m ** 2), norms have the eps divided by m ** 2.
    """
    is_granite = config.get("model_type") in _GRANITE_FAMILIES
    return float(config.get("residual_multiplier", 1.0)) if is_granite else 1.0


def _llama4_scale(config: Mapping[str, Any]) -> PositionScale | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    return PositionScale(factor=float(config.get("attn_scale", 0.1)), interval=int(config.get("floor_scale", 8192)))


def _ministral3_scale(config: Mapping[str, Any]) -> PositionScale | None:
    found = config.get("rope_parameters") or {}
    if not found.get("llama_4_scaling_beta"):
        return None
    factor, interval = float(found["llama_4_scaling_beta"]), int(found["original_max_position_embeddings"])
    return PositionScale(factor=factor, interval=interval, first=0, in_all_layers=True)


def _root_of_hidden_size(config: Mapping[str, Any]) -> float:
    return float(int(config["hidden_size"]) ** 0.5)


def _cap(config: Mapping[str, Any], name: str) -> float | None:
    """Return the soft cap in the config's field `name`; None if the config has none."""
    return None if config.get(name) is None else float(config[name])
