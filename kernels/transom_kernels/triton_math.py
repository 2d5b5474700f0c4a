"""Triton functions that several kernels share. They use only operations that Triton's interpreter also supports."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2_E)


@triton.jit
def tanh(x):
    """Return tanh(x) = 2 * sigmoid(2 x) - 1, since Triton has no tanh without an external library."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """Return log1p(exp(x)), or x itself if x > 20, as in torch.

    log1p(a) = log(1 + a) * a / ((1 + a) - 1): the quotient makes up for the rounding of 1 + a, so that small a are exact, too.
    """
    addend = tl.exp(tl.where(x > 20.0, 20.0, x))
    one_plus = 1.0 + addend
    log1p = tl.where(
        one_plus == 1.0, addend, tl.log(one_plus) * (addend / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0))
    )
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def gelu_tanh(x):
    """Return gelu(x) by its tanh approximation; 1.5957... is 2 * sqrt(2 / pi), since tanh(y) is 2 * sigmoid(2 y) - 1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def relu2(x):
    """Return relu(x) ** 2; NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x * x)


@triton.jit
def round_to_nearest(x):
    """Return the nearest integer, ties to even as in torch: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def multiply_hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG_BLOCK: tl.constexpr):
    """Return rows [ROWS, WIDTH] times the Hadamard matrix (`kv_write.reference`), which has blocks of width 2 ** LOG_BLOCK.

    The fast Walsh-Hadamard transform computes it by sums and differences of elements that are 1, 2, 4, ... apart.
    """
    for i in tl.static_range(LOG_BLOCK):
        pairs = tl.reshape(x, [ROWS, WIDTH // (2 << i), 2, 1 << i])
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(joined, [ROWS, WIDTH])
    return x * (0.5 ** (LOG_BLOCK / 2))


@triton.jit
def partner(i, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the index of the other element of each element's rotary pair, among R elements.

    Pairs are (2i, 2i + 1) if INTERLEAVED, else (i, i + R / 2).
    """
    if INTERLEAVED:
        return i ^ 1
    return tl.where(i < R // 2, i + R // 2, i - R // 2)
