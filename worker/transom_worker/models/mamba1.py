"""Jamba's Mamba-1 layer: each channel has a step of its own, and what the state takes up and gives is chosen by the token.

    x, gate = projections of the input                       u = silu(convolution of x)
    step, key, query = projections of u, each RMS-normed     out = projection of recurrence(query, key, u, step) * silu(gate)

A projection makes a step of each channel from `step`, which is narrow.

The channels are divided among the ranks; step, key and query, which all channels read, are sums over the ranks.

Source: `transformers/models/jamba/modeling_jamba.py`; "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).

Legend: T tokens, N hidden width, C channels of this rank in H heads of Dv, D numbers of a channel's state, R the step's rank.
"""

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.sharding import head_share
from transom_kernels.linear_recurrence import (
    Convolution,
    RecurrenceInputs,
    causal_convolution,
    gated_rms_norm,
    linear_recurrence,
)
from transom_worker.models.layers.attention import LayerContext, TokenMixer
from transom_worker.models.layers.recurrent_layer import state_batch
from transom_worker.models.loading import Loader


class Mamba1Layer(TokenMixer):
    """Projection, causal convolution, selection, recurrence of this rank's channels, gate, output projection."""

    def __init__(self, architecture: Architecture, index: int, load: Loader) -> None:
        """Load layer `index`; `load` reads names within `mamba`."""
        layer, hidden, eps = architecture.layers[index], architecture.hidden_size, architecture.rms_norm_eps
        assert layer.value_size is not None
        assert layer.recurrent is not None
        share = head_share(architecture, index, load.parallel.rank, load.parallel.size).kv
        own = slice(share.start * layer.value_size, share.stop * layer.value_size)
        channels, state, rank = layer.num_heads * layer.value_size, layer.head_size, layer.step_rank
        super().__init__(load.row_parallel("out_proj", shape=(hidden, channels), columns=own))
        gates = slice(channels + own.start, channels + own.stop)
        self._projection = load.linear("in_proj", "in_proj", shapes=[(2 * channels, hidden)] * 2, rows=[own, gates])
        self._select = load.row_parallel("x_proj", shape=(rank + 2 * state, channels), columns=own)
        self._widths = (rank, state, state)
        names = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self._norms = [load.norm(name, eps, size=size) for name, size in zip(names, self._widths, strict=True)]
        self._steps = load.linear("dt_proj", shapes=[(channels, rank)], rows=[own])
        weight_C1L = load.tensor("conv1d.weight", shape=(channels, 1, layer.recurrent), part=(own,))
        bias = architecture.convolution_bias
        self._weight_LC = weight_C1L[:, 0].T.contiguous()
        self._bias_C = load.tensor("conv1d.bias", shape=(channels,), part=(own,)) if bias else None
        self._step_bias_C, self._skip_C = (
            load.tensor(name, torch.float32, shape=(channels,), part=(own,)) for name in ("dt_proj.bias", "D")
        )
        log_rate_CD = load.tensor("A_log", torch.float32, shape=(channels, state), part=(own,))
        self._rate_HDV = log_rate_CD.exp().view(-1, layer.value_size, state).transpose(1, 2).contiguous()
        tensors = (self._weight_LC, self._bias_C, self._step_bias_C, self._skip_C, self._rate_HDV)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.weight_bytes += sum(norm.weight_bytes for norm in self._norms)
        linears = (self._output, self._projection, self._select, self._steps)
        self.weight_bytes += sum(linear.weight_bytes for linear in linears)

    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the gated results of this rank's channels, [T, C], and write each sequence's state to the cache."""
        mixed_TC, gate_TC = self._projection(x_TN).chunk(2, dim=1)
        states, cache = state_batch(context.batch), context.cache
        convolution = Convolution(weight=self._weight_LC, bias=self._bias_C, rows=cache.v)
        mixed_TC = causal_convolution(mixed_TC, convolution, states)
        parts = self._select(mixed_TC).split_with_sizes(self._widths, dim=1)
        step_TR, key_TD, query_TD = (norm(part) for norm, part in zip(self._norms, parts, strict=True))
        inputs = RecurrenceInputs(
            projected=mixed_TC,
            selection=(query_TD, key_TD),
            step_size=self._steps(step_TR),
            step_bias=self._step_bias_C,
            rate=self._rate_HDV,
            skip=self._skip_C,
            key_heads=1,
            state=cache.k.view(len(cache.k), *self._rate_HDV.shape),
            batch=states,
        )
        return gated_rms_norm(linear_recurrence(inputs), gate_TC, None, 0.0)
