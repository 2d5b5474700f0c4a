"""The Triton kernels of DeepSeek V4's latent attention: `attend_rows`, `score_entries` (indexer) and `pool` (compressor).

    attend_rows:    out[t, h] = softmax over rows r of (scale * q[t, h] . r, sink_logits[h]) times r     window rows, entries
                    with SPLIT partial results, which `paged_attention.triton.steps.combine` merges
    score_entries:  scores[t, n] = sum_h head_weights[t, h] * relu(q[t, h] . key[n]) * scale                -inf for unseen entries
    pool:           out[e, d] = sum over rows of softmax(gate + position_bias) * kv                         per channel d

A latent row is both key and value of all heads, so a program gathers a row once for all of its heads. The window's rows are those
of the latest tokens; an *entry* is a row that `pool` has made of several tokens. Slot `s` is row `s % P` of block `s // P`; a
negative slot names no row.

A row of 576 numbers is computed as two tiles of 512 and 64, as in `paged_attention.triton.attend`.

Loops have no branches around loads, so that the compiler can prefetch the slots and rows of later iterations. (If a loop chose
between two pointers, the compiler would load from them two bytes at a time.)

Legend: T queries, H heads, D width, W window slots, K entry slots, N entries or slots of an iteration, P rows per block, B
sequences, E pooled entries, R tokens per entry, G groups of tokens that an entry reads.
"""

import triton
import triton.language as tl

from transom_kernels.paged_attention.triton.steps import continue_softmax, inverse_of, load_queries
from transom_kernels.triton_math import LOG2_E


