"""A causal tile: a prompt chunk over its context, by torch's flash attention, without a mask.

The chunk's rows see all of the context and a triangle of their own keys; each part is one call, and the parts are joined by their
log-sum-exp. A mask over both would cost about twice as much.

Legend: C rows, X context keys, KVH heads, H query heads, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.columns import span_ids
from transom_kernels.paged_attention.gather import BlockSet, gather_kv
from transom_kernels.paged_attention.plan import CausalChunk

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True, kw_only=True)
class CausalTile:
    """What a causal tile needs in every layer."""

    rows: slice
    wanted: BlockSet
    context: slice  # of the gathered keys
    chunk: slice


def build_causal(batch: PagedBatch, chunk: CausalChunk, like: torch.Tensor) -> CausalTile:
    """Resolve a planned tile to tensors on the device of `like`."""
    first_block = chunk.first_key // batch.block_size
    end = chunk.start + chunk.count
    blocks = span_ids(batch, chunk.b, first_block, -(-end // batch.block_size))
    base = first_block * batch.block_size
    return CausalTile(
        rows=slice(chunk.row, chunk.row + chunk.count),
        wanted=BlockSet(blocks=torch.tensor([blocks], device=like.device), blank=None),
        context=slice(chunk.first_key - base, chunk.start - base),
        chunk=slice(chunk.start - base, end - base),
    )


def attend_causal(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tile: CausalTile,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the tile's rows, [C, H, Dv]."""
    k, v = gather_kv(k_cache, v_cache, tile.wanted)
    k, v = k[None], v[None]
    rows = q[tile.rows].transpose(0, 1)[None]
    out, lse = flash(rows, k[:, :, tile.chunk], v[:, :, tile.chunk], 0.0, True, scale=scale)
    if tile.context.stop > tile.context.start:
        before, before_lse = flash(rows, k[:, :, tile.context], v[:, :, tile.context], 0.0, False, scale=scale)
        share = torch.sigmoid(lse - before_lse)[..., None]
        out = torch.lerp(before, out, share.to(out.dtype))
        lse = torch.logaddexp(lse, before_lse)
    if sink_logits is not None:
        out = out * torch.sigmoid(lse - sink_logits.float()[:, None])[..., None].to(out.dtype)
    joined: torch.Tensor = out[0].transpose(0, 1)
    return joined
