"""Maps tensor names of DeepSeek V4 checkpoints, so that the names that transformers saves and the published ones both work.

transformers puts most names under `model.` and calls a layer's latent norm `norm`; the other names within layers are equal.
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
    """Return the weights under transformers' names, whichever of the two namings the checkpoint has."""
    saved = any(name.startswith("model.") for name in weights.names)
    return weights if saved else RenamedWeights(weights, published_name)


def published_name(name: str) -> str:
    """Return the published name of a tensor that transformers saves as `name`."""
    for saved, published in _PUBLISHED:
        name = name.replace(saved, published, 1)
    return name
