"""LFM2's gated short convolution, which stands in some layers instead of attention: y = C * conv(B * x), of three projections.

Legend: T tokens, N hidden width, C channels of this rank, L tokens of the convolution's kernel.
"""

import torch

from transom_kernels.short_convolution import ConvolutionInputs, short_convolution
from transom_worker.models.layers.attention import LayerContext, TokenMixer
from transom_worker.models.layers.linear import Linear


class ShortConvolution(TokenMixer):
    """A convolution layer: fused projection, gated causal convolution over cached rows, output projection."""

    def __init__(
        self, projection: Linear, output: Linear, weight_LC: torch.Tensor, bias_C: torch.Tensor | None
    ) -> None:
        """`projection` gives the input's gate, the output's gate and x of this rank's channels."""
        super().__init__(output)
        self._projection, self._weight_LC, self._bias_C = projection, weight_LC, bias_C
        tensors = (weight_LC, bias_C)
        self.weight_bytes = projection.weight_bytes + output.weight_bytes
        self.weight_bytes += sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the gated convolution [T, C], and write this step's rows to the cache. Positions do not rotate anything here."""
        inputs = ConvolutionInputs(
            projected=self._projection(x_TN),
            weight=self._weight_LC,
            bias=self._bias_C,
            cache=context.cache.k,
            batch=context.batch,
        )
        return short_convolution(inputs)
