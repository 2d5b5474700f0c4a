"""The fast torch path of `paged_attention`: tiles that are planned once a step, then a few calls per tile and layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.causal import CausalTile, attend_causal, build_causal
from transom_kernels.paged_attention.dense import DenseTile, attend_dense, build_dense
from transom_kernels.paged_attention.plan import plan_tiles
from transom_kernels.paged_attention.rule import MaskRule


@dataclass(slots=True, kw_only=True)
class _Tiles:
    dense: list[DenseTile]
    causal: list[CausalTile]
    blind_rows: torch.Tensor | None


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
) -> torch.Tensor:
    """See `op.paged_attention`."""
    allow_causal = soft_cap is None and q.shape[-1] == v_cache.shape[-1] and q.device.type == "cpu"
    tiles = _tiles(batch, rule, allow_causal, q)
    if len(tiles.dense) == 1 and not tiles.causal and tiles.blind_rows is None:
        return attend_dense(q, k_cache, v_cache, tiles.dense[0], scale, soft_cap, sink_logits)
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    for dense in tiles.dense:
        out[dense.rows] = attend_dense(q, k_cache, v_cache, dense, scale, soft_cap, sink_logits)
    for causal in tiles.causal:
        out[causal.rows] = attend_causal(q, k_cache, v_cache, causal, scale, sink_logits)
    if tiles.blind_rows is not None:
        out[tiles.blind_rows] = 0.0
    return out


def _tiles(batch: PagedBatch, rule: MaskRule, allow_causal: bool, like: torch.Tensor) -> _Tiles:
    """The batch's tiles under this rule, built by the first layer that asks."""
    held: dict[tuple[MaskRule, bool], _Tiles] = batch.scratch.setdefault("paged_attention", {})
    key = (rule, allow_causal)
    if key not in held:
        plan = plan_tiles(batch, rule, allow_causal=allow_causal)
        blind = torch.tensor(plan.blind_rows, device=like.device) if plan.blind_rows else None
        held[key] = _Tiles(
            dense=[build_dense(batch, rule, readers, like) for readers in plan.dense],
            causal=[build_causal(batch, chunk, like) for chunk in plan.causal],
            blind_rows=blind,
        )
    return held[key]
