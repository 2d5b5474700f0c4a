"""Sampling: logits to one token id per row."""

from transom_kernels.sample.op import sample
from transom_kernels.sample.params import SampleParams

__all__ = ["SampleParams", "sample"]
