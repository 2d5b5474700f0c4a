"""Conversion of rows to 8-bit numbers with a scale per row, and back."""

from transom_kernels.quantize.op import dequantize, quantize

__all__ = ["dequantize", "quantize"]
