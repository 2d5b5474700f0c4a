"""An attention layer over the paged KV cache.

- batch (`PagedBatch`): the block tables and positions of one group of layers in this step.
- tables (`RotaryTables`): cosines and sines of rotary embedding (RoPE) at the step's positions.

Legend: T tokens, N hidden width, H query heads, KVH KV heads, D key width, Dv value width.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch

from transom_core.model_config.layer_attention import LayerAttention
from transom_kernels.kv_write import Preparation, QkvInputs, prepare_qkv
from transom_kernels.linear_recurrence import gated_rms_norm
from transom_kernels.paged_attention import MaskRule, PagedInputs, paged_attention
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.norm import AllHeadsQkNorm, ShardedAllHeadsQkNorm
from transom_worker.models.layers.policy_rows import MixedBatch, attend_mixed
from transom_worker.models.layers.rotary_embedding import RotaryTables


class LayerContext(NamedTuple):
    """What a layer reads in a step besides its tokens. Without `tables` nothing is rotated. `query_scale` multiplies each token's
    queries."""

    tables: RotaryTables | None
    cache: LayerCache
    batch: PagedBatch
    query_scale_T11: torch.Tensor | None


class TokenMixer(ABC):
    """A layer in which tokens read other tokens, and its output projection."""

    weight_bytes: int

    def __init__(self, output: Linear) -> None:
        self._output = output

    @property
    def adds_in_product(self) -> bool:
        """Return whether `add_to` adds the residual within the layer's last matrix product."""
        return self._output.adds_in_product

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return `residual + self(x)`, [T, N], and write this step's keys and values to the cache."""
        return self._output.add_to(residual_TN, self._mix(x_TN, context))

    def __call__(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the layer's output, [T, N], and write as `add_to` does."""
        return self._output(self._mix(x_TN, context))

    @abstractmethod
    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return what the output projection reads: the outputs of all heads, concatenated, [T, H * Dv]."""


class Attention(TokenMixer):
    """An attention layer: fused q, k, v projection, rotary embedding, cache write, attention, output projection."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        layer: LayerAttention,
        preparation: Preparation,
        norm: AllHeadsQkNorm | ShardedAllHeadsQkNorm | None = None,
        *,
        scale: float,
        soft_cap: float | None,
        sink_logits: torch.Tensor | None,
        most_kv_heads: int,
        gates_of_head: int = 0,
    ) -> None:
        """`layer` counts the heads of this rank, and `most_kv_heads` the KV heads of the rank that has most. `norm` runs before
        `preparation`, which has the norms of single heads. `sink_logits` [H] are float32. The last rows of
        `qkv`, `gates_of_head` for each head, give the numbers whose sigmoids multiply the output: one for each number of a head, or
        one for the whole head."""
        super().__init__(output)
        self._qkv, self._layer = qkv, layer
        self._preparation, self._norm = preparation, norm
        self._with_hadamard = replace(preparation, hadamard=True)
        self._scale, self._soft_cap, self._sink_logits = scale, soft_cap, sink_logits
        self._most_kv_heads = most_kv_heads
        self._gate_width = layer.num_heads * gates_of_head
        self._rule = MaskRule(window=layer.window, num_sink_tokens=layer.sinks, chunk=layer.chunk)
        tensors = (sink_logits, preparation.q_weight, preparation.k_weight)
        self.weight_bytes = sum(part.weight_bytes for part in (qkv, output, norm) if part)
        self.weight_bytes += sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the outputs of all heads, concatenated, [T, H * Dv]."""
        projected = gate_TN = self._qkv(x_TN)
        if self._gate_width:
            widths = (projected.shape[1] - self._gate_width, self._gate_width)
            projected, gate_TN = projected.split_with_sizes(widths, dim=1)
        q_THD, sink_q_THD = self._prepare(projected, context)
        cache, batch = context.cache, context.batch
        inputs = PagedInputs(
            q=q_THD,
            k_cache=cache.k,
            v_cache=cache.v,
            batch=batch,
            scale=self._scale,
            soft_cap=self._soft_cap,
            sink_logits=self._sink_logits,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            rule=self._rule,
            most_kv_heads=self._most_kv_heads,
            launches=cache.launches,
        )
        out_THD = attend_mixed(inputs, batch, sink_q_THD) if isinstance(batch, MixedBatch) else paged_attention(inputs)
        out_TN = out_THD.flatten(1)
        if not self._gate_width:
            return out_TN
        return gated_rms_norm(out_TN, gate_TN, None, 0.0, group=out_THD.shape[2], by_sigmoid=True)

    def _prepare(self, projected: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normalised and rotated queries [T, H, D]; also those that read sink tokens, if these are rotated differently.

        Write keys and values to the cache if the layer has its own. One operator does all this after the projection; only a norm
        over all heads runs by itself before it.
        """
        tables, cache, batch, query_scale_T11 = context
        q, k, v = self._split(projected)
        if self._norm is not None:
            q, k = self._norm(q, k)
        preparation, cos_sin = self._with_hadamard if cache.hadamard else self._preparation, None
        if tables is not None:
            cos_sin = (tables.cos, tables.signed_sin)
        scale = None if query_scale_T11 is None else query_scale_T11.flatten()
        sink_q = None
        if tables is not None and tables.for_sinks is not None:
            for_sinks = (tables.for_sinks.cos, tables.for_sinks.signed_sin)
            sink_q = prepare_qkv(
                QkvInputs(q=q, slots=batch.slots, tables=for_sinks, preparation=preparation, query_scale=scale)
            )
        has_own = v is not None  # else the layer reads another layer's cache
        inputs = QkvInputs(
            q=q,
            k=k if has_own else None,
            v=v,
            slots=batch.slots,
            tables=cos_sin,
            preparation=preparation,
            query_scale=scale,
            k_cache=cache.k if has_own else None,
            v_cache=cache.v if has_own else None,
            k_scale=cache.k_scale if has_own else None,
            v_scale=cache.v_scale if has_own else None,
            launches=cache.launches,
        )
        return prepare_qkv(inputs), sink_q

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return queries [T, H, D] and keys [T, KVH, D], and values [T, KVH, Dv] if the layer has its own cache."""
        layer = self._layer
        heads, kv_heads, size, value_size = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.value_size
        if layer.reads_cache_of is not None:
            q = projected.view(-1, heads, size)
            return q, q[:, :0], None
        if value_size is None or value_size == size:
            parts = projected.view(-1, heads + 2 * kv_heads, size)
            q, k, v = parts.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
            return q, k, v
        widths = (heads * size, kv_heads * size, kv_heads * value_size)
        q, k, v = projected.split_with_sizes(widths, dim=1)
        return q.view(-1, heads, size), k.view(-1, kv_heads, size), v.view(-1, kv_heads, value_size)
