"""Hyper-connections: the residual is several streams, mixed into each sublayer's input and from its output.

All coefficients come from the streams themselves, in float32; `transom_kernels.hyper_connections` says how.

Legend: T tokens, S streams, N hidden width, M coefficients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre
from transom_worker.model_config.architecture import Architecture
from transom_worker.model_config.deepseek_v4 import DeepseekV4Shape
from transom_worker.models.loading import Loader


class HyperConnection:
    """One sublayer's input out of the streams, and its output back into them."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        """`name` is the beginning of its tensors' names."""
        size = shape.num_residual_streams
        self._projection = _Projection(load, name, architecture, size, (size, size, size * size))
        self._rounds, self._eps = shape.sinkhorn_rounds, shape.hyper_connection_eps
        self.weight_bytes = self._projection.weight_bytes

    def collapse(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sublayer's input [T, N]; how its output goes to each stream [T, S]; how streams mix, [T, S from, S to]."""
        part = self._projection
        return hc_pre(x_TSN, part(x_TSN), part.scale, part.base, rounds=self._rounds, eps=self._eps)

    def expand(
        self, y_TN: torch.Tensor, x_TSN: torch.Tensor, expand_TS: torch.Tensor, mix_TSS: torch.Tensor
    ) -> torch.Tensor:
        """The streams behind the sublayer whose output is `y`, [T, S, N]."""
        return hc_post(y_TN, x_TSN, expand_TS, mix_TSS)


class HyperConnectionHead:
    """The streams become one again, before the last norm."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        self._projection = _Projection(
            load, name, architecture, shape.num_residual_streams, (shape.num_residual_streams,)
        )
        self._eps = shape.hyper_connection_eps
        self.weight_bytes = self._projection.weight_bytes

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        part = self._projection
        return hc_head(x_TSN, part(x_TSN), part.scale, part.base, eps=self._eps)


class _Projection:
    """Normalised streams, projected to so many coefficients of each kind; each kind has a scale of its own."""

    def __init__(
        self, load: Loader, name: str, architecture: Architecture, num_residual_streams: int, sizes: tuple[int, ...]
    ) -> None:
        def tensor(part: str, *shape: int) -> torch.Tensor:
            return load.tensor(f"{name}_{part}", torch.float32, shape=shape)

        self._eps = architecture.rms_norm_eps
        self._weight = tensor("fn", sum(sizes), num_residual_streams * architecture.hidden_size)
        self.base = tensor("base", sum(sizes))
        scales = zip(tensor("scale", len(sizes)), sizes, strict=True)
        self.scale = torch.cat([scale.expand(size) for scale, size in scales])
        self.weight_bytes = self._weight.nbytes + self.base.nbytes + self.scale.nbytes

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """[T, M], before scale and base."""
        return F.linear(hc_norm(x_TSN, self._eps), self._weight)
