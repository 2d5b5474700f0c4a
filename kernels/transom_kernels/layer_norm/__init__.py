"""LayerNorm of rows: normalisation by mean and variance."""

from transom_kernels.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
