"""Normalisation layers.

Legend: T tokens, N hidden width.
"""

from __future__ import annotations

import torch

from transom_kernels.rms_norm import rms_norm


class RmsNorm:
    """Root-mean-square normalisation with a learned weight."""

    def __init__(self, weight_N: torch.Tensor, eps: float) -> None:
        self._weight_N, self._eps = weight_N, eps
        self.weight_bytes = weight_N.nbytes

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return rms_norm(x_TN, self._weight_N, self._eps)[0]
