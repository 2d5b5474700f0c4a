"""Latent attention and its indexer in Triton: rows are gathered by slot, once for all heads of a program.

Loops hold no branches around loads, so that the compiler can fetch a round's slots and rows while earlier rounds are computed: a
pointer that is chosen in the loop would be loaded from two bytes at a time.

Legend: T queries, H heads, D latent width, W window slots, K entry slots, N slots a round, P rows per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import LOG2_E


@triton.jit
def _gather(cache, slot, stride_b, stride_p, d, D: tl.constexpr, P: tl.constexpr):
    """Rows at slots, zeros for negative ones, [N, BLOCK_D]."""
    present = slot >= 0
    at = tl.where(present, slot, 0)
    rows = cache + (at // P * stride_b + at % P * stride_p)[:, None]
    return tl.load(rows + d[None, :], mask=present[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    best,
    total,
    acc,
    query,  # [BLOCK_H, BLOCK_D]
    cache,
    slots,  # of this query, `count` of them
    count,
    stride_b,
    stride_p,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The running maximum, sum and values with the rows at `slots` among them."""
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    for first in range(0, count, BLOCK_N):
        slot = tl.load(slots + first + n, mask=first + n < count, other=-1)
        rows = _gather(cache, slot, stride_b, stride_p, d, D, P)
        if UPCAST:
            rows = rows.to(tl.float32)
        score = tl.dot(query, tl.trans(rows), input_precision="ieee") * scale
        score = tl.where((slot >= 0)[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight, shrink = tl.exp2(score - anchor[:, None]), tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(rows.dtype), rows, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["num_window", "num_entries"])
def attend_rows(
    q,  # [T, H, D]
    window_cache,  # [ids, P, 1, D]
    entry_cache,
    window_slots,  # [T, W] int64
    entry_slots,  # [T, K]
    sink_logits,  # [H] float32
    out,  # [T, H, D]
    scale,
    num_heads,
    num_window,
    num_entries,
    q_stride_t,
    q_stride_h,
    window_stride_b,
    window_stride_p,
    entry_stride_b,
    entry_stride_p,
    D: tl.constexpr,
    WINDOW_P: tl.constexpr,
    ENTRY_P: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some heads of one query; a row is key and value at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    kept = (head < num_heads)[:, None] & (d < D)[None, :]
    query = tl.load(q + token * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=kept, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    # the sink is the first key: its weight is 1 at its own height, and it brings no value
    best = tl.load(sink_logits + head, mask=head < num_heads, other=0.0) * LOG2_E
    total = tl.where(best == float("-inf"), 0.0, tl.full([BLOCK_H], 1.0, tl.float32))
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    best, total, acc = _attend(
        best, total, acc, query, window_cache, window_slots + token * num_window, num_window, window_stride_b,
        window_stride_p, scale * LOG2_E, D, WINDOW_P, UPCAST, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    best, total, acc = _attend(
        best, total, acc, query, entry_cache, entry_slots + token * num_entries, num_entries, entry_stride_b,
        entry_stride_p, scale * LOG2_E, D, ENTRY_P, UPCAST, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    place = out + (token * num_heads + head[:, None]) * D + d[None, :]
    tl.store(place, (acc * share[:, None]).to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_entries", "num_rounds"])
def score_entries(
    q,  # [T, H, D]
    head_weights,  # [T, H] float32
    key_cache,  # [ids, P, 1, D]
    slots,  # [B, N] int64
    sequence,  # [T] int64
    num_visible,  # [T] int64
    scores,  # [T, N] float32
    scale,
    num_heads,
    num_entries,
    num_rounds,  # of a program
    q_stride_t,
    q_stride_h,
    key_stride_b,
    key_stride_p,
    D: tl.constexpr,
    P: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_H: tl.constexpr,  # all heads
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """An indexer's scores of some entries for one query; minus infinity for entries that it does not see."""
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * num_rounds * BLOCK_N
    end = tl.minimum(begin + num_rounds * BLOCK_N, num_entries)
    seen_end = tl.minimum(end, tl.load(num_visible + token).to(tl.int32))
    head, d, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    row = scores + token * num_entries
    if begin < seen_end:
        table = slots + tl.load(sequence + token) * num_entries
        kept = (head < num_heads)[:, None] & (d < D)[None, :]
        query = tl.load(q + token * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=kept, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        weight = tl.load(head_weights + token * num_heads + head, mask=head < num_heads, other=0.0)
        for first in range(begin, seen_end, BLOCK_N):
            entry = first + n
            slot = tl.load(table + entry, mask=entry < seen_end, other=-1)
            keys = _gather(key_cache, slot, key_stride_b, key_stride_p, d, D, P)
            if UPCAST:
                keys = keys.to(tl.float32)
            product = tl.maximum(tl.dot(query, tl.trans(keys), input_precision="ieee"), 0.0) * scale
            total = tl.sum(product * weight[:, None], 0)
            tl.store(row + entry, tl.where(entry < seen_end, total, float("-inf")), mask=entry < num_entries)
    unseen = begin + tl.cdiv(tl.maximum(seen_end - begin, 0), BLOCK_N) * BLOCK_N
    for first in range(unseen, end, BLOCK_N):
        tl.store(row + first + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=first + n < num_entries)


@triton.jit
def pool(
    kv_cache,  # [ids, P, 1, G * D] float32
    gate_cache,
    slots,  # [E, G * R] int64
    position_bias,  # [R, G * D]
    out,  # [E, D]
    kv_stride_b,
    kv_stride_p,
    gate_stride_b,
    gate_stride_p,
    D: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some channels of one entry: a softmax over its rows, channel by channel, `BLOCK_R` rows at a time."""
    entry = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, G * R, BLOCK_R):
        place = first + tl.arange(0, BLOCK_R)
        slot = tl.load(slots + entry * (G * R) + place, mask=place < G * R, other=-1)
        kept = (slot >= 0)[:, None] & (d < D)[None, :]
        at, channel = tl.where(slot >= 0, slot, 0), place // R * D
        gate_rows = at // P * gate_stride_b + at % P * gate_stride_p + channel
        kv_rows = at // P * kv_stride_b + at % P * kv_stride_p + channel
        gate = tl.load(gate_cache + gate_rows[:, None] + d[None, :], mask=kept, other=float("-inf"))
        value = tl.load(kv_cache + kv_rows[:, None] + d[None, :], mask=kept, other=0.0)
        bias_rows = place % R * (G * D) + channel
        gate += tl.load(position_bias + bias_rows[:, None] + d[None, :], mask=kept, other=0.0)
        new_best = tl.maximum(best, tl.max(gate, 0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp(best - anchor), tl.exp(gate - anchor[None, :])
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(value * weight, 0)
        best = new_best
    tl.store(out + entry * D + d, acc / tl.where(total > 0, total, 1.0), mask=d < D)
