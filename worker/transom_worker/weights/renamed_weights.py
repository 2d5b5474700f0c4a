"""A checkpoint whose tensors go by other names than the model asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transom_worker.weights.checkpoint import WHOLE, Mxfp4Tensors, Part, Weights, read_mxfp4

# What a model asks for begins -> what it begins with in checkpoints of models that also see or hear, old ones and new ones.
_DECODERS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)


class RenamedWeights:
    """Asks `weights` for `rename(name)`; `names` are the checkpoint's own."""

    def __init__(self, weights: Weights, rename: Callable[[str], str]) -> None:
        self._weights, self._rename = weights, rename

    @property
    def names(self) -> tuple[str, ...]:
        """See `Weights`."""
        return self._weights.names

    @property
    def unread(self) -> tuple[str, ...]:
        """See `Weights`."""
        return self._weights.unread

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor; see `Weights`."""
        return self._weights(self._rename(name), shape=shape, part=part)

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """See `read_mxfp4`."""
        return read_mxfp4(self._weights, self._rename(name), shape=shape, part=part)

    def close(self) -> None:
        """Close the files."""
        self._weights.close()


def text_decoder(weights: Weights) -> Weights:
    """The weights of a model's text decoder by the names that they have in a model of text alone."""
    for prefixes in _DECODERS:
        if any(name.startswith(prefixes["model."]) for name in weights.names):
            return RenamedWeights(weights, partial(_replace_start, prefixes))
    return weights


def _replace_start(prefixes: dict[str, str], name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)
