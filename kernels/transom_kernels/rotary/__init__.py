"""Rotary position embedding (RoPE)."""

from transom_kernels.rotary.op import rotary_
from transom_kernels.rotary.tables import rotary_tables

__all__ = ["rotary_", "rotary_tables"]
