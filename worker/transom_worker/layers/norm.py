"""Normalisation layers.

Legend: T tokens, N hidden width, H heads, D head width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from transom_kernels.rms_norm import head_norm_, rms_norm


class Norm(Protocol):
    """A layer that normalises rows."""

    weight_bytes: int

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        ...


class RmsNorm:
    """Root-mean-square normalisation with a learned weight."""

    def __init__(self, weight_N: torch.Tensor, eps: float) -> None:
        self._weight_N, self._eps = weight_N, eps
        self.weight_bytes = weight_N.nbytes

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return rms_norm(x_TN, self._weight_N, self._eps)[0]


class LayerNorm:
    """Mean and variance taken out, with a learned weight and no bias."""

    def __init__(self, weight_N: torch.Tensor, eps: float) -> None:
        self._weight_N, self._eps = weight_N, eps
        self.weight_bytes = weight_N.nbytes

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return F.layer_norm(x_TN, self._weight_N.shape, self._weight_N, None, self._eps)


class HeadNorm:
    """Root-mean-square normalisation of each head by itself, in place; without a weight every head's length is fixed."""

    def __init__(self, weight_HD: torch.Tensor | None, eps: float) -> None:
        self._weight_HD, self._eps = weight_HD, eps
        self.weight_bytes = 0 if weight_HD is None else weight_HD.nbytes

    def __call__(self, x_THD: torch.Tensor) -> None:
        """Normalises `x` [T, H, D], which may be strided."""
        head_norm_(x_THD, self._weight_HD, self._eps)


class AllHeadsNorm:
    """Root-mean-square normalisation over all query heads at once and over all key heads at once, in place."""

    def __init__(self, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float) -> None:
        self._weights, self._eps = (query_weight, key_weight), eps
        self.weight_bytes = query_weight.nbytes + key_weight.nbytes

    def __call__(self, x_THD: torch.Tensor) -> None:
        """Normalises `x` [T, query heads + key heads, D]."""
        sizes = [weight.numel() // x_THD.shape[-1] for weight in self._weights]
        for part, weight in zip(x_THD.split_with_sizes(sizes, dim=1), self._weights, strict=True):
            part.copy_(rms_norm(part.flatten(1), weight, self._eps)[0].view_as(part))
