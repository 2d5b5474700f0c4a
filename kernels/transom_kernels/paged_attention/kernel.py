"""Attention over a paged cache in Triton: one kernel for decoding and prompts, and one that combine_items splits.

Softmax runs online over blocks of keys, in powers of two. Offsets into the caches are int64: a slab is larger than 2 GiB.
Numbers that change from step to step are not specialised: a new batch must not compile anything.

Legend: M rows of a program, tokens times the G query heads of one KV head; N keys a round; D key width in two parts (a power of two
and a padded rest, so that 80 is 64 + 16 and 192 is 128 + 64); E value width, likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import LOG2_E, tanh


@triton.jit
def _load_rows(base, rows, stride, columns, width: tl.constexpr, kept):
    """`[rows, columns]` of elements that are kept and inside `width`; zeros elsewhere."""
    inside = kept[:, None] & (columns < width)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "num_columns"])
def attend(
    q,  # [T, H, D]
    sink_q,  # [T, H, D] queries for sink tokens, strides as q's, or unused
    k_cache,  # [ids, P, KVH, D]
    v_cache,  # [ids, P, KVH, E]
    out,  # [T, H, E]
    lse_out,  # [T, H] natural logarithm, or unused
    partial_out,  # [splits, M, E] float32
    partial_stats,  # [splits, M, 2] float32: maximum and sum, base 2
    block_lse,  # [B, KVH, columns, G] float32, base 2, or unused
    items,  # [W, 9]
    block_table,  # [B, columns]
    first_block,  # [B]
    attend_from,  # [B]
    key_blocks,  # [B, columns] logical block of each column, or unused
    position_shift,  # [B] what positions are ahead of the tokens in the table, or unused
    sink_logits,  # [H] float32, or unused
    k_scale,  # [KVH] float32, or unused
    v_scale,
    scale,
    soft_cap,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_p,
    k_stride_h,
    v_stride_b,
    v_stride_p,
    v_stride_h,
    table_stride,
    num_columns,
    num_kv_heads,
    num_sink_blocks,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,  # 0: none
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SINKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    HAS_KEY_BLOCKS: tl.constexpr,
    HAS_SINK_QUERY: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WRITES_LSE: tl.constexpr,
    WRITES_BLOCK_LSE: tl.constexpr,
    UPCAST: tl.constexpr,  # products in float32: for the interpreter, which cannot compute in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile, or one split of it, of one KV head."""
    item = items + tl.program_id(0) * 9
    kv_head = tl.program_id(1)
    row0, num_tokens, position0 = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    b = tl.load(item + 3)
    sinks_begin, sinks_end = tl.load(item + 4), tl.load(item + 5)
    run_begin, run_end, partial = tl.load(item + 6), tl.load(item + 7), tl.load(item + 8)

    if HAS_KEY_BLOCKS:
        position0 += tl.load(position_shift + b)
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = token < num_tokens
    position = position0 + token
    lowest = tl.load(attend_from + b)
    low = tl.full([BLOCK_M], 0, tl.int32) + lowest
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK > 0:
        low = tl.maximum(low, position - position % CHUNK)
    first_low = tl.min(tl.where(is_row, low, 2147483647))
    last = position0 + num_tokens - 1

    d1, e1 = tl.arange(0, D1), tl.arange(0, E1)
    q_rows = (row0 + token).to(tl.int64) * q_stride_t + head * q_stride_h
    q1 = _load_rows(q, q_rows, 1, d1, D, is_row)
    if UPCAST:
        q1 = q1.to(tl.float32)
    acc1 = tl.zeros([BLOCK_M, E1], tl.float32)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = _load_rows(q, q_rows, 1, d2, D, is_row)
        if UPCAST:
            q2 = q2.to(tl.float32)
    if E2 > 0:
        e2 = E1 + tl.arange(0, E2)
        acc2 = tl.zeros([BLOCK_M, E2], tl.float32)
    qk_scale = scale
    if HAS_SCALES:
        qk_scale = scale * tl.load(k_scale + kv_head)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first = tl.load(first_block + b)
    table = block_table + b.to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    # rounds begin at multiples of BLOCK_N, so that a round holds whole cache blocks
    sinks_start, run_start = sinks_begin // BLOCK_N * BLOCK_N, run_begin // BLOCK_N * BLOCK_N
    sink_rounds = tl.cdiv(sinks_end - sinks_start, BLOCK_N)
    for at in range(0, sink_rounds + tl.cdiv(run_end - run_start, BLOCK_N)):
        in_sinks = at < sink_rounds
        slot = tl.where(in_sinks, sinks_start + at * BLOCK_N, run_start + (at - sink_rounds) * BLOCK_N) + n
        slot_begin, slot_end = tl.where(in_sinks, sinks_begin, run_begin), tl.where(in_sinks, sinks_end, run_end)
        column = slot // BLOCK_SIZE
        wanted = (slot >= slot_begin) & (slot < slot_end)
        if HAS_KEY_BLOCKS:
            logical = tl.load(key_blocks + b.to(tl.int64) * table_stride + column, mask=wanted, other=0)
        else:
            logical = tl.where(column < num_sink_blocks, column, first + column - num_sink_blocks)
        key = logical * BLOCK_SIZE + slot % BLOCK_SIZE
        readable = wanted & (key <= last) & ((key >= first_low) | (key < SINKS))
        block = tl.load(table + column, mask=readable, other=0).to(tl.int64)
        k_rows = block * k_stride_b + (slot % BLOCK_SIZE) * k_stride_p + kv_head * k_stride_h
        k1 = _load_rows(k_cache, k_rows, 1, d1, D, readable)
        if UPCAST or k1.dtype != q1.dtype:
            k1 = k1.to(q1.dtype)
        if HAS_SINK_QUERY:
            source = tl.where(in_sinks, sink_q, q)
            q1 = _load_rows(source, q_rows, 1, d1, D, is_row).to(q1.dtype)
            if D2 > 0:
                q2 = _load_rows(source, q_rows, 1, d2, D, is_row).to(q2.dtype)
        score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if D2 > 0:
            k2 = _load_rows(k_cache, k_rows, 1, d2, D, readable)
            if UPCAST or k2.dtype != q2.dtype:
                k2 = k2.to(q2.dtype)
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
        score *= qk_scale
        if HAS_SOFT_CAP:
            score = soft_cap * tanh(score / soft_cap)
        visible = (key[None, :] <= position[:, None]) & ((key[None, :] >= low[:, None]) | (key[None, :] < SINKS))
        visible = visible & readable[None, :] & is_row[:, None]
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        if WRITES_BLOCK_LSE:
            BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
            by_block = tl.reshape(score, [BLOCK_M, BLOCKS, BLOCK_SIZE])
            most = tl.max(by_block, 2)
            safe = tl.where(most == float("-inf"), 0.0, most)
            sums = tl.sum(tl.exp2(by_block - safe[:, :, None]), 2)
            written = tl.min(slot) // BLOCK_SIZE + tl.arange(0, BLOCKS)
            target = block_lse + ((b * num_kv_heads + kv_head).to(tl.int64) * num_columns + written)[None, :] * GROUP
            target += (m % GROUP)[:, None]
            kept = is_row[:, None] & (sums > 0) & (written < num_columns)[None, :]
            tl.store(target, safe + tl.log2(tl.where(sums > 0, sums, 1.0)), mask=kept)
        new_best = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(score - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
        v_rows = block * v_stride_b + (slot % BLOCK_SIZE) * v_stride_p + kv_head * v_stride_h
        v1 = _load_rows(v_cache, v_rows, 1, e1, E, readable)
        if UPCAST or v1.dtype != q1.dtype:
            v1 = v1.to(q1.dtype)
        acc1 = tl.dot(weight.to(v1.dtype), v1, acc1 * shrink[:, None], input_precision="ieee")
        if E2 > 0:
            v2 = _load_rows(v_cache, v_rows, 1, e2, E, readable)
            if UPCAST or v2.dtype != q1.dtype:
                v2 = v2.to(q1.dtype)
            acc2 = tl.dot(weight.to(v2.dtype), v2, acc2 * shrink[:, None], input_precision="ieee")

    if HAS_SCALES:
        acc1 *= tl.load(v_scale + kv_head)
        if E2 > 0:
            acc2 *= tl.load(v_scale + kv_head)
    if partial >= 0:
        base = (partial.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M
        stats = partial_stats + (base + m) * 2
        tl.store(stats, best)
        tl.store(stats + 1, total)
        place = partial_out + (base + m)[:, None] * E
        tl.store(place + e1[None, :], acc1, mask=(e1 < E)[None, :] & is_row[:, None])
        if E2 > 0:
            tl.store(place + e2[None, :], acc2, mask=(e2 < E)[None, :] & is_row[:, None])
        return
    anchor = tl.where(best == float("-inf"), 0.0, best)
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_logits + head, mask=is_row, other=float("-inf")) * LOG2_E
        # a sink far above every score would overflow: shrink towards it instead
        higher = tl.maximum(anchor, tl.where(sink == float("-inf"), anchor, sink))
        total = total * tl.exp2(anchor - higher) + tl.exp2(sink - higher)
        acc1 *= tl.exp2(anchor - higher)[:, None]
        if E2 > 0:
            acc2 *= tl.exp2(anchor - higher)[:, None]
        anchor = higher
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    num_heads = num_kv_heads * GROUP
    out_rows = ((row0 + token).to(tl.int64) * num_heads + head)[:, None] * E
    kept1 = (e1 < E)[None, :] & is_row[:, None]
    tl.store(out + out_rows + e1[None, :], (acc1 * share[:, None]).to(out.dtype.element_ty), mask=kept1)
    if E2 > 0:
        kept2 = (e2 < E)[None, :] & is_row[:, None]
        tl.store(out + out_rows + e2[None, :], (acc2 * share[:, None]).to(out.dtype.element_ty), mask=kept2)
    if WRITES_LSE:
        lse = (anchor + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2_E
        place = lse_out + (row0 + token).to(tl.int64) * num_heads + head
        tl.store(place, tl.where(total > 0, lse, float("-inf")), mask=is_row)
