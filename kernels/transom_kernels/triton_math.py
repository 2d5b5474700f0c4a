"""Scalar functions that several kernels share, in forms that the interpreter has too."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2_E)


@triton.jit
def tanh(x):
    """By the sigmoid: there is no tanh without a library."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def gelu_tanh(x):
    """The tanh approximation of gelu."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def round_to_nearest(x):
    """Halves to even, as torch rounds: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def partner(i, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other element of each element's rotary pair, among R."""
    if INTERLEAVED:
        return i ^ 1
    return tl.where(i < R // 2, i + R // 2, i - R // 2)
