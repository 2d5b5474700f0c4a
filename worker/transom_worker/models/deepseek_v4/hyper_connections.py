"""Hyper-connections, which replace the residual by several streams: coefficients say how a sublayer reads and writes each stream.

The coefficients are projected from the streams themselves, in float32. `transom_kernels.hyper_connections.op` has the formulas.

Legend: T tokens, S residual streams, N hidden width, M coefficients.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_kernels.hyper_connections import hc_head, hc_post, hc_pre, hc_project
from transom_worker.models.loading import Loader


class _Coefficients:
    """Projects normalised streams to coefficients of `sizes`; each kind of coefficient has its own scale."""

    def __init__(
        self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape, sizes: tuple[int, ...]
    ) -> None:
        """`name` is the prefix of the tensors' names."""

        def tensor(part: str, *shape: int) -> torch.Tensor:
            return load.tensor(f"{name}_{part}", torch.float32, shape=shape)

        self._eps, self._norm_eps = shape.hyper_connection_eps, architecture.rms_norm_eps
        self._weight = tensor("fn", sum(sizes), shape.num_residual_streams * architecture.hidden_size)
        self._base = tensor("base", sum(sizes))
        scales = zip(tensor("scale", len(sizes)), sizes, strict=True)
        self._scale = torch.cat([scale.expand(size) for scale, size in scales])
        self.weight_bytes = self._weight.nbytes + self._base.nbytes + self._scale.nbytes

    def _project(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """Return the projected coefficients [T, M], before scale and base."""
        return hc_project(x_TSN, self._weight, self._norm_eps)


class HyperConnection(_Coefficients):
    """The hyper-connection of one sublayer: makes its input from the streams, and puts its output back into them."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        size = shape.num_residual_streams
        # Weights to read each stream, weights to write each stream, and the matrix that mixes the streams.
        super().__init__(load, name, architecture, shape, (size, size, size * size))
        # Normalisations of the matrix by columns and rows (Sinkhorn's iteration), after which both sum to nearly 1.
        self._rounds = shape.sinkhorn_rounds

    def before_sublayer(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sublayer's input [T, N], the output's weights `post` [T, S] and the streams' mixing matrix [T, S from, S to]
        (`hc_pre`).
        """
        return hc_pre(x_TSN, self._project(x_TSN), self._scale, self._base, rounds=self._rounds, eps=self._eps)

    def after_sublayer(
        self, y_TN: torch.Tensor, x_TSN: torch.Tensor, post_TS: torch.Tensor, mix_TSS: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual streams [T, S, N] after the sublayer with output `y` [T, N] (`hc_post`)."""
        return hc_post(y_TN, x_TSN, post_TS, mix_TSS)


class HyperConnectionHead(_Coefficients):
    """Sums the residual streams into one, before the final norm (`hc_head`)."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        super().__init__(load, name, architecture, shape, (shape.num_residual_streams,))

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, N] of the streams [T, S, N]."""
        return hc_head(x_TSN, self._project(x_TSN), self._scale, self._base, eps=self._eps)
