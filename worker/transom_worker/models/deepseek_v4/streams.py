"""Hyper-connections: the residual is several streams, mixed into each sublayer's input and from its output.

All coefficients come from the streams themselves, in float32.

Legend: T tokens, S streams, N hidden width, M coefficients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_worker.models.architecture import Architecture
from transom_worker.models.deepseek_v4.shape import DeepseekV4Shape
from transom_worker.models.loading import Loader


class StreamMixer:
    """One sublayer's input out of the streams, and its output back into them."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        """`name` is the beginning of its tensors' names."""
        size = shape.num_streams
        self._projection = _Projection(load, name, architecture, size, (size, size, size * size))
        self._streams, self._rounds, self._eps = shape.num_streams, shape.sinkhorn_rounds, shape.stream_eps
        self.weight_bytes = self._projection.weight_bytes

    def collapse(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sublayer's input [T, N]; how its output goes to each stream [T, S]; how streams mix, [T, S from, S to]."""
        collapse_TS, expand_TS, mix_TM = self._projection(x_TSN)
        collapse_TS = collapse_TS.sigmoid() + self._eps
        mix_TSS = self._balance(mix_TM.view(-1, self._streams, self._streams).softmax(dim=2) + self._eps)
        return _collapse(x_TSN, collapse_TS), 2 * expand_TS.sigmoid(), mix_TSS

    def expand(
        self, y_TN: torch.Tensor, x_TSN: torch.Tensor, expand_TS: torch.Tensor, mix_TSS: torch.Tensor
    ) -> torch.Tensor:
        """The streams behind the sublayer whose output is `y`, [T, S, N]."""
        mixed_TSN = torch.bmm(mix_TSS.to(x_TSN.dtype).transpose(1, 2), x_TSN)
        return mixed_TSN.addcmul_(expand_TS.to(x_TSN.dtype)[:, :, None], y_TN[:, None])

    def _balance(self, mix_TSS: torch.Tensor) -> torch.Tensor:
        """Sinkhorn's rounds: columns and rows add up to 1, so that mixing neither grows nor shrinks the streams."""
        # on CPUs adding a number would make a tensor of it each time; elsewhere making a tensor would wait for the device
        eps = mix_TSS.new_tensor(self._eps) if mix_TSS.device.type == "cpu" else self._eps
        for turn in range(2 * self._rounds - 1):
            mix_TSS.div_(mix_TSS.sum(dim=2 if turn % 2 else 1, keepdim=True).add_(eps))
        return mix_TSS


class StreamHead:
    """The streams become one again, before the last norm."""

    def __init__(self, load: Loader, name: str, architecture: Architecture, shape: DeepseekV4Shape) -> None:
        self._projection = _Projection(load, name, architecture, shape.num_streams, (shape.num_streams,))
        self._eps = shape.stream_eps
        self.weight_bytes = self._projection.weight_bytes

    def __call__(self, x_TSN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        (logits_TS,) = self._projection(x_TSN)
        return _collapse(x_TSN, logits_TS.sigmoid() + self._eps)


class _Projection:
    """Normalised streams, projected to so many coefficients of each kind; each kind has a scale of its own."""

    def __init__(
        self, load: Loader, name: str, architecture: Architecture, num_streams: int, sizes: tuple[int, ...]
    ) -> None:
        def tensor(part: str, *shape: int) -> torch.Tensor:
            return load.tensor(f"{name}_{part}", torch.float32, shape=shape)

        self._sizes, self._eps = sizes, architecture.rms_norm_eps
        self._weight = tensor("fn", sum(sizes), num_streams * architecture.hidden_size)
        self._base = tensor("base", sum(sizes))
        scales = zip(tensor("scale", len(sizes)), sizes, strict=True)
        self._scale = torch.cat([scale.expand(size) for scale, size in scales])
        self.weight_bytes = self._weight.nbytes + self._base.nbytes + self._scale.nbytes

    def __call__(self, x_TSN: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = x_TSN.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + self._eps)
        return (F.linear(flat, self._weight) * self._scale + self._base).split_with_sizes(self._sizes, dim=1)


def _collapse(x_TSN: torch.Tensor, weight_TS: torch.Tensor) -> torch.Tensor:
    return (weight_TS[:, :, None] * x_TSN).sum(dim=1).to(x_TSN.dtype)
