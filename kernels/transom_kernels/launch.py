"""What launching Triton kernels needs to know of where they run."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by triton when a kernel is defined, hence once here too


def next_power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << (number - 1).bit_length()


def split_width(width: int, *, least: int = 16) -> tuple[int, int]:
    """A width as a power of two and a padded rest (0: none): 80 is (64, 16), 128 is (128, 0), 192 is (128, 64)."""
    first = max(least, 1 << (width.bit_length() - 1))
    rest = max(0, width - first)
    return first, max(least, next_power_of_two(rest)) if rest else 0


def warps_for(elements: int) -> int:
    """Warps of a program that keeps so many elements in registers."""
    return min(16, max(1, elements // 512))
