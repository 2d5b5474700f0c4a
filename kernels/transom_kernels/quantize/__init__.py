"""8-bit numbers with scales."""

from transom_kernels.quantize.op import dequantize, quantize

__all__ = ["dequantize", "quantize"]
