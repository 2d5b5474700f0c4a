"""Joins the splits of a tile: each brings its own maximum, sum and weighted values.

Legend: M rows of a tile, tokens times the G query heads of one KV head; E value width; S splits of a round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import LOG2_E


@triton.jit
def combine(
    partial_out,  # [splits, KVH, M, E] float32
    partial_stats,  # [splits, KVH, M, 2] float32
    out,  # [T, H, E]
    lse_out,  # [T, H], or unused
    combine_items,  # [J, 4]
    sink_logits,  # [H] float32, or unused
    num_kv_heads,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row of one tile. `BLOCK_S` splits at a time: a long sequence has a hundred, and one after the other they would wait."""
    entry = combine_items + tl.program_id(0) * 4
    m, kv_head = tl.program_id(1), tl.program_id(2)
    row0, num_tokens = tl.load(entry), tl.load(entry + 1)
    first, count = tl.load(entry + 2), tl.load(entry + 3)
    if m >= num_tokens * GROUP:
        return
    head = kv_head * GROUP + m % GROUP
    e = tl.arange(0, BLOCK_E)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for begin in range(0, count, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        present = split < count
        at = ((first + split).to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
        bests = tl.load(partial_stats + at * 2, mask=present, other=float("-inf"))
        totals = tl.load(partial_stats + at * 2 + 1, mask=present, other=0.0)
        kept = present[:, None] & (e < E)[None, :]
        values = tl.load(partial_out + at[:, None] * E + e[None, :], mask=kept, other=0.0)
        new_best = tl.maximum(best, tl.max(bests, 0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weights = tl.exp2(best - anchor), tl.exp2(bests - anchor)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        best = new_best
    anchor = tl.where(best == float("-inf"), 0.0, best)
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_logits + head) * LOG2_E
        higher = tl.maximum(anchor, tl.where(sink == float("-inf"), anchor, sink))
        total = total * tl.exp2(anchor - higher) + tl.exp2(sink - higher)
        acc *= tl.exp2(anchor - higher)
        anchor = higher
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    row = (row0 + m // GROUP).to(tl.int64) * num_kv_heads * GROUP + head
    tl.store(out + row * E + e, (acc * share).to(out.dtype.element_ty), mask=e < E)
    if WRITES_LSE:
        lse = (anchor + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2_E
        tl.store(lse_out + row, tl.where(total > 0, lse, float("-inf")))
