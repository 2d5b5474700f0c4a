"""The Triton kernel `attend`: attention of query tiles over a paged KV cache, for decoding and for prompts.

For every query row `m` of a tile and every key `n` that the mask rule lets it see:

    score[m, n] = scale * q[m] . k[n]                      then soft_cap * tanh(score / soft_cap) if there is a soft cap
    out[m]      = sum_n exp(score[m, n]) v[n] / (sum_n exp(score[m, n]) + exp(sink_logit))

The grid is (work items, KV heads): one program computes one work item for one KV head. `work_items.py` defines work items (a tile
of query tokens, or one split of its keys) and has the table of their nine fields. A program

1. reads its work item, and computes each row's position and first visible key;
2. loads the tile's queries;
3. loops over its keys, `BLOCK_N` table indices at a time. Each iteration looks up the blocks, loads keys, computes scores, updates
   the online softmax, loads values, and accumulates. The first loop has the run's inner keys, which every row sees, so it has no
   masks: they would take half of its instructions. The second loop has the sink tokens and the run's edges;
4. if its tile is split, writes a partial result (maximum, sum and weighted values) for the kernel `combine`; otherwise divides by
   the softmax sum and writes the output.

A *table index* is a key's place in the block table (column * P + offset), as opposed to its position in the sequence.

Quantised caches (`quantised_kv`) are multiplied as they are stored: a key's scale multiplies its scores, and a value's scale its
weights, after the weights were added to the softmax sum.

`steps.py` has the softmax. Offsets into the caches are int64, since a cache may be larger than 2 GiB. Sizes that change from step
to step are not specialised, so that a new batch compiles nothing.

Triton's tile widths are powers of two, so a head of another width is computed as two tiles, a power of two and a padded
remainder: 80 is 64 + 16, and 192 is 128 + 64. Variables of the first tile end in 1 (`q1`, `acc1`), those of the second in 2.

Legend: T query tokens, H query heads, KVH KV heads, G query heads per KV head, M rows of a tile (tokens * G: row `m` is token
`m // G` and query head `kv_head * G + m % G`), N keys of an iteration (BLOCK_N), D key width = D1 + D2, E value width = E1 + E2,
P block size in tokens, B sequences, W work items.
"""

import triton
import triton.language as tl

from transom_kernels.paged_attention.triton.steps import add_sink, continue_softmax, finite, inverse_of, load_queries
from transom_kernels.quantised_kv.triton_rows import load_numbers
from transom_kernels.triton_math import LOG2_E, tanh


