"""Rotary position embedding, half-split."""

from transom_kernels.rotary.op import rotary

__all__ = ["rotary"]
