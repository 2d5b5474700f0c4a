"""Factors and caps that families put on embeddings, scores and logits, from a `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """None or 1: nothing is done."""

    embedding: float = 1.0
    query: float | None = None  # of attention scores; None: head size ** -0.5
    attention_cap: float | None = None
    logit: float = 1.0
    logit_cap: float | None = None


NO_SCALES = Scales()


def read_scales(config: Mapping[str, Any]) -> Scales:
    """The family's.

    Raises:
        KeyError, TypeError, ValueError: a missing or wrong value.
    """
    match config.get("model_type"):
        case "gemma":
            return Scales(embedding=_root(config))
        case "gemma2" | "gemma3_text":
            return Scales(
                embedding=_root(config),
                query=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
                attention_cap=_cap(config, "attn_logit_softcapping"),
                logit_cap=_cap(config, "final_logit_softcapping"),
            )
        case "gemma4_text":
            return Scales(embedding=_root(config), query=1.0, logit_cap=_cap(config, "final_logit_softcapping"))
        case "cohere2":
            return Scales(logit=float(config.get("logit_scale", 0.0625)))
    return NO_SCALES


def _root(config: Mapping[str, Any]) -> float:
    return float(int(config["hidden_size"]) ** 0.5)


def _cap(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else float(config[name])
