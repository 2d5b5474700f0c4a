"""RMS normalisation (root mean square) of rows, and of attention heads."""

from transom_kernels.rms_norm.heads import head_norm_
from transom_kernels.rms_norm.op import rms_norm

__all__ = ["head_norm_", "rms_norm"]
