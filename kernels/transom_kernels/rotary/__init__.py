"""Rotary position embedding (RoPE)."""

from transom_kernels.rotary.op import rotary_

__all__ = ["rotary_"]