@triton.jit(do_not_specialize=["table_stride", "num_kv_heads"])
def attend(
    q,  # [T, H, D]
    k_cache,  # [ids, P, KVH, D]
    v_cache,  # [ids, P, KVH, E]
    out,  # [T, H, E]
    partial_out,  # [partials, H, E] float32: weighted values, not yet divided
    partial_stats,  # [partials, H, 2] float32: maximum (base 2) and softmax sum
    items,  # [W, 9] int32: `work_items.py` has the table of fields
    block_table,  # [B, columns] int32
    first_block,  # [B] int32: logical block of the first column after the sink blocks
    attend_from,  # [B] int32: first position whose key may be read; sink tokens are exempt
    sink_logits,  # [H] float32, or unused
    k_scale,  # [ids, P, KVH] float32: scales of quantised keys; or unused
    v_scale,  # [ids, P, KVH] float32: scales of quantised values; or unused
    table_stride,
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
    ks_stride_b,
    ks_stride_p,
    ks_stride_h,
    vs_stride_b,
    vs_stride_p,
    vs_stride_h,
    num_kv_heads,
    num_sink_blocks,  # columns that hold logical blocks 0, 1, ...
    BLOCK_SIZE: tl.constexpr,  # P
    GROUP: tl.constexpr,  # G
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,  # 0: D is D1
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,  # 0: E is E1
    WINDOW: tl.constexpr,  # tokens; 0: no window
    SINKS: tl.constexpr,  # sink tokens
    CHUNK: tl.constexpr,  # tokens of an attention chunk; 0: no chunks
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PACKED: tl.constexpr,  # caches of int4
    UPCAST: tl.constexpr,  # products in float32: for the interpreter, which cannot compute in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one work item for one KV head."""
    # --- the work item ---
    item = items + tl.program_id(0) * 9
    kv_head = tl.program_id(1)
    first_row, num_tokens, first_position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    b = tl.load(item + 3)
    sinks_end, run_begin = tl.load(item + 5), tl.load(item + 6)
    run_end, partial = tl.load(item + 7), tl.load(item + 8)

    # --- positions of the tile's rows, and the first key that each of them sees (`rule.MaskRule.first_key`) ---
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP  # [BLOCK_M], like the following
    head = kv_head * GROUP + m % GROUP
    is_row = token < num_tokens  # the other rows of the tile are padding
    position = first_position + token
    attend_from_b = tl.load(attend_from + b)
    low = tl.full([BLOCK_M], 0, tl.int32) + attend_from_b
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK > 0:
        low = tl.maximum(low, position - position % CHUNK)
    # the tile's keys lie in [tile_low, tile_last], and every row sees those in [common_low, first_position]
    tile_last = first_position + num_tokens - 1
    tile_low = tl.min(tl.where(is_row, low, 2147483647))
    common_low = tl.max(tl.where(is_row, low, 0))

    # --- load queries ---
    d1, e1 = tl.arange(0, D1), tl.arange(0, E1)
    q_rows = (first_row + token).to(tl.int64) * q_stride_t + head * q_stride_h
    q1 = load_queries(q, q_rows, d1, D, is_row, UPCAST)  # [BLOCK_M, D1]
    acc1 = tl.zeros([BLOCK_M, E1], tl.float32)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = load_queries(q, q_rows, d2, D, is_row, UPCAST)  # [BLOCK_M, D2]
    if E2 > 0:
        e2 = E1 + tl.arange(0, E2)
        acc2 = tl.zeros([BLOCK_M, E2], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # of the scores so far, base 2
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # of exp2(score - row_max) so far

    # --- iterations begin at multiples of BLOCK_N, so that each holds whole cache blocks ---
    run_block = tl.load(first_block + b)
    table = block_table + b.to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    run_aligned, run_stop = run_begin // BLOCK_N * BLOCK_N, tl.cdiv(run_end, BLOCK_N) * BLOCK_N
    sink_iterations = tl.cdiv(sinks_end, BLOCK_N)
    # inner tiles [inner_begin, inner_end): of keys that all rows see; `shift` leads from table indices to positions
    run_offset, shift = num_sink_blocks * BLOCK_SIZE, (run_block - num_sink_blocks) * BLOCK_SIZE
    inner_begin = tl.cdiv(tl.maximum(tl.maximum(run_begin, run_offset), common_low - shift), BLOCK_N) * BLOCK_N
    inner_end = tl.minimum(run_end, first_position + 1 - shift) // BLOCK_N * BLOCK_N
    inner_begin = tl.where(inner_begin < inner_end, inner_begin, run_stop)
    inner_end = tl.maximum(inner_begin, inner_end)
    before_inner = sink_iterations + tl.maximum(0, inner_begin - run_aligned) // BLOCK_N
    before_origin, after_origin = run_aligned - sink_iterations * BLOCK_N, inner_end - before_inner * BLOCK_N
    factor = LOG2_E if HAS_SOFT_CAP else scale * LOG2_E  # scores in base 2

    # with large tiles of products from registers, an iteration loads again what it could keep from the one before
    HAS_FEW_REGISTERS: tl.constexpr = BLOCK_M > 32 and BLOCK_N < 64
    # --- loops over keys: the inner tiles; then the edges: sink tokens, and the run before and after the inner tiles ---
    for IS_EDGE in tl.static_range(2):
        indices = before_inner * BLOCK_N + run_stop - inner_end if IS_EDGE else inner_end - inner_begin
        for i in tl.range(0, indices // BLOCK_N, num_stages=2 if IS_EDGE else None, disable_licm=HAS_FEW_REGISTERS):
            # - look up each index's position and physical block -
            if IS_EDGE:
                in_sinks = i < sink_iterations
                begin = tl.where(in_sinks, 0, tl.where(i < before_inner, before_origin, after_origin)) + i * BLOCK_N
                index = begin + n  # [BLOCK_N]
                column, place = index // BLOCK_SIZE, index % BLOCK_SIZE
                logical = tl.where(column < num_sink_blocks, column, run_block + column - num_sink_blocks)
                key = logical * BLOCK_SIZE + place  # [BLOCK_N] position of the key
                in_range = (index < tl.where(in_sinks, sinks_end, run_end)) & (in_sinks | (index >= run_begin))
                kept = in_range & (key <= tile_last) & ((key >= tile_low) | (key < SINKS))
                block = tl.load(table + column, mask=kept, other=0).to(tl.int64)
            else:
                begin = inner_begin + i * BLOCK_N
                if BLOCK_N % BLOCK_SIZE == 0:
                    column, place = begin // BLOCK_SIZE + n // BLOCK_SIZE, n % BLOCK_SIZE
                else:
                    column, place = (begin + n) // BLOCK_SIZE, (begin + n) % BLOCK_SIZE
                kept = n >= 0
                block = tl.load(table + column).to(tl.int64)

            # - load keys, multiply -
            k_rows = block * k_stride_b + place * k_stride_p + kv_head * k_stride_h
            k1 = load_numbers(k_cache, k_rows, 0, D1, D, kept, PACKED)  # [BLOCK_N, D1]
            if UPCAST or k1.dtype != q1.dtype:
                k1 = k1.to(q1.dtype)
            score = tl.dot(q1, tl.trans(k1), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if D2 > 0:
                k2 = load_numbers(k_cache, k_rows, D1, D2, D, kept, PACKED)  # [BLOCK_N, D2]
                if UPCAST or k2.dtype != q2.dtype:
                    k2 = k2.to(q2.dtype)
                score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
            if HAS_SCALES:
                ks = block * ks_stride_b + place * ks_stride_p + kv_head * ks_stride_h
                score *= tl.load(k_scale + ks, mask=kept, other=0.0)[None, :]
            if HAS_SOFT_CAP:
                score = soft_cap * tanh(score * (scale / soft_cap))
            if IS_EDGE:
                visible = (key[None, :] <= position[:, None]) & (
                    (key[None, :] >= low[:, None]) | (key[None, :] < SINKS)
                )
                score = tl.where(visible & kept[None, :], score, float("-inf"))

            # - online softmax: what was accumulated so far is rescaled to the new maximum -
            row_max, row_sum, weight, rescale = continue_softmax(row_max, row_sum, score, factor)  # [BLOCK_M, BLOCK_N]

            # - load values, accumulate -
            v_rows = block * v_stride_b + place * v_stride_p + kv_head * v_stride_h
            v1 = load_numbers(v_cache, v_rows, 0, E1, E, kept, PACKED)  # [BLOCK_N, E1]
            if UPCAST or v1.dtype != q1.dtype:
                v1 = v1.to(q1.dtype)
            if HAS_SCALES:
                vs = block * vs_stride_b + place * vs_stride_p + kv_head * vs_stride_h
                weight *= tl.load(v_scale + vs, mask=kept, other=0.0)[None, :]
            acc1 = tl.dot(weight.to(v1.dtype), v1, acc1 * rescale[:, None], input_precision="ieee")
            if E2 > 0:
                v2 = load_numbers(v_cache, v_rows, E1, E2, E, kept, PACKED)  # [BLOCK_N, E2]
                if UPCAST or v2.dtype != q1.dtype:
                    v2 = v2.to(q1.dtype)
                acc2 = tl.dot(weight.to(v2.dtype), v2, acc2 * rescale[:, None], input_precision="ieee")

    num_heads = num_kv_heads * GROUP
    # --- a split tile: store the partial result for the kernel `combine` ---
    if partial >= 0:
        at = (partial + token).to(tl.int64) * num_heads + head
        tl.store(partial_stats + at * 2, row_max, mask=is_row)
        tl.store(partial_stats + at * 2 + 1, row_sum, mask=is_row)
        place = partial_out + at[:, None] * E
        tl.store(place + e1[None, :], acc1, mask=(e1 < E)[None, :] & is_row[:, None])
        if E2 > 0:
            tl.store(place + e2[None, :], acc2, mask=(e2 < E)[None, :] & is_row[:, None])
        return

    # --- a whole tile: add the sink logit to the softmax sum, divide, store ---
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_logits + head, mask=is_row, other=float("-inf"))
        row_max, row_sum, rescale = add_sink(finite(row_max), row_sum, sink)
        acc1 *= rescale[:, None]
        if E2 > 0:
            acc2 *= rescale[:, None]
    inverse_sum = inverse_of(row_sum)
    out_rows = ((first_row + token).to(tl.int64) * num_heads + head)[:, None] * E
    kept1 = (e1 < E)[None, :] & is_row[:, None]
    tl.store(out + out_rows + e1[None, :], (acc1 * inverse_sum[:, None]).to(out.dtype.element_ty), mask=kept1)
    if E2 > 0:
        kept2 = (e2 < E)[None, :] & is_row[:, None]
        tl.store(out + out_rows + e2[None, :], (acc2 * inverse_sum[:, None]).to(out.dtype.element_ty), mask=kept2)
