"""Hyper-connections: the residual is several streams, mixed into each sublayer's input and from its output.

All coefficients come from the streams themselves, in float32.

Legend: T tokens, S streams, N hidden width, M coefficients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_worker.models.deepseek_v4.shape import DeepseekV4Shape
from transom_worker.models.loading import Loader


class StreamMixer:
    """One sublayer's input out of the streams, and its output back into them."""

    def __init__(self, load: Loader, name: str, shape: DeepseekV4Shape, eps: float) -> None:
        """`name` is the beginning of its tensors' names."""
        self._projection = _Projection(load, name, eps)
        self._streams, self._rounds, self._eps = shape.num_streams, shape.sinkhorn_rounds, shape.stream_eps
        self.weight_bytes = self._projection.weight_bytes

    def collapse(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sublayer's input [T, N]; how its output goes to each stream [T, S]; how streams mix, [T, S from, S to]."""
        size = self._streams
        logits_TM = self._projection(x_TSN, [size, size, size * size])
        collapse_TS, expand_TS, mix_TM = logits_TM.split_with_sizes((size, size, size * size), dim=1)
        collapse_TS = collapse_TS.sigmoid() + self._eps
        mix_TSS = self._balance(mix_TM.view(-1, size, size).softmax(dim=2) + self._eps)
        return _collapse(x_TSN, collapse_TS), 2 * expand_TS.sigmoid(), mix_TSS

    def expand(
        self, y_TN: torch.Tensor, x_TSN: torch.Tensor, expand_TS: torch.Tensor, mix_TSS: torch.Tensor
    ) -> torch.Tensor:
        """The streams behind the sublayer whose output is `y`, [T, S, N]."""
        mixed_TSN = torch.bmm(mix_TSS.to(x_TSN.dtype).transpose(1, 2), x_TSN)
        return mixed_TSN.addcmul_(expand_TS.to(x_TSN.dtype)[:, :, None], y_TN[:, None])

    def _balance(self, mix_TSS: torch.Tensor) -> torch.Tensor:
        """Sinkhorn's rounds: columns and rows add up to 1, so that mixing neither grows nor shrinks the streams."""
        eps = mix_TSS.new_tensor(self._eps)  # adding a number would make a tensor of it each time
        for turn in range(2 * self._rounds - 1):
            mix_TSS.div_(mix_TSS.sum(dim=2 if turn % 2 else 1, keepdim=True).add_(eps))
        return mix_TSS


class StreamHead:
    """The streams become one again, before the last norm."""

    def __init__(self, load: Loader, name: str, shape: DeepseekV4Shape, eps: float) -> None:
        self._projection = _Projection(load, name, eps)
        self._streams, self._eps = shape.num_streams, shape.stream_eps
        self.weight_bytes = self._projection.weight_bytes

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return _collapse(x_TSN, self._projection(x_TSN, [self._streams]).sigmoid() + self._eps)


class _Projection:
    """Normalised streams, projected; each kind of coefficient has a scale of its own."""

    def __init__(self, load: Loader, name: str, eps: float) -> None:
        self._weight, self._base, self._scale = (
            load.tensor(f"{name}_{part}", torch.float32) for part in ("fn", "base", "scale")
        )
        self._eps = eps
        self.weight_bytes = self._weight.nbytes + self._base.nbytes + self._scale.nbytes

    def __call__(self, x_TSN: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        flat = x_TSN.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + self._eps)
        scale = torch.cat([scale.expand(size) for scale, size in zip(self._scale, sizes, strict=True)])
        return F.linear(flat, self._weight) * scale + self._base


def _collapse(x_TSN: torch.Tensor, weight_TS: torch.Tensor) -> torch.Tensor:
    return (weight_TS[:, :, None] * x_TSN).sum(dim=1).to(x_TSN.dtype)
