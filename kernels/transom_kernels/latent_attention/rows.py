"""Rows of a paged cache that has one head: read and written by slot.

Slot `s` is block `s // P`, row `s % P`. A negative slot is no row.

Legend: P rows per block, D width.
"""

from __future__ import annotations

import math

import torch

TILE_ELEMENTS = 2**20  # read at once: what a core's own cache nearly holds


def read_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of `cache` [ids, P, 1, D] at `slots` [...], [..., D]; zeros where there is no row. The cache may be strided."""
    ids, size, _, width = cache.shape
    block, row = cache.stride(0), cache.stride(1)
    unit = math.gcd(block, row)
    # every row starts at a multiple of `unit`: one index addresses them all, and rows are copied whole
    starts = cache.as_strided((((ids - 1) * block + (size - 1) * row) // unit + 1, width), (unit, cache.stride(3)))
    present = slots.clamp(min=0)
    index = present // size * (block // unit) + present % size * (row // unit)
    rows = starts.index_select(0, index.flatten()).view(*slots.shape, width)
    absent = slots < 0
    return rows.masked_fill_(absent[..., None], 0.0) if absent.any() else rows


def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `rows` [N, D] to `cache` [ids, P, 1, D] at `slots` [N], in place; slots of the dump block may repeat."""
    if rows.shape[-1] != cache.shape[-1] or rows.dtype != cache.dtype:
        raise ValueError(
            f"rows of {rows.shape[-1]} {rows.dtype} do not fit a cache of {cache.shape[-1]} {cache.dtype} elements."
        )
    cache[:, :, 0].index_put_((slots // cache.shape[1], slots % cache.shape[1]), rows)


def rows_per_tile(elements_per_row: int) -> int:
    """Query rows that a tile holds, at least 1."""
    return max(1, TILE_ELEMENTS // max(1, elements_per_row))
