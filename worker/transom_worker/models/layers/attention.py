"""An attention layer over the paged KV cache.

- batch (`PagedBatch`): the block tables and positions of one group of layers in this step.
- tables (`RotaryTables`): cosines and sines of rotary embedding (RoPE) at the step's positions.

Legend: T tokens, N hidden width, H query heads, KVH KV heads, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transom_kernels.kv_write import Preparation, prepare_qkv
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.norm import AllHeadsQkNorm, QkNorm, ShardedAllHeadsQkNorm
from transom_worker.models.layers.policy_rows import MixedBatch, ScoreOptions, attend_mixed
from transom_worker.models.layers.rotary_embedding import RotaryTables


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The heads of one rank, and which keys a query reads.

    A query reads the last `window` tokens, itself included, and the first `num_sink_tokens` tokens. In chunked attention it reads
    only keys of its own chunk of `chunk` tokens. None means that there is no such limit.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    num_sink_tokens: int
    chunk: int | None
    value_size: int | None = None  # None: as wide as a key
    has_cache: bool = True  # False: the projection gives only queries, which read an earlier layer's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What model families add to plain attention; the default adds nothing."""

    scale: float | None = None  # factor of the scores; None: head_size ** -0.5
    soft_cap: float | None = None
    sink_logits: torch.Tensor | None = None  # [H] float32, one learned sink for each of this rank's heads
    norm: QkNorm | AllHeadsQkNorm | ShardedAllHeadsQkNorm | None = None  # of queries and keys, before rotation
    norm_after_rotation: bool = False  # normalise each query and key head after rotation, without a weight
    value_norm: bool = False  # normalise each value head, without a weight
    eps: float = 1e-6  # of the norms of single heads
    value_scale: float = 1.0


PLAIN = AttentionOptions()


class Attention:
    """An attention layer: fused q, k, v projection, rotary embedding, cache write, attention, output projection."""

    def __init__(self, qkv: Linear, output: Linear, shape: AttentionShape, options: AttentionOptions = PLAIN) -> None:
        self._qkv, self._output, self._shape, self._options = qkv, output, shape, options
        self._preparation = _preparation(shape, options)
        self._scale = float(shape.head_size**-0.5 if options.scale is None else options.scale)
        parts, sinks = (qkv, output, options.norm), options.sink_logits
        self.weight_bytes = sum(part.weight_bytes for part in parts if part) + (0 if sinks is None else sinks.nbytes)

    @property
    def adds_in_product(self) -> bool:
        """Return whether `add_to` adds the residual within the layer's last matrix product."""
        return self._output.adds_in_product

    def add_to(
        self,
        residual_TN: torch.Tensor,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `residual + attention(x)`, [T, N], and write this step's keys and values to the cache.

        Without `tables` nothing is rotated. `query_scale` multiplies each token's queries.
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
        """Return `attention(x)`, [T, N]; the arguments are those of `add_to`."""
        return self._output(self._attend(x_TN, tables, cache, batch, query_scale_T11))

    def _attend(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the outputs of all heads, concatenated, [T, H * Dv]."""
        shape, options = self._shape, self._options
        q_THD, sink_q_THD = self._prepare(x_TN, tables, cache, batch, query_scale_T11)
        if isinstance(batch, MixedBatch):
            score_options = ScoreOptions(scale=self._scale, soft_cap=options.soft_cap, sink_logits=options.sink_logits)
            return attend_mixed(q_THD, sink_q_THD, cache, batch, score_options).flatten(1)
        return paged_attention(
            q_THD,
            cache.k,
            cache.v,
            batch,
            scale=self._scale,
            window=shape.window,
            num_sink_tokens=shape.num_sink_tokens,
            chunk=shape.chunk,
            soft_cap=options.soft_cap,
            sink_logits=options.sink_logits,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        ).flatten(1)

    def _prepare(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normalised and rotated queries [T, H, D]; also those that read sink tokens, if these are rotated differently.

        Write keys and values to the cache if the layer has its own. One operator does all this after the projection; only a norm
        over all heads runs by itself before it.
        """
        heads, norm = self._shape.num_heads, self._options.norm
        kv_heads = self._shape.num_kv_heads if self._shape.has_cache else 0
        q, k, v = self._project(x_TN, heads, kv_heads)
        if norm is not None and not isinstance(norm, QkNorm):
            q, k = norm(q, k)
        preparation, cos_sin = self._preparation, None
        if cache.hadamard:
            preparation = replace(preparation, hadamard=True)
        if tables is not None:
            preparation = replace(preparation, interleaved=True) if tables.interleaved else preparation
            cos_sin = (tables.cos, tables.signed_sin)
        scale_T = None if query_scale_T11 is None else query_scale_T11.flatten()
        sink_q = None
        if tables is not None and tables.for_sinks is not None:
            cos_sin_of_sinks = (tables.for_sinks.cos, tables.for_sinks.signed_sin)
            sink_q = prepare_qkv(q, None, None, None, None, batch.slots, cos_sin_of_sinks, preparation, scale_T)
        if v is None:
            return prepare_qkv(q, None, None, None, None, batch.slots, cos_sin, preparation, scale_T), sink_q
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        return prepare_qkv(q, k, v, cache.k, cache.v, batch.slots, cos_sin, preparation, scale_T, **scales), sink_q

    def _project(
        self, x_TN: torch.Tensor, heads: int, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return queries [T, H, D] and keys [T, KVH, D], and values [T, KVH, Dv] if the layer has its own cache."""
        size, value_size = self._shape.head_size, self._shape.value_size
        projected = self._qkv(x_TN)
        if not kv_heads:
            q = projected.view(-1, heads, size)
            return q, q[:, :0], None
        if value_size is None or value_size == size:
            parts = projected.view(-1, heads + 2 * kv_heads, size)
            q, k, v = parts.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
            return q, k, v
        widths = (heads * size, kv_heads * size, kv_heads * value_size)
        q, k, v = projected.split_with_sizes(widths, dim=1)
        return q.view(-1, heads, size), k.view(-1, kv_heads, size), v.view(-1, kv_heads, value_size)


def _preparation(shape: AttentionShape, options: AttentionOptions) -> Preparation:
    """Return the norms of single heads, and the value factor, in the form that `prepare_qkv` takes."""
    norm = options.norm if isinstance(options.norm, QkNorm) else None
    weight_HD = None if norm is None else norm.weight_HD
    return Preparation(
        norm=norm is not None,
        q_weight=None if weight_HD is None else weight_HD[: shape.num_heads],
        k_weight=None if weight_HD is None else weight_HD[shape.num_heads :],
        norm_after_rotation=options.norm_after_rotation,
        value_norm=options.value_norm,
        value_factor=options.value_scale,
        eps=options.eps,
    )
