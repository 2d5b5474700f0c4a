"""The torch implementation of `paged_attention` for CPUs: tiles are planned once a step, then each layer makes a few calls per
tile.

`tile_plan.py` defines dense tiles, causal tiles and keyless rows; `dense.py` and `causal.py` compute them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.causal import CausalTile, attend_causal, build_causal, flash_runs
from transom_kernels.paged_attention.dense import DenseTile, attend_dense, build_dense
from transom_kernels.paged_attention.gather import TileKv
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tile_plan import plan_tiles
from transom_kernels.quantised_kv import head_width


@dataclass(slots=True, kw_only=True)
class _Tiles:
    """A batch's tiles, resolved to tensors."""

    dense: list[DenseTile]
    causal: list[CausalTile]
    keyless_rows: torch.Tensor | None


def paged_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    rule: MaskRule,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.paged_attention`, with the mask's options in `rule`."""
    allow_causal = soft_cap is None and q.shape[-1] == head_width(v_cache) and q.device.type == "cpu"
    allow_causal = allow_causal and flash_runs(q.dtype)
    kv = TileKv(k_cache, v_cache, kv_scales, q.dtype)
    tiles = _tiles_of(batch, rule, allow_causal, q)
    if len(tiles.dense) == 1 and not tiles.causal and tiles.keyless_rows is None:
        return attend_dense(q, kv, tiles.dense[0], scale, soft_cap, sink_logits)
    out = q.new_empty(q.shape[0], q.shape[1], head_width(v_cache))
    for dense in tiles.dense:
        out[dense.rows] = attend_dense(q, kv, dense, scale, soft_cap, sink_logits)
    for causal in tiles.causal:
        out[causal.rows] = attend_causal(q, kv, causal, scale, sink_logits)
    if tiles.keyless_rows is not None:
        out[tiles.keyless_rows] = 0.0
    return out


def _tiles_of(batch: PagedBatch, rule: MaskRule, allow_causal: bool, like: torch.Tensor) -> _Tiles:
    """The batch's tiles under this mask rule. The first layer with the rule plans them; the batch keeps them for the others."""
    planned: dict[tuple[MaskRule, bool], _Tiles] = batch.scratch.setdefault("paged_attention", {})
    key = (rule, allow_causal)
    if key not in planned:
        plan = plan_tiles(batch, rule, allow_causal=allow_causal)
        keyless_rows = torch.tensor(plan.keyless_rows, device=like.device) if plan.keyless_rows else None
        planned[key] = _Tiles(
            dense=[build_dense(batch, rule, sequences, like) for sequences in plan.dense],
            causal=[build_causal(batch, chunk, like) for chunk in plan.causal],
            keyless_rows=keyless_rows,
        )
    return planned[key]
