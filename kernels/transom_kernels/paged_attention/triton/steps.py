"""Functions that the Triton kernels of attention share: the load of queries, and the softmax.

The softmax is online (FlashAttention) and in base 2, since exp2 is one instruction. A kernel calls, in this order:

    row_max, row_sum, weight, rescale = continue_softmax(row_max, row_sum, score)      for each block of keys; then
    acc = acc * rescale + weight @ values                                              in the kernel
    row_max, row_sum, rescale = add_sink(row_max, row_sum, sink_logit)                 if the head has a sink logit
    out = acc * rescale * inverse_of(row_sum)

Legend: M rows, N keys of an iteration, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import LOG2_E


@triton.jit
def load_queries(base, rows, columns, width: tl.constexpr, kept, UPCAST: tl.constexpr):
    """Load queries [M, D] at `base + rows + columns`; zeros in rows that are not `kept`, and from `width` on."""
    inside = kept[:, None] & (columns < width)[None, :]
    queries = tl.load(base + rows[:, None] + columns[None, :], mask=inside, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries


@triton.jit
def finite(row_max):
    """Return maxima, with 0 instead of -inf (rows that have seen no key yet), since -inf - -inf would be NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def continue_softmax(row_max, row_sum, score):
    """Add scores [M, N] (base 2; -inf: not seen) to the maximum and the sum [M] so far.

    Return both, the weights [M, N], and the factor [M] that rescales the values accumulated so far to the new maximum.
    """
    new_max = tl.maximum(row_max, tl.max(score, 1))
    finite_max = finite(new_max)
    weight = tl.exp2(score - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    return new_max, row_sum * rescale + tl.sum(weight, 1), weight, rescale


@triton.jit
def add_sink(row_max, row_sum, sink_logit):
    """Add exp(sink_logit) to the softmax sum of rows with a finite maximum.

    Return the new maximum and sum, and the factor that rescales the accumulated values. Everything is rescaled to the larger of
    maximum and sink, since the exponential of a sink far above every score would overflow.
    """
    sink = sink_logit * LOG2_E
    joint_max = tl.maximum(row_max, tl.where(sink == float("-inf"), row_max, sink))
    rescale = tl.exp2(row_max - joint_max)
    return joint_max, row_sum * rescale + tl.exp2(sink - joint_max), rescale


@triton.jit
def inverse_of(row_sum):
    """Return 1 / row_sum, or 0 for rows that have seen no key."""
    return tl.where(row_sum > 0, 1.0 / tl.where(row_sum > 0, row_sum, 1.0), 0.0)
