"""Causal tiles of the CPU implementation: a prompt chunk attends to its context and to itself by torch's flash attention, unmasked.

All rows of the chunk see the whole context, and each row sees the chunk's keys up to itself (a triangle). Context and triangle are
one call of flash attention each; their results are merged by their log-sum-exp. One call with a mask would cost about twice as
much.

Legend: C rows, X context keys, KVH KV heads, H query heads, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.block_lookup import physical_blocks
from transom_kernels.paged_attention.gather import BlockSet, TileKv, gather_kv
from transom_kernels.paged_attention.tile_plan import CausalChunk

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@cache
def flash_runs(dtype: torch.dtype) -> bool:
    """Whether torch's flash attention runs with this dtype, tried on a small product.

    It raises an error in bfloat16 where a processor has AMX and ATEN_CPU_CAPABILITY keeps torch from using AVX-512: torch then
    packs 64 and more keys for AMX without the instructions that packing needs.
    """
    rows = torch.zeros(1, 1, 64, 64, dtype=dtype)
    try:
        flash(rows, rows, rows, 0.0, True, scale=1.0)
    except RuntimeError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class CausalTile:
    """A causal tile, resolved to tensors that every layer of the step uses."""

    rows: slice  # rows of the batch
    block_set: BlockSet
    context: slice  # the context's keys among the gathered ones
    chunk: slice  # the chunk's own keys among the gathered ones


def build_causal(batch: PagedBatch, chunk: CausalChunk, like: torch.Tensor) -> CausalTile:
    """Resolve a planned tile to tensors on the device of `like`."""
    first_block = chunk.first_key // batch.block_size
    end = chunk.start + chunk.count
    blocks = physical_blocks(batch, chunk.b, first_block, -(-end // batch.block_size))
    base = first_block * batch.block_size
    return CausalTile(
        rows=slice(chunk.row, chunk.row + chunk.count),
        block_set=BlockSet(blocks=torch.tensor([blocks], device=like.device), zeroed_keys=None),
        context=slice(chunk.first_key - base, chunk.start - base),
        chunk=slice(chunk.start - base, end - base),
    )


def attend_causal(
    q: torch.Tensor,
    kv: TileKv,
    tile: CausalTile,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the tile's rows, [C, H, Dv]."""
    k, v = gather_kv(kv, tile.block_set)
    k, v = k[None], v[None]
    rows = q[tile.rows].transpose(0, 1)[None]
    out, lse = flash(rows, k[:, :, tile.chunk], v[:, :, tile.chunk], 0.0, True, scale=scale)
    if tile.context.stop > tile.context.start:
        context_out, context_lse = flash(rows, k[:, :, tile.context], v[:, :, tile.context], 0.0, False, scale=scale)
        chunk_share = torch.sigmoid(lse - context_lse)[..., None]
        out = torch.lerp(context_out, out, chunk_share.to(out.dtype))
        lse = torch.logaddexp(lse, context_lse)
    if sink_logits is not None:
        out = out * torch.sigmoid(lse - sink_logits.float()[:, None])[..., None].to(out.dtype)
    attended: torch.Tensor = out[0].transpose(0, 1)
    return attended
