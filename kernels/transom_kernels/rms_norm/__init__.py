"""RMS normalisation (root mean square) of rows."""

from transom_kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
