"""Tensor names of DeepSeek V4 checkpoints: accepts the names that transformers saves and those of the published files.

transformers puts most names under `model.` and calls a layer's latent norm `norm`; all other names of layers are equal.
"""

from __future__ import annotations

from transom_worker.models.weights import RenamedWeights, Weights

_PUBLISHED = (
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".attn.norm.", ".attn.kv_norm."),
)


def either_name(weights: Weights) -> Weights:
    """The weights under transformers' names, whichever names the checkpoint has."""
    saved = any(name.startswith("model.") for name in weights.names)
    return weights if saved else RenamedWeights(weights, published_name)


def published_name(name: str) -> str:
    """The published name of a tensor that transformers saves as `name`."""
    for saved, published in _PUBLISHED:
        name = name.replace(saved, published, 1)
    return name
