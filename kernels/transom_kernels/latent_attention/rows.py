"""Reads and writes rows of a paged cache that has one head, by slot.

Slot `s` is row `s % P` of block `s // P`. A negative slot names no row.

Legend: P rows per block, D width, N rows.
"""

from __future__ import annotations

import math

import torch


def read_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] of `cache` [ids, P, 1, D] at `slots` [...]; zeros at negative slots. The cache may have strides."""
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
    """Write `rows` [N, D] in place to `cache` [ids, P, 1, D] at `slots` [N]; slots of the dump block may repeat.

    Raises:
        ValueError: width or dtype do not fit the cache.
    """
    if rows.shape[-1] != cache.shape[-1] or rows.dtype != cache.dtype:
        raise ValueError(
            f"rows of {rows.shape[-1]} {rows.dtype} do not fit a cache of {cache.shape[-1]} {cache.dtype} elements."
        )
    cache[:, :, 0].index_put_((slots // cache.shape[1], slots % cache.shape[1]), rows)
