"""Rotary position embedding (RoPE)."""

from transom_kernels.rotary.op import rotary_, rotary_tables

__all__ = ["rotary_", "rotary_tables"]
