"""The operator `position_scale`: the factor of queries in Llama 4 and Ministral 3, which grows with the position p:

    1 + factor * log(1 + floor((p + first) / interval))

Legend: T tokens.
"""

from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import NUM_BYTES, STORE_PART, float_of_bits, fma, load_i64, logarithm, splat, vector_floor
from transom_kernels.cpu.work import argument, each_item
from transom_kernels.launch import uses_cpu_kernels


def position_scale(
    positions: torch.Tensor, *, factor: float, interval: int, first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the factors [T] of `positions` [T] int64, computed in float32 and rounded to `dtype`.

    Raises:
        ValueError: the interval is below 1.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}; give at least 1.")
    if uses_cpu_kernels(positions) and fits_cpu(positions, dtype):
        return position_scale_cpu(positions, factor=factor, interval=interval, first=first, dtype=dtype)
    return position_scale_reference(positions, factor=factor, interval=interval, first=first, dtype=dtype)


def position_scale_reference(
    positions: torch.Tensor, *, factor: float, interval: int, first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `position_scale` in torch: the specification."""
    intervals_T = ((positions.float() + first) / interval).floor()
    return (intervals_T.log1p() * factor + 1.0).to(dtype)


# --- the CPU kernel and its launch

ITEM_TOKENS = 32  # most tokens of one work item


def fits_cpu(positions: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    return positions.dtype == torch.int64 and positions.is_contiguous() and dtype in DTYPES


def position_scale_cpu(
    positions: torch.Tensor, *, factor: float, interval: int, first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return 1 + factor * log(1 + floor((p + first) / interval)) [T] for `positions` p [T] int64, rounded to `dtype`."""
    num_tokens = len(positions)
    out = empty((num_tokens,), dtype)
    launch(
        cpu_kernel("transom_kernels.position_scale", "make_position_scale", dtype=DTYPES[dtype]),
        -(-num_tokens // ITEM_TOKENS),
        [positions, out, num_tokens, ITEM_TOKENS, float(factor), float(interval), float(first)],
    )
    return out


def make_position_scale(dtype: str) -> Any:
    """Build the kernel. A work item is a group of tokens.

    Argument words: 0 positions [T] int64, 1 out [T], 2 T, 3 tokens of an item, 4 factor, 5 interval, 6 first.
    """
    store_part, size = STORE_PART[dtype], NUM_BYTES[dtype]

    @each_item
    def position_scale(arguments, thread, item):
        factor = splat(float_of_bits(argument(arguments, 4)))
        interval = splat(float_of_bits(argument(arguments, 5)))
        offset = splat(float_of_bits(argument(arguments, 6)))
        first = item * argument(arguments, 3)
        for token in range(first, min(first + argument(arguments, 3), argument(arguments, 2))):
            position = splat(load_i64(argument(arguments, 0) + token * 8)) + offset
            intervals = vector_floor(position / interval)
            value = fma(logarithm(intervals + splat(1.0)), factor, splat(1.0))
            store_part(argument(arguments, 1) + token * size, value, 1)

    return position_scale