@triton.jit
def _gather(cache, slot, stride_b, stride_p, d, D: tl.constexpr, P: tl.constexpr):
    """Load rows [N, BLOCK_D] of a cache at slots [N]; zeros at negative slots."""
    present = slot >= 0
    present_slot = tl.where(present, slot, 0)
    rows = cache + (present_slot // P * stride_b + present_slot % P * stride_p)[:, None]
    return tl.load(rows + d[None, :], mask=present[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    row_max,
    row_sum,
    acc1,
    acc2,
    q1,  # [BLOCK_H, D1]
    q2,  # [BLOCK_H, D2]
    cache,
    slots,  # pointer to this query's slots
    count,
    stride_b,
    stride_p,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    UPCAST: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Continue the online softmax over the rows at `slots`; return the new maximum, sum and accumulated values."""
    d1, n = tl.arange(0, D1), tl.arange(0, BLOCK_N)
    for first in range(0, count, BLOCK_N):
        slot = tl.load(slots + first + n, mask=first + n < count, other=-1)
        rows1 = _gather(cache, slot, stride_b, stride_p, d1, D, P)
        if UPCAST:
            rows1 = rows1.to(tl.float32)
        score = tl.dot(q1, tl.trans(rows1), input_precision="ieee")
        if D2 > 0:
            rows2 = _gather(cache, slot, stride_b, stride_p, D1 + tl.arange(0, D2), D, P)
            if UPCAST:
                rows2 = rows2.to(tl.float32)
            score = tl.dot(q2, tl.trans(rows2), score, input_precision="ieee")
        score = tl.where((slot >= 0)[None, :], score * scale, float("-inf"))
        row_max, row_sum, weight, rescale = continue_softmax(row_max, row_sum, score)
        acc1 = tl.dot(weight.to(rows1.dtype), rows1, acc1 * rescale[:, None], input_precision="ieee")
        if D2 > 0:
            acc2 = tl.dot(weight.to(rows2.dtype), rows2, acc2 * rescale[:, None], input_precision="ieee")
    return row_max, row_sum, acc1, acc2


@triton.jit(do_not_specialize=["num_window", "num_entries"])
def attend_rows(
    q,  # [T, H, D]
    window_cache,  # [ids, P, 1, D]
    entry_cache,  # [ids, P, 1, D]
    window_slots,  # [T, W] int64
    entry_slots,  # [T, K] int64
    sink_logits,  # [H] float32
    out,  # [T, H, D]; with SPLIT [T, splits, H, D] float32
    statistics,  # with SPLIT: [T, splits, H, 2] float32, maximum (base 2) and softmax sum
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
    D1: tl.constexpr,
    D2: tl.constexpr,  # 0: D is D1
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # most slots of a program; 0: all
):
    """Compute the attention of `BLOCK_H` heads of one query. The grid is (T, ceil(num_heads / BLOCK_H), splits).

    Each split is of window slots or of entry slots alone, the window's first.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head, q_rows, d1 = head < num_heads, token * q_stride_t + head * q_stride_h, tl.arange(0, D1)
    q1 = load_queries(q, q_rows, d1, D, is_head, UPCAST)
    acc1 = tl.zeros([BLOCK_H, D1], tl.float32)
    q2, acc2 = q1, acc1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = load_queries(q, q_rows, d2, D, is_head, UPCAST)
        acc2 = tl.zeros([BLOCK_H, D2], tl.float32)
    first_window, first_entry, window_count, entry_count = 0, 0, num_window, num_entries
    at = token * num_heads + head
    if SPLIT > 0:  # `combine` adds the sink
        split, of_window = tl.program_id(2), tl.cdiv(num_window, SPLIT)
        first_window, window_count = split * SPLIT, tl.minimum(num_window - split * SPLIT, SPLIT)  # below 0: none
        first_entry = tl.maximum(split - of_window, 0) * SPLIT
        entry_count = tl.where(split >= of_window, tl.minimum(num_entries - first_entry, SPLIT), 0)
        at = (token * tl.num_programs(2) + split) * num_heads + head
        row_max, row_sum = tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32)
    else:  # The online softmax starts with the sink logit as its maximum, whose weight is 1. It has no value vector.
        row_max = tl.load(sink_logits + head, mask=is_head, other=0.0) * LOG2_E
        row_sum = tl.where(row_max == float("-inf"), 0.0, tl.full([BLOCK_H], 1.0, tl.float32))
    # the window's rows, then the entries
    row_max, row_sum, acc1, acc2 = _attend(
        row_max, row_sum, acc1, acc2, q1, q2, window_cache, window_slots + token * num_window + first_window, window_count,
        window_stride_b, window_stride_p, scale * LOG2_E, D, WINDOW_P, UPCAST, D1, D2, BLOCK_N,
    )  # fmt: skip
    row_max, row_sum, acc1, acc2 = _attend(
        row_max, row_sum, acc1, acc2, q1, q2, entry_cache, entry_slots + token * num_entries + first_entry, entry_count,
        entry_stride_b, entry_stride_p, scale * LOG2_E, D, ENTRY_P, UPCAST, D1, D2, BLOCK_N,
    )  # fmt: skip
    inverse_sum = inverse_of(row_sum)
    if SPLIT > 0:
        tl.store(statistics + at * 2, row_max, mask=is_head)
        tl.store(statistics + at * 2 + 1, row_sum, mask=is_head)
        inverse_sum = tl.full([BLOCK_H], 1.0, tl.float32)
    out_rows = out + at[:, None] * D
    kept1 = is_head[:, None] & (d1 < D)[None, :]
    tl.store(out_rows + d1[None, :], (acc1 * inverse_sum[:, None]).to(out.dtype.element_ty), mask=kept1)
    if D2 > 0:
        kept2 = is_head[:, None] & (d2 < D)[None, :]
        tl.store(out_rows + d2[None, :], (acc2 * inverse_sum[:, None]).to(out.dtype.element_ty), mask=kept2)


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
    num_rounds,  # blocks of BLOCK_N entries per program
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
    """Score `num_rounds * BLOCK_N` entries for one query; unseen entries get -inf. The grid is (T, blocks of entries)."""
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
            entry_score = tl.sum(product * weight[:, None], 0)
            tl.store(row + entry, tl.where(entry < seen_end, entry_score, float("-inf")), mask=entry < num_entries)
    # entries that the query does not see
    unseen = begin + tl.cdiv(tl.maximum(seen_end - begin, 0), BLOCK_N) * BLOCK_N
    for first in range(unseen, end, BLOCK_N):
        tl.store(row + first + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=first + n < num_entries)


@triton.jit
def pool(
    kv_cache,  # [ids, P, 1, G * D] float32
    gate_cache,  # [ids, P, 1, G * D] float32
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
    """Pool `BLOCK_D` channels of one entry. The grid is (E, blocks of channels).

    `BLOCK_R` rows are read at a time, with an online softmax.
    """
    entry = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_D], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, G * R, BLOCK_R):
        place = first + tl.arange(0, BLOCK_R)
        slot = tl.load(slots + entry * (G * R) + place, mask=place < G * R, other=-1)
        kept = (slot >= 0)[:, None] & (d < D)[None, :]
        present_slot, channel = tl.where(slot >= 0, slot, 0), place // R * D
        gate_rows = present_slot // P * gate_stride_b + present_slot % P * gate_stride_p + channel
        kv_rows = present_slot // P * kv_stride_b + present_slot % P * kv_stride_p + channel
        gate = tl.load(gate_cache + gate_rows[:, None] + d[None, :], mask=kept, other=float("-inf"))
        value = tl.load(kv_cache + kv_rows[:, None] + d[None, :], mask=kept, other=0.0)
        bias_rows = place % R * (G * D) + channel
        gate += tl.load(position_bias + bias_rows[:, None] + d[None, :], mask=kept, other=0.0)
        new_max = tl.maximum(row_max, tl.max(gate, 0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale, weight = tl.exp(row_max - finite_max), tl.exp(gate - finite_max[None, :])
        row_sum = row_sum * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(value * weight, 0)
        row_max = new_max
    tl.store(out + entry * D + d, acc / tl.where(row_sum > 0, row_sum, 1.0), mask=d < D)
