"""A checkpoint's tensors as layers, on their device and in their dtype.

Legend: N output rows, K input width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from transom_kernels.gated_mlp import Activation
from transom_worker.layers.linear import Linear, Quantization, make_linear
from transom_worker.layers.mlp import GatedMlp
from transom_worker.layers.norm import RmsNorm
from transom_worker.models.model import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Reads tensors whose names begin with `prefix`."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization
    prefix: str = ""

    def under(self, prefix: str) -> Loader:
        """The same for names that begin with `prefix` too."""
        return replace(self, prefix=self.prefix + prefix)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in `dtype` instead of the model's if given."""
        return self.weights(self.prefix + name).to(device=self.device, dtype=dtype or self.dtype)

    def norm(self, name: str, eps: float, *, plus_one: bool = False) -> RmsNorm:
        """A norm over rows; `plus_one` where the checkpoint holds the weight less one, which is then kept in float32."""
        if plus_one:
            return RmsNorm(self.tensor(f"{name}.weight", torch.float32) + 1.0, eps)
        return RmsNorm(self.tensor(f"{name}.weight"), eps)

    def linear(self, *names: str, bias: bool = False, pairs_of: Sequence[int | None] = ()) -> Linear:
        """Projections of one input, fused. `pairs_of` gives for each the number of heads whose rotary pairs lie side by side."""
        heads = tuple(pairs_of) or (None,) * len(names)
        weight = torch.cat([self._rows(f"{name}.weight", h) for name, h in zip(names, heads, strict=True)])
        biases = [self._rows(f"{name}.bias", h) for name, h in zip(names, heads, strict=True)] if bias else []
        return make_linear(weight, torch.cat(biases) if bias else None, quantization=self.quantization)

    def mlp(self, activation: Activation, *, bias: bool = False, prefix: str = "mlp.") -> GatedMlp:
        """A gated feed-forward layer."""
        names = [f"{prefix}{name}_proj" for name in ("gate", "up", "down")]
        return GatedMlp(
            [self.tensor(f"{name}.weight") for name in names],
            [self.tensor(f"{name}.bias") for name in names] if bias else None,
            quantization=self.quantization,
            activation=activation,
        )

    def _rows(self, name: str, num_heads: int | None) -> torch.Tensor:
        rows = self.tensor(name)
        return rows if num_heads is None else _half_split(rows, num_heads)


def _half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head reordered from pairs (2i, 2i + 1) to pairs (i, i + D/2); scores do not change by it."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
