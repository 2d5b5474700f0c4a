"""Linear layers whose rows may each have a LoRA adapter: y = W x + scale * B (A x), with A [r, K], B [N, r] and r small.

- adapter: such matrices A and B for some of the model's projections. Source: Hu et al. 2021 (LoRA).
- slot: a place for one adapter in this rank's memory. A row's slot is -1 if it has no adapter.
- part: one of the projections that are fused into a layer, such as queries, keys and values.

All layers of a model share one `Adapters`:

    layer = adapters.adapt(layer, parts)     while the model is built
    adapters.begin(slots_T, logit_rows)      once per forward pass
    layer(x_MK)                              looks up the slots of its rows

`models.adapter_loading` writes adapters into the slots.

Legend: T tokens, R rows whose logits are requested, M rows of a layer's input: T, or R in the last layer; K input width, N output
width of this rank, S slots, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from transom_core.config import LoraConfig
from transom_kernels.lora import LoraWeights, add_lora_
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.residual import select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPart:
    """What a layer of this rank has of a projection: `rows` and `columns` of its weight, whose whole shape is `shape`.

    `name` is the name by which the model reads the weight, without ".weight". If the rotary pairs of the rows are interleaved,
    `num_heads` is the number of heads in them, and the layer has the two rows of a pair half a head apart.
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    columns: slice
    num_heads: int | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of output columns that the layer has of the projection."""
        return len(range(*self.rows.indices(self.shape[0])))

    @property
    def num_columns(self) -> int:
        """Return the number of the layer's input columns."""
        return len(range(*self.columns.indices(self.shape[1])))


class Adapters:
    """The slots of one rank's model: the layers that adapters may change, and the slots of the rows of the present forward pass."""

    def __init__(self, config: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.layers: list[AdaptedLinear] = []
        self._slots_T: torch.Tensor | None = None
        self._slots_R: torch.Tensor | None = None

    def adapt(self, base: Linear, parts: Sequence[AdaptedPart]) -> Linear:
        """Return the layer `base`, made of these parts in this order, with room for an adapter in each slot, none of which has one
        yet."""
        slots, rank = self.config.max_loras, self.config.max_lora_rank
        starts = (0, *accumulate(part.num_rows for part in parts))
        weights = LoraWeights(
            a=torch.zeros(slots, len(parts) * rank, parts[0].num_columns, dtype=self.dtype, device=self.device),
            b=torch.zeros(slots, rank, starts[-1], dtype=self.dtype, device=self.device),
            scales=torch.zeros(slots, len(parts), device=self.device),
            starts=starts,
        )
        self.layers.append(AdaptedLinear(base, tuple(parts), weights, self))
        return self.layers[-1]

    def begin(self, slots_T: torch.Tensor | None, logit_rows_R: torch.Tensor) -> None:
        """Begin a forward pass over tokens with these slots, int32 [T]; None: no token has an adapter, and no layer launches more
        than without adapters."""
        self._slots_T = slots_T
        self._slots_R = None if slots_T is None else select_rows(slots_T, logit_rows_R)

    def slots_of(self, num_rows: int) -> torch.Tensor | None:
        """Return the slots of a layer's rows, which are all tokens of the pass, or after the last attention the logit rows."""
        slots_T = self._slots_T
        return slots_T if slots_T is None or len(slots_T) == num_rows else self._slots_R


class AdaptedLinear(Linear):
    """A linear layer and the change that the adapter of each row makes to it.

    Of a row-parallel layer this is a rank's product before the all-reduce: a rank has the columns of A for its columns of W, so the
    sum over the ranks of B (A x) is right, as that of W x is.
    """

    def __init__(self, base: Linear, parts: tuple[AdaptedPart, ...], weights: LoraWeights, adapters: Adapters) -> None:
        self._base, self._adapters = base, adapters
        self.parts, self.weights = parts, weights
        self.adds_in_product = base.adds_in_product
        self.weight_bytes = base.weight_bytes + weights.a.nbytes + weights.b.nbytes + weights.scales.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias` and the rows' changes, [M, N]."""
        return self._changed(self._base(x_MK), x_MK)

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [M, N]; `residual` is not changed."""
        return self._changed(self._base.add_to(residual_MN, x_MK), x_MK)

    def _changed(self, y_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        slots_M = self._adapters.slots_of(len(x_MK))
        if slots_M is not None:
            add_lora_(y_MN, x_MK, slots_M, self.weights)
        return y_MN
