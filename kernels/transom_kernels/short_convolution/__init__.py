"""Gated short convolutions (LFM2)."""

from transom_kernels.short_convolution.op import short_convolution
from transom_kernels.short_convolution.reference import ConvolutionInputs

__all__ = ["ConvolutionInputs", "short_convolution"]
