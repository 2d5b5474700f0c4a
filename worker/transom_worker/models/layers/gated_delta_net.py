"""The gated delta net of Qwen3-Next and Qwen3.5, which stands in most layers instead of attention.

    mixed, gate, strength, step = projections of x
    out = output projection of rms_norm(linear_recurrence(mixed, strength, step)) * silu(gate)

Legend: T tokens, N hidden width, H heads and Hk key heads of this rank, D key width, Dv value width, L tokens of the convolution's
kernel, C = 2 Hk D + H Dv channels of the convolution.
"""

from __future__ import annotations

import torch

from transom_core.model_config.layer_attention import LayerAttention
from transom_kernels.linear_recurrence import RecurrenceInputs, StateBatch, gated_rms_norm, linear_recurrence
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.models.layers.attention import TokenMixer
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.rotary_embedding import RotaryTables


class GatedDeltaNet(TokenMixer):
    """A recurrent layer: fused projection, causal convolution, gated delta rule, gated norm, output projection."""

    def __init__(
        self,
        projection: Linear,
        output: Linear,
        layer: LayerAttention,
        *,
        weight_LC: torch.Tensor,
        step_bias_H: torch.Tensor,
        log_rate_H: torch.Tensor,
        norm_weight_D: torch.Tensor,
        eps: float,
    ) -> None:
        """`projection` gives, of this rank's heads: queries, keys, values, the output's gate, strengths and steps; `layer` counts
        these heads."""
        super().__init__(output)
        assert layer.value_size is not None
        self._projection, self._layer, self._eps = projection, layer, eps
        self._weight_LC, self._step_bias_H, self._log_rate_H = weight_LC, step_bias_H, log_rate_H
        self._norm_weight_D, self._value_size = norm_weight_D, layer.value_size
        self._widths = (weight_LC.shape[1], layer.num_heads * layer.value_size, layer.num_heads, layer.num_heads)
        tensors = (weight_LC, step_bias_H, log_rate_H, norm_weight_D)
        self.weight_bytes = projection.weight_bytes + output.weight_bytes + sum(tensor.nbytes for tensor in tensors)

    def _mix(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables | None,
        cache: LayerCache,
        batch: PagedBatch,
        query_scale_T11: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the gated results of all heads, [T, H * Dv], and write each sequence's state to the cache."""
        layer = self._layer
        mixed, gate, strength, step = self._projection(x_TN).split_with_sizes(self._widths, dim=1)
        inputs = RecurrenceInputs(
            projected=mixed,
            weight=self._weight_LC,
            bias=None,
            step_size=step,
            step_bias=self._step_bias_H,
            log_rate=self._log_rate_H,
            strength=strength,
            key_heads=layer.num_kv_heads,
            state=cache.k.view(len(cache.k), layer.num_heads, layer.head_size, self._value_size),
            rows=cache.v,
            batch=StateBatch(
                query_offset=batch.query_offset, read_block=batch.first_block, write_block=batch.block_table[:, 0]
            ),
        )
        out_TN = linear_recurrence(inputs)
        return gated_rms_norm(out_TN, gate, self._norm_weight_D, self._eps, group=self._value_size)
