"""An attention layer over the paged cache.

Legend: T tokens, N hidden width, H query heads, KVH KV heads, D key width, Dv value width.
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
from transom_worker.layers.norm import AllHeadsNorm, HeadNorm, SharedAllHeadsNorm
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
    value_size: int | None = None  # None: as wide as a key
    has_cache: bool = True  # False: the projection gives queries alone, which read an earlier layer's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What families add to plain attention; the default adds nothing."""

    scale: float | None = None  # of the scores; None: head_size ** -0.5
    soft_cap: float | None = None
    sink_logits: torch.Tensor | None = None  # [H] float32, one learned sink for each of this rank's heads
    norm: HeadNorm | AllHeadsNorm | SharedAllHeadsNorm | None = None  # of query and key heads before rotation
    norm_after_rotation: HeadNorm | None = None
    value_norm: HeadNorm | None = None
    value_scale: float = 1.0


PLAIN = AttentionOptions()


class Attention:
    """Fused q, k, v projection, rotation, cache write, attention, output projection."""

    def __init__(self, qkv: Linear, output: Linear, shape: AttentionShape, options: AttentionOptions = PLAIN) -> None:
        self._qkv, self._output, self._shape, self._options = qkv, output, shape, options
        self._scale = float(shape.head_size**-0.5 if options.scale is None else options.scale)
        parts = (qkv, output, options.norm, options.norm_after_rotation, options.value_norm)
        sinks = options.sink_logits
        self.weight_bytes = sum(part.weight_bytes for part in parts if part) + (0 if sinks is None else sinks.nbytes)

    def add_to(
        self,
        residual_TN: torch.Tensor,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual + attention(x)`, [T, N]; writes this step's keys and values.

        Without `tables` nothing is rotated; `query_scale` multiplies each token's queries.
        """
        return self._output.add_to(residual_TN, self._attend(x_TN, tables, cache, batch, query_scale_T11))

    def __call__(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attention(x)`, [T, N]; otherwise as `add_to`."""
        return self._output(self._attend(x_TN, tables, cache, batch, query_scale_T11))

    def _attend(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None,
    ) -> torch.Tensor:
        """Heads' outputs side by side, [T, H * Dv]."""
        shape, options = self._shape, self._options
        heads, kv_heads = shape.num_heads, shape.num_kv_heads if shape.has_cache else 0
        qk, v = self._project(x_TN, heads, kv_heads)
        if options.norm is not None:
            options.norm(qk)
        if tables is not None:
            rotary_(qk, tables.cos, tables.signed_sin, interleaved=tables.interleaved)
        if options.norm_after_rotation is not None:
            options.norm_after_rotation(qk)
        q, k = qk.split_with_sizes((heads, kv_heads), dim=1)
        if query_scale_T11 is not None:
            q = q * query_scale_T11
        if v is not None:
            if options.value_norm is not None:
                options.value_norm(v)
            if options.value_scale != 1.0:
                v.mul_(options.value_scale)
            kv_write(k, v, cache.k, cache.v, batch.slots, batch.scratch)
        return paged_attention(
            q,
            cache.k,
            cache.v,
            batch,
            scale=self._scale,
            window=shape.window,
            num_sink_tokens=shape.num_sink_tokens,
            chunk=shape.chunk,
            soft_cap=options.soft_cap,
            sink_logits=options.sink_logits,
        ).flatten(1)

    def _project(self, x_TN: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries and keys [T, H + KVH, D], and values [T, KVH, Dv] where the layer has a cache of its own."""
        size, value_size = self._shape.head_size, self._shape.value_size
        projected = self._qkv(x_TN)
        if not kv_heads:
            return projected.view(-1, heads, size), None
        if value_size is None or value_size == size:
            qk, v = projected.view(-1, heads + 2 * kv_heads, size).split_with_sizes((heads + kv_heads, kv_heads), dim=1)
            return qk, v
        qk, v = projected.split_with_sizes(((heads + kv_heads) * size, kv_heads * value_size), dim=1)
        return qk.view(-1, heads + kv_heads, size), v.view(-1, kv_heads, value_size)
