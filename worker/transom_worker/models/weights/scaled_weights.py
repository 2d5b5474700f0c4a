"""Reads checkpoints whose projections have constant factors (Falcon-H1), which multiply the weights when these are read.

In bfloat16 a product is rounded once more, as each of transformers' products with a factor rounds a projection's inputs or outputs.
"""

from collections.abc import Sequence

import torch

from transom_kernels.quantised_linear import StoredRows
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, WeightsView


class ScaledWeights(WeightsView):
    """Weights in which projections are multiplied by their factors; of quantised ones, scales and minima are."""

    def __init__(self, weights: Weights, factors: Sequence[tuple[str, float, float]]) -> None:
        """`factors` has the name of a projection in a layer, such as "self_attn.k_proj", and the factors of weight and bias."""
        super().__init__(weights)
        self._factors: dict[str, float] = {}
        for name, weight, bias in factors:
            self._factors |= {f"{name}.weight": weight, f"{name}.bias": bias}

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """See `Weights.__call__`; products are in float32."""
        found, factor = super().__call__(name, shape=shape, part=part), self._factor(name)
        return found if factor is None or factor == 1.0 else found.float() * factor

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """See `Weights.groups`."""
        found, factor = super().groups(name, shape=shape, part=part), self._factor(name)
        # Rows with the factor 1, too: projections that are fused must be alike.
        return found if found is None or factor is None else found.scaled(factor)

    def _factor(self, name: str) -> float | None:
        return self._factors.get(".".join(name.split(".")[-3:]))
