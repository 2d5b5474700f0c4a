"""Sizes of groups, panels and records, which the packing of weights and the kernels agree on."""

from __future__ import annotations

GROUP = 32  # columns that share a scale
PANEL = 16  # rows of a weight whose levels lie together
QUADS = GROUP // 4
LINE = 64  # bytes
ZERO = {"int8": 128, "int8_min": 0, "int4": 8, "int4_min": 0}  # the level of an element of 0, by format
RECORD = 80  # bytes of a group of a rounded row (`rounded_rows`)
MOST_ROWS = 8  # in a block
SMALLEST = 1e-30  # groups of a row without a larger magnitude are 0


def is_small(format: str) -> bool:
    """Whether levels have 4 bits."""
    return format.startswith("int4")


def has_minimum(format: str) -> bool:
    """Whether groups have a minimum beside their scale."""
    return format.endswith("_min")


def group_bytes(format: str) -> tuple[int, int]:
    """Bytes of a panel's group: of its levels, and of its scales and minima."""
    return QUADS * LINE // (2 if is_small(format) else 1), LINE if has_minimum(format) else LINE // 2
