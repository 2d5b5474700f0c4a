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

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, *, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """One tensor, in `dtype` instead of the model's if given.

        Raises:
            ModelError: missing, or not of `shape` where one is given; names file and tensor.
        """
        return self.weights(self.prefix + name, shape=shape).to(device=self.device, dtype=dtype or self.dtype)

    def norm(
        self, name: str, eps: float, *, size: int | None = None, plus_one: bool = False, wide: bool = False
    ) -> RmsNorm:
        """A norm over rows; `plus_one` where the checkpoint holds the weight less one, `wide` with its weight in float32."""
        shape = None if size is None else (size,)
        if plus_one:
            return RmsNorm(self.tensor(f"{name}.weight", torch.float32, shape=shape) + 1.0, eps)
        return RmsNorm(self.tensor(f"{name}.weight", torch.float32 if wide else None, shape=shape), eps)

    def linear(
        self,
        *names: str,
        bias: bool = False,
        pairs_of: Sequence[int | None] = (),
        shapes: Sequence[tuple[int, int]] = (),
    ) -> Linear:
        """Projections of one input, fused.

        `pairs_of` gives for each the number of heads whose rotary pairs lie side by side, `shapes` what it must have.
        """
        wanted = tuple(shapes) or (None,) * len(names)
        parts = list(zip(names, tuple(pairs_of) or (None,) * len(names), wanted, strict=True))
        weight = torch.cat([self._rows(f"{name}.weight", heads, shape) for name, heads, shape in parts])
        biases = (
            [self._rows(f"{name}.bias", heads, shape and shape[:1]) for name, heads, shape in parts] if bias else []
        )
        return make_linear(weight, torch.cat(biases) if bias else None, quantization=self.quantization)

    def mlp(
        self, activation: Activation, sizes: tuple[int, int], *, bias: bool = False, prefix: str = "mlp."
    ) -> GatedMlp:
        """A gated feed-forward layer of these hidden and inner sizes."""
        hidden, inner = sizes
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return GatedMlp(
            [self.tensor(f"{prefix}{name}_proj.weight", shape=shape) for name, shape in shapes.items()],
            [self.tensor(f"{prefix}{name}_proj.bias", shape=shape[:1]) for name, shape in shapes.items()]
            if bias
            else None,
            quantization=self.quantization,
            activation=activation,
        )

    def _rows(self, name: str, num_heads: int | None, shape: tuple[int, ...] | None) -> torch.Tensor:
        rows = self.tensor(name, shape=shape)
        return rows if num_heads is None else _half_split(rows, num_heads)


def _half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head reordered from pairs (2i, 2i + 1) to pairs (i, i + D/2); scores do not change by it."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
