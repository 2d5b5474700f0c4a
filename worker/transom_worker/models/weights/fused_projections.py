"""Reads the fused projections of some families' checkpoints (Phi 3, Phi 4) under the names of separate ones.

    qkv_proj [H D + 2 KVH D, N]    rows of q_proj, then of k_proj, then of v_proj
    gate_up_proj [2 I, N]          rows of gate_proj, then of up_proj

Legend: H query heads, KVH KV heads, D head width, I inner width, N hidden width.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.quantised_linear import QuantisedRows
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, WeightsView

FUSED_FAMILIES = ("phi3",)


class FusedProjections(WeightsView):
    """A checkpoint whose fused projections can be read in parts, such as `...q_proj.weight`."""

    def __init__(self, weights: Weights, architecture: Architecture) -> None:
        super().__init__(weights)
        layer, inner = architecture.layers[0], architecture.intermediate_size
        queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        # separate name -> (fused name, first row in it, rows of all)
        self._parts = {
            "q_proj.weight": ("qkv_proj.weight", 0, queries + 2 * keys),
            "k_proj.weight": ("qkv_proj.weight", queries, queries + 2 * keys),
            "v_proj.weight": ("qkv_proj.weight", queries + keys, queries + 2 * keys),
            "gate_proj.weight": ("gate_up_proj.weight", 0, 2 * inner),
            "up_proj.weight": ("gate_up_proj.weight", inner, 2 * inner),
        }

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """See `Weights.__call__`; projections need a `shape`."""
        if shape is None or len(shape) != 2:
            return super().__call__(name, shape=shape, part=part)
        name, fused, rows = self._within(name, (shape[0], shape[1]), part)
        return super().__call__(name, shape=fused, part=rows)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> QuantisedRows | None:
        """See `Weights.groups`."""
        name, fused, rows = self._within(name, shape, part)
        return super().groups(name, shape=fused, part=rows)

    def _within(self, name: str, shape: tuple[int, int], part: Part) -> tuple[str, tuple[int, int], Part]:
        """Return the name and shape of the tensor that holds the rows of `name`, and `part` as a part of it."""
        prefix, _, last = name.rpartition("_proj.weight")[0].rpartition(".")
        found = self._parts.get(f"{last}_proj.weight")
        if found is None:
            return name, shape, part
        fused, first, total = found
        start, stop, _ = (part[0] if part else slice(None)).indices(shape[0])
        return f"{prefix}.{fused}", (total, shape[1]), (slice(first + start, first + stop), *part[1:])
