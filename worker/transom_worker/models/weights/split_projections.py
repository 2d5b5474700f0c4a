"""Reads projections that hold several things (Qwen3-Next, Qwen3.5, Granite 4, Phi 3, GLM-4) under the names of separate ones.

    q_proj [2 H D, N]              of each query head: rows of q_proj, then of q_gate
    in_proj_qkvz, in_proj_ba       of each key head: rows of in_proj_q, _k, _v and _z, or of in_proj_b and _a (Qwen3-Next)
    in_proj_qkv                    rows of in_proj_q, then of in_proj_k, then of in_proj_v (Qwen3.5)
    in_proj                        rows of in_proj_z, in_proj_v, in_proj_k, in_proj_q and in_proj_a (Mamba-2: z, x, B, C and dt)
    qkv_proj, gate_up_proj         rows of q_proj, k_proj and v_proj; of gate_proj and up_proj (Phi 3 and 4; GLM-4 has the latter)
    input_linear, output_linear    rows of gate_proj, then of up_proj; rows of down_proj (Granite 4)

Legend: H query heads, D head width, N hidden width.
"""

from typing import NamedTuple

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.mixture import GRANITE_MIXTURES
from transom_kernels.quantised_linear import StoredRows
from transom_worker.models.weights.checkpoint import WHOLE, Part, Weights, WeightsView

FUSED_MLPS = ("phi3", "glm", "glm4")


class _Split(NamedTuple):
    """Where a projection's rows are: in each unit of `unit` rows of the tensor `fused`, the `width` rows from `first` on."""

    fused: str
    unit: int
    first: int
    width: int


class SplitProjections(WeightsView):
    """A checkpoint whose projections of several things by head can be read in parts, such as `...q_gate.weight`."""

    def __init__(self, weights: Weights, architecture: Architecture) -> None:
        super().__init__(weights)
        self._parts: dict[str, _Split] = {}
        for layer in architecture.layers:
            size, values = layer.head_size, layer.num_heads // layer.num_kv_heads * (layer.value_size or 0)
            if architecture.family in FUSED_MLPS:
                keys, inner = layer.num_kv_heads * size, architecture.intermediate_size
                widths = {"q_proj": layer.num_heads * size, "k_proj": keys, "v_proj": keys}
                if architecture.family == "phi3":
                    self._add("self_attn.", "qkv_proj", widths)
                self._add("mlp.", "gate_up_proj", {"gate_proj": inner, "up_proj": inner})
            elif architecture.mamba is not None:
                self._add_mamba(architecture, layer)
            elif architecture.family in GRANITE_MIXTURES:
                self._add_granite(architecture)
            elif layer.recurrent is None:
                self._add("self_attn.", "q_proj", {"q_proj": size, "q_gate": size})
            elif architecture.family == "qwen3_next":
                widths = {"in_proj_q": size, "in_proj_k": size, "in_proj_v": values, "in_proj_z": values}
                self._add("linear_attn.", "in_proj_qkvz", widths)
                per_key = layer.num_heads // layer.num_kv_heads
                self._add("linear_attn.", "in_proj_ba", {"in_proj_b": per_key, "in_proj_a": per_key})
            else:
                keys = layer.num_kv_heads * size
                widths = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": layer.num_kv_heads * values}
                self._add("linear_attn.", "in_proj_qkv", widths)

    def _add_mamba(self, architecture: Architecture, layer: LayerAttention) -> None:
        if layer.recurrent is not None:
            keys, values = layer.num_kv_heads * layer.head_size, layer.num_heads * (layer.value_size or 0)
            widths = {"in_proj_z": values, "in_proj_v": values, "in_proj_k": keys, "in_proj_q": keys}
            self._add("mamba.", "in_proj", widths | {"in_proj_a": layer.num_heads})
        if architecture.family == "granitemoehybrid":
            self._add_granite(architecture)

    def _add_granite(self, architecture: Architecture) -> None:
        """Add the projections of a dense MLP or of the shared expert."""
        mixture = architecture.mixture
        inner = architecture.intermediate_size if mixture is None else mixture.shared_size
        for prefix in ("mlp.", "shared_experts."):
            self._add(prefix, "input_linear", {"gate_proj": inner, "up_proj": inner})
            self._add(prefix, "output_linear", {"down_proj": architecture.hidden_size})

    def _add(self, prefix: str, fused: str, widths: dict[str, int]) -> None:
        first = 0
        for name, width in widths.items():
            self._parts[prefix + name] = _Split(fused, sum(widths.values()), first, width)
            first += width

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """See `Weights.__call__`; projections need a `shape`."""
        module, _, kind = name.rpartition(".")
        split = self._parts.get(".".join(module.split(".")[-2:]))
        if split is None or shape is None:
            return super().__call__(name, shape=shape, part=part)
        fused, rows, units = _rows_of(split, shape, part)
        found = super().__call__(f"{module.rpartition('.')[0]}.{split.fused}.{kind}", shape=fused, part=rows)
        return _within_units(found, split, units)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """See `Weights.groups`."""
        module, _, kind = name.rpartition(".")
        split = self._parts.get(".".join(module.split(".")[-2:]))
        if split is None:
            return super().groups(name, shape=shape, part=part)
        fused, rows, units = _rows_of(split, shape, part)
        found = super().groups(
            f"{module.rpartition('.')[0]}.{split.fused}.{kind}", shape=(fused[0], fused[1]), part=rows
        )
        if found is None:
            return None
        return found.map_rows(lambda tensor: _within_units(tensor, split, units))


def _rows_of(split: _Split, shape: tuple[int, ...], part: Part) -> tuple[tuple[int, ...], Part, int]:
    """Return the shape of the fused tensor, the part of it that has the wanted rows, and its number of units; 0 units: all rows of
    that part are wanted."""
    units = shape[0] // split.width
    start, stop, _ = (part[0] if part else slice(None)).indices(shape[0])
    fused = (units * split.unit, *shape[1:])
    if units == 1:
        return fused, (slice(split.first + start, split.first + stop), *part[1:]), 0
    own = slice(start // split.width * split.unit, stop // split.width * split.unit)
    return fused, (own, *part[1:]), (stop - start) // split.width


def _within_units(rows: torch.Tensor, split: _Split, units: int) -> torch.Tensor:
    if not units:
        return rows
    of_units = rows.view(units, split.unit, *rows.shape[1:])[:, split.first : split.first + split.width]
    return of_units.reshape(units * split.width, *rows.shape[1:])
