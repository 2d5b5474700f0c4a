"""Logits to tokens."""

from transom_kernels.sample.op import SampleParams, sample

__all__ = ["SampleParams", "sample"]
