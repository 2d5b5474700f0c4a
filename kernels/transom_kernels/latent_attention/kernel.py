"""Latent attention and its indexer in Triton: rows are gathered by slot, once for all heads of a program.

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


@triton.jit(do_not_specialize=["num_entries"])
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
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    kept = (head < num_heads)[:, None] & (d < D)[None, :]
    query = tl.load(q + token * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=kept, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    sink = tl.load(sink_logits + head, mask=head < num_heads, other=0.0) * LOG2_E
    # the sink is the first key: its weight is 1 at its own height, and it brings no value
    best = tl.where(sink == float("-inf"), float("-inf"), sink)
    total = tl.where(sink == float("-inf"), 0.0, tl.full([BLOCK_H], 1.0, tl.float32))
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    window_rounds = tl.cdiv(num_window, BLOCK_N)
    for at in range(0, window_rounds + tl.cdiv(num_entries, BLOCK_N)):
        if at < window_rounds:
            place = at * BLOCK_N + n
            slot = tl.load(window_slots + token * num_window + place, mask=place < num_window, other=-1)
            rows = _gather(window_cache, slot, window_stride_b, window_stride_p, d, D, WINDOW_P)
        else:
            place = (at - window_rounds) * BLOCK_N + n
            slot = tl.load(entry_slots + token * num_entries + place, mask=place < num_entries, other=-1)
            rows = _gather(entry_cache, slot, entry_stride_b, entry_stride_p, d, D, ENTRY_P)
        if UPCAST:
            rows = rows.to(tl.float32)
        score = tl.dot(query, tl.trans(rows), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where((slot >= 0)[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight, shrink = tl.exp2(score - anchor[:, None]), tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(rows.dtype), rows, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    place = out + (token * num_heads + head[:, None]) * D + d[None, :]
    tl.store(place, (acc * share[:, None]).to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_entries"])
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
    q_stride_t,
    q_stride_h,
    key_stride_b,
    key_stride_p,
    D: tl.constexpr,
    P: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """An indexer's scores of some entries for one query; minus infinity for entries that it does not see."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = tl.load(num_visible + token)
    total = tl.zeros([BLOCK_N], tl.float32)
    is_seen = entry < visible
    if tl.program_id(1) * BLOCK_N < visible:
        d = tl.arange(0, BLOCK_D)
        table = slots + tl.load(sequence + token) * num_entries
        slot = tl.load(table + entry, mask=is_seen & (entry < num_entries), other=-1)
        keys = _gather(key_cache, slot, key_stride_b, key_stride_p, d, D, P)
        if UPCAST:
            keys = keys.to(tl.float32)
        for first in range(0, num_heads, BLOCK_H):
            head = first + tl.arange(0, BLOCK_H)
            kept = (head < num_heads)[:, None] & (d < D)[None, :]
            query = tl.load(q + token * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=kept, other=0.0)
            if UPCAST:
                query = query.to(tl.float32)
            product = tl.maximum(tl.dot(query, tl.trans(keys), input_precision="ieee"), 0.0) * scale
            weight = tl.load(head_weights + token * num_heads + head, mask=head < num_heads, other=0.0)
            total += tl.sum(product * weight[:, None], 0)
    tl.store(scores + token * num_entries + entry, tl.where(is_seen, total, float("-inf")), mask=entry < num_entries)


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
    BLOCK_D: tl.constexpr,
):
    """Some channels of one entry: a softmax over its rows, channel by channel."""
    entry = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < D
    best = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for place in range(0, G * R):
        slot = tl.load(slots + entry * (G * R) + place)
        if slot >= 0:
            channel = place // R * D + d
            gate = tl.load(
                gate_cache + slot // P * gate_stride_b + slot % P * gate_stride_p + channel, mask=inside, other=0.0
            )
            gate += tl.load(position_bias + place % R * (G * D) + channel, mask=inside, other=0.0)
            value = tl.load(
                kv_cache + slot // P * kv_stride_b + slot % P * kv_stride_p + channel, mask=inside, other=0.0
            )
            new_best = tl.maximum(best, gate)
            shrink, weight = tl.exp(best - new_best), tl.exp(gate - new_best)
            total = total * shrink + weight
            acc = acc * shrink + value * weight
            best = new_best
    tl.store(out + entry * D + d, acc / tl.where(total > 0, total, 1.0), mask=inside)
