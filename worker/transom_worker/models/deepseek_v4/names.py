"""Tensor names of a V4 checkpoint: as transformers saves them, or as the published files have them.

transformers puts most names under `model.` and calls a layer's latent norm `norm`; all other names of layers are the same.
"""

from __future__ import annotations

import torch

from transom_worker.errors import ModelError
from transom_worker.models.model import Weights

_PUBLISHED = (
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".attn.norm.", ".attn.kv_norm."),
)


def either_name(weights: Weights) -> Weights:
    """The same weights by transformers' names, whichever the checkpoint has."""

    def read(name: str) -> torch.Tensor:
        try:
            return weights(name)
        except ModelError as missing:
            try:
                return weights(published_name(name))
            except ModelError:
                raise missing from None

    return read


def published_name(name: str) -> str:
    """The published name of a tensor that transformers saves as `name`."""
    for saved, published in _PUBLISHED:
        name = name.replace(saved, published, 1)
    return name
