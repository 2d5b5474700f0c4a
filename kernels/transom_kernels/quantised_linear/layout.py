"""Sizes of groups, panels and records, which the packing of weights and the kernels agree on."""

from __future__ import annotations

GROUP = 32  # columns that share a scale
PANEL = 16  # rows of a weight whose levels lie together
QUADS = GROUP // 4
LINE = 64  # bytes
ZERO = {"int8": 128, "int4": 8, "int4_min": 0}  # the level of an element of 0, by format
RECORD = 48  # bytes of a group of a rounded row (`rounded_rows`)
MOST_ROWS = 8  # in a block
