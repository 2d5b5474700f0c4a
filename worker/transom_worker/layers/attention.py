"""An attention layer over the paged cache.

Legend: T tokens, N hidden width, H query heads, KVH KV heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.kv_write import kv_write
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.rotary import rotary_
from transom_worker.layers.forward_batch import LayerCache
from transom_worker.layers.linear import Linear
from transom_worker.layers.rope import RotaryTables


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one rank and what they see."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    num_sink_tokens: int
    chunk: int | None


class Attention:
    """Fused q, k, v projection, rotation, cache write, attention, output projection."""

    def __init__(self, qkv: Linear, output: Linear, shape: AttentionShape) -> None:
        self._qkv, self._output, self._shape = qkv, output, shape
        self._scale = float(shape.head_size**-0.5)
        self.weight_bytes = qkv.weight_bytes + output.weight_bytes

    def add_to(
        self,
        residual_TN: torch.Tensor,
        x_TN: torch.Tensor,
        tables: RotaryTables,
        cache: LayerCache,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """`residual + attention(x)`, [T, N]; writes this step's keys and values."""
        shape = self._shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = self._qkv(x_TN).view(-1, heads + 2 * kv_heads, shape.head_size)
        rotary_(qkv[:, : heads + kv_heads], tables.cos, tables.signed_sin)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        kv_write(k, v, cache.k, cache.v, batch.slots, batch.scratch)
        seen = paged_attention(
            q,
            cache.k,
            cache.v,
            batch,
            scale=self._scale,
            window=shape.window,
            num_sink_tokens=shape.num_sink_tokens,
            chunk=shape.chunk,
        )
        return self._output.add_to(residual_TN, seen.flatten(1))
