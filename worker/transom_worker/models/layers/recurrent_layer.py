"""A layer with a recurrent state, which stands in most layers of hybrids instead of attention.

Gated delta nets (Qwen3-Next, Qwen3.5, Olmo Hybrid), whose norm is over each head:

    mixed, gate, strength, step = projections of x
    out = output projection of rms_norm(linear_recurrence(mixed, strength, step)) * silu(gate)

In Kimi Linear's and Ling's, the gate is a sigmoid, and each row of a state has a step; in Kimi Linear's, two projections give each.

Mamba-2 (Granite 4, Nemotron-H), whose norm is over the heads that a key head serves; Falcon-H1 has none, or gates after it:

    mixed, gate, step = projections of x
    out = output projection of rms_norm(linear_recurrence(mixed, step) * silu(gate))

Legend: T tokens, N hidden width, H heads and Hk key heads of this rank, D key width, Dv value width, L tokens of the convolution's
kernel, C = 2 Hk D + H Dv channels of the convolution.
"""

from dataclasses import dataclass

import torch

from transom_core.model_config.layer_attention import LayerAttention
from transom_kernels.linear_recurrence import (
    Convolution,
    RecurrenceInputs,
    StateBatch,
    gated_rms_norm,
    linear_recurrence,
)
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.models.layers.attention import LayerContext, TokenMixer
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.norm import SharedGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentWeights:
    """What a recurrent layer has besides its projections, of this rank's heads."""

    convolution_LC: torch.Tensor
    bias_C: torch.Tensor | None  # of the convolution
    step_bias_H: torch.Tensor  # Kimi Linear's and Ling's: [H * D]
    rate_H: torch.Tensor  # exp(A_log)
    skip_H: torch.Tensor | None  # Mamba-2's; None: a gated delta net
    norm: torch.Tensor | None  # [Dv] for all heads, or Mamba-2's [H * Dv]; None: gates alone
    gates_first: bool  # gates multiply what the norm reads
    eps: float
    most_strength: float  # of a delta rule
    most_decay: float  # the bound of -log of decays; 0: there is none
    by_sigmoid: bool  # the gate is a sigmoid, not silu
    twice: tuple[Linear, Linear] | None  # Kimi Linear's second projections of gates and steps
    shared: SharedGroups | None  # of the norm, if there are more ranks than groups of heads that it norms

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors."""
        tensors = (self.convolution_LC, self.bias_C, self.step_bias_H, self.rate_H, self.skip_H, self.norm)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def state_batch(batch: PagedBatch) -> StateBatch:
    """Return which blocks hold the sequences' states; a group of states has these instead of block tables."""
    return StateBatch(
        query_offset=batch.query_offset, read_block=batch.first_block, write_block=batch.block_table[:, 0]
    )


class RecurrentLayer(TokenMixer):
    """Fused projection, causal convolution, gated delta rule or Mamba-2's recurrence, gated norm, output projection."""

    def __init__(self, projection: Linear, output: Linear, layer: LayerAttention, weights: RecurrentWeights) -> None:
        """`projection` gives, of this rank's heads: queries, keys, values, the output's gate, strengths of a delta rule, and steps;
        `layer` counts these heads."""
        super().__init__(output)
        assert layer.value_size is not None
        self._projection, self._layer, self._weights = projection, layer, weights
        self._value_size, self._is_mamba = layer.value_size, weights.skip_H is not None
        by_head = () if self._is_mamba else (layer.num_heads,)
        channels, values = weights.convolution_LC.shape[1], layer.num_heads * layer.value_size
        self._widths = (channels, values, *by_head, len(weights.step_bias_H))
        if weights.twice is not None:
            self._widths = (self._widths[0], layer.value_size, layer.num_heads, layer.value_size)
        heads_of_norm = layer.num_heads // layer.num_kv_heads if self._is_mamba else 1
        self._norm_width = heads_of_norm * layer.value_size
        linears = (projection, output, *(weights.twice or ()))
        self.weight_bytes = sum(linear.weight_bytes for linear in linears) + weights.num_bytes

    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the gated results of all heads, [T, H * Dv], and write each sequence's state to the cache."""
        layer, weights, cache = self._layer, self._weights, context.cache
        mixed, gate, *strength, step = self._projection(x_TN).split_with_sizes(self._widths, dim=1)
        if weights.twice is not None:
            gate, step = weights.twice[0](gate), weights.twice[1](step)
        inputs = RecurrenceInputs(
            projected=mixed,
            convolution=Convolution(weight=weights.convolution_LC, bias=weights.bias_C, rows=cache.v),
            step_size=step,
            step_bias=weights.step_bias_H,
            rate=weights.rate_H,
            strength=strength[0] if strength else None,
            most_strength=weights.most_strength,
            most_decay=weights.most_decay,
            skip=weights.skip_H,
            key_heads=layer.num_kv_heads,
            state=cache.k.view(len(cache.k), layer.num_heads, layer.head_size, self._value_size),
            batch=state_batch(context.batch),
        )
        out_TN, width = linear_recurrence(inputs), self._norm_width
        if weights.shared is not None and weights.norm is not None:
            return self._norm_with_others(out_TN, gate, weights.norm, weights.shared)
        how = {"gates_first": weights.gates_first, "by_sigmoid": weights.by_sigmoid}
        return gated_rms_norm(out_TN, gate, weights.norm, weights.eps, group=width, **how)

    def _norm_with_others(
        self, out_TN: torch.Tensor, gate_TN: torch.Tensor, norm_N: torch.Tensor, shared: SharedGroups
    ) -> torch.Tensor:
        """Return what `gated_rms_norm` does, of groups that other ranks have parts of, too."""
        out, gate = out_TN.float(), torch.nn.functional.silu(gate_TN.float())
        if self._weights.gates_first:
            out = out * gate
        normed = out * shared.scales(out, self._weights.eps) * norm_N
        return (normed if self._weights.gates_first else normed * gate).to(out_TN.dtype)
