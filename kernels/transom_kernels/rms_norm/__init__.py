"""RMS normalisation (root mean square) of rows, and of attention heads."""

from transom_kernels.rms_norm.op import head_norm_, rms_norm

__all__ = ["head_norm_", "rms_norm"]
