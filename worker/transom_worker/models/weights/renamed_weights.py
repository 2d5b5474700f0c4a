"""Reads a checkpoint in which tensors have other names than the model requests, such as a multimodal model's text decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transom_kernels.quantised_linear import QuantisedRows
from transom_worker.models.weights.checkpoint import WHOLE, Mxfp4Tensors, Part, Weights, WeightsView

# Name prefix in a text-only model -> prefix in a multimodal model's checkpoint, first in the older layout, then in the newer one.
_DECODERS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
# A part of a name in other families -> LFM2's own.
_LFM2 = {
    "model.norm.": "model.embedding_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}


class RenamedWeights(WeightsView):
    """Weights that read tensor `rename(name)` when `name` is requested. `names` and `unread` are the checkpoint's own names."""

    def __init__(self, weights: Weights, rename: Callable[[str], str]) -> None:
        super().__init__(weights)
        self._rename = rename

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor; see `Weights.__call__`."""
        return super().__call__(self._rename(name), shape=shape, part=part)

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """See `Weights.mxfp4`."""
        return super().mxfp4(self._rename(name), shape=shape, part=part)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> QuantisedRows | None:
        """See `Weights.groups`."""
        return super().groups(self._rename(name), shape=shape, part=part)


def text_decoder(weights: Weights) -> Weights:
    """Return a view of the weights in which the text decoder has the names of a text-only model."""
    for prefixes in _DECODERS:
        if any(name.startswith(prefixes["model."]) for name in weights.names):
            return RenamedWeights(weights, partial(_replace_start, prefixes))
    return weights


def lfm2_name(name: str) -> str:
    """Return LFM2's name of a tensor that other families name `name`."""
    return next((name.replace(part, own) for part, own in _LFM2.items() if part in name), name)


def _replace_start(prefixes: dict[str, str], name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)
