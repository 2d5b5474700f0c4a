"""Sizes of groups, panels and records, which the packing of weights and the kernels agree on."""

from __future__ import annotations

GROUP = 32  # columns that share a scale
PANEL = 16  # rows (outputs) of a weight that are stored together
QUADS = GROUP // 4  # quads (four columns of one row) of a group
LINE = 64  # bytes of a line: one quad of levels of each of a panel's rows
ZERO = {
    "int8": 128,
    "int8_min": 0,
    "int4": 8,
    "int4_min": 0,
}  # format -> the level that stands for 0 (before a minimum is added)
RECORD = 80  # bytes of a group of a rounded row (`rounded_rows`)
MOST_ROWS = 8  # most rows of a block
# a group of x whose largest magnitude is below this becomes zeros: the inverse of tiny magnitudes overflows
SMALLEST = 1e-30


def is_small(format: str) -> bool:
    """Return whether the format's levels have 4 bits."""
    return format.startswith("int4")


def has_minimum(format: str) -> bool:
    """Return whether the format's groups have a minimum in addition to their scale."""
    return format.endswith("_min")


def group_bytes(format: str) -> tuple[int, int]:
    """Return the bytes of a panel's group: those of its levels, and those of its scales and minima."""
    return QUADS * LINE // (2 if is_small(format) else 1), LINE if has_minimum(format) else LINE // 2
