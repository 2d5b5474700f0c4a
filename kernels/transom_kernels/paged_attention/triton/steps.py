"""Functions that the Triton kernels of attention share: the load of queries, and the softmax; and the kernel `combine`.

The softmax is online (FlashAttention) and in base 2, since exp2 is one instruction. A kernel calls, in this order:

    row_max, row_sum, weight, rescale = continue_softmax(row_max, row_sum, score)      for each block of keys; then
    acc = acc * rescale + weight @ values                                              in the kernel
    row_max, row_sum, rescale = add_sink(row_max, row_sum, sink_logit)                 if the head has a sink logit
    out = acc * rescale * inverse_of(row_sum)

`combine` is the second kernel of split-KV attention (FlashDecoding): it merges the partial results of a tile. For each split `s`
and row `m` the kernel `attend` writes a maximum `max_s` (base 2), a softmax sum `sum_s` relative to it, and the weighted values
`acc_s`. With the largest maximum `M` of all splits, the result of a row is

    out = sum_s 2^(max_s - M) acc_s / (sum_s 2^(max_s - M) sum_s + 2^(sink_logit - M))

Its grid is (combine items, rows of a tile, KV heads): one program combines one row. `work_items.py` has the fields of a combine
item.

Legend: M rows (of a tile: tokens times the G query heads per KV head), N keys of an iteration, D width, E value width, S splits
that an iteration reads, J combine items, T query tokens, H query heads, KVH KV heads.
"""

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
def continue_softmax(row_max, row_sum, score, factor=1.0):
    """Add scores [M, N] (base 2 once multiplied by `factor` > 0; -inf: not seen) to the maximum and the sum [M] so far.

    Return both, the weights [M, N], and the factor [M] that rescales the values accumulated so far to the new maximum.
    """
    new_max = tl.maximum(row_max, tl.max(score, 1) * factor)
    finite_max = finite(new_max)
    weight = tl.exp2(score * factor - finite_max[:, None])
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


@triton.jit(do_not_specialize=["num_kv_heads"])
def combine(
    partial_out,  # [partials, H, E] float32
    partial_stats,  # [partials, H, 2] float32: maximum (base 2) and softmax sum
    out,  # [T, H, E]
    combine_items,  # [J, 4] int32: row, tokens, first partial, number of splits
    sink_logits,  # [H] float32, or unused
    num_kv_heads,
    GROUP: tl.constexpr,  # G
    E: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Combine the splits of one row of one tile.

    An iteration reads `BLOCK_S` splits at once: with one KV head a sequence has a hundred, and loading them one by one would wait
    a hundred times.
    """
    # --- the combine item ---
    item = combine_items + tl.program_id(0) * 4
    m, kv_head = tl.program_id(1), tl.program_id(2)
    first_row, num_tokens = tl.load(item), tl.load(item + 1)
    first, count = tl.load(item + 2), tl.load(item + 3)
    if m >= num_tokens * GROUP:
        return
    head = kv_head * GROUP + m % GROUP
    e = tl.arange(0, BLOCK_E)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_E], tl.float32)

    # --- loop over splits: what was accumulated so far is rescaled to the new maximum ---
    for begin in range(0, count, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        present = split < count
        at = (first + split * num_tokens + m // GROUP).to(tl.int64) * num_kv_heads * GROUP + head
        maxima = tl.load(partial_stats + at * 2, mask=present, other=float("-inf"))  # [BLOCK_S]
        sums = tl.load(partial_stats + at * 2 + 1, mask=present, other=0.0)
        kept = present[:, None] & (e < E)[None, :]
        values = tl.load(partial_out + at[:, None] * E + e[None, :], mask=kept, other=0.0)  # [BLOCK_S, BLOCK_E]
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        finite_max = finite(new_max)
        rescale, weights = tl.exp2(row_max - finite_max), tl.exp2(maxima - finite_max)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        row_sum = row_sum * rescale + tl.sum(sums * weights, 0)
        row_max = new_max

    # --- add the sink logit to the softmax sum, divide, store ---
    if HAS_SINK_LOGITS:
        row_max, row_sum, rescale = add_sink(finite(row_max), row_sum, tl.load(sink_logits + head))
        acc *= rescale
    row = (first_row + m // GROUP).to(tl.int64) * num_kv_heads * GROUP + head
    tl.store(out + row * E + e, (acc * inverse_of(row_sum)).to(out.dtype.element_ty), mask=e < E)
