"""The Triton kernels of `policy_attention`: `attend_rows`, and `add_mass` (of `add_block_mass`).

`attend_rows`: a program computes a tile, a group of query tokens of one sequence with the query heads of one KV head. It loops over
the table's keys, BLOCK_N table indices at a time, skips keys that none of its rows sees, and keeps an online softmax in base 2.
`add_mass`: a program adds up the attention probabilities of one column of one table, over all rows and heads of the sequence.

A *table index* is a key's place in the compact table (column * P + offset); `key_blocks` gives its position. Heads whose width is
not a power of two are padded. Rows of quantised caches are multiplied as they are stored: a key's scale multiplies its scores, and
a value's scale its weights, after the weights were added to the softmax sum.

Legend: T query tokens, H query heads, KVH KV heads, G query heads per KV head, M rows of a tile (tokens * G: row `m` is token
`m // G` and query head `kv_head * G + m % G`), N keys of an iteration, D key width, E value width, P block size in tokens, B
sequences, W tiles.
"""

import triton
import triton.language as tl

from transom_kernels.paged_attention.triton.steps import add_sink, continue_softmax, finite, inverse_of, load_queries
from transom_kernels.quantised_kv.triton_rows import load_numbers
from transom_kernels.triton_math import LOG2_E, tanh


@triton.jit
def _sees(key, position, window, sinks):
    """Return the mask [M, N] of the keys [N] that queries at `position` [M] see."""
    recent = key[None, :] > position[:, None] - window
    return (key[None, :] <= position[:, None]) & (recent | (key[None, :] < sinks))


@triton.jit
def _load_window(window, b):
    """Return a sequence's window in tokens; the largest int32 if it has none."""
    tokens = tl.load(window + b)
    return tl.where(tokens > 0, tokens, 2147483647)


@triton.jit
def _scores(
    queries, sink_queries, keys, key_scales, key, sinks, scale, soft_cap,
    HAS_SOFT_CAP: tl.constexpr, HAS_SINK_QUERY: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Return scores [M, N] in base 2 of queries [M, D] and keys [N, D]; keys below `sinks` are multiplied with `sink_queries`.

    Keys of a quantised cache have scales [N].
    """
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if HAS_SINK_QUERY:
        sink_score = tl.dot(sink_queries, tl.trans(keys), input_precision="ieee")
        score = tl.where((key < sinks)[None, :], sink_score, score)
    score *= scale
    if HAS_SCALES:
        score *= key_scales[None, :]
    if HAS_SOFT_CAP:
        score = soft_cap * tanh(score / soft_cap)
    return score * LOG2_E


@triton.jit(do_not_specialize=["table_stride", "num_kv_heads"])
def attend_rows(
    q,  # [T, H, D]
    sink_q,  # [T, H, D] queries for the sink tokens, strides as q's; or unused
    k_cache,  # [ids, P, KVH, D]
    v_cache,  # [ids, P, KVH, E]
    out,  # [T, H, E]
    statistics,  # [T, H, 2] float32; or unused
    tiles,  # [W, 3] int32: sequence, first row, number of tokens
    block_table,  # [B, columns] int32
    key_blocks,  # [B, columns] int32
    num_columns,  # [B] int32
    window,  # [B] int32
    sinks,  # [B] int32
    start,  # [B] int32
    query_offset,  # [B + 1] int32
    sink_logits,  # [H] float32; or unused
    k_scale,  # [ids, P, KVH] float32: scales of quantised keys; or unused
    v_scale,  # [ids, P, KVH] float32: scales of quantised values; or unused
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
    table_stride,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,  # P
    GROUP: tl.constexpr,  # G
    D: tl.constexpr,
    E: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    HAS_SINK_QUERY: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PACKED: tl.constexpr,  # caches of int4
    WRITES_STATISTICS: tl.constexpr,
    UPCAST: tl.constexpr,  # products in float32: for the interpreter, which cannot compute in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Compute one tile for one KV head."""
    tile, kv_head = tiles + tl.program_id(0) * 3, tl.program_id(1)
    b, first_row, num_tokens = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    window_b, sinks_b = _load_window(window, b), tl.load(sinks + b)

    # --- the tile's rows and queries ---
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP  # [BLOCK_M], like the following
    head = kv_head * GROUP + m % GROUP
    is_row = token < num_tokens
    position = tl.load(start + b) + first_row - tl.load(query_offset + b) + token
    last = tl.load(start + b) + first_row - tl.load(query_offset + b) + num_tokens - 1
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_rows = (first_row + token).to(tl.int64) * q_stride_t + head * q_stride_h
    queries = load_queries(q, q_rows, d, D, is_row, UPCAST)  # [BLOCK_M, BLOCK_D]
    sink_queries = queries
    if HAS_SINK_QUERY:
        sink_queries = load_queries(sink_q, q_rows, d, D, is_row, UPCAST)

    # --- loop over the table ---
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    table, blocks = block_table + b.to(tl.int64) * table_stride, key_blocks + b.to(tl.int64) * table_stride
    num_indices = tl.load(num_columns + b) * BLOCK_SIZE
    for begin in range(0, num_indices, BLOCK_N):
        index = begin + tl.arange(0, BLOCK_N)
        column = index // BLOCK_SIZE
        key = tl.load(blocks + column, mask=index < num_indices, other=0) * BLOCK_SIZE + index % BLOCK_SIZE
        seen_by_first = (key > last - num_tokens + 1 - window_b) | (key < sinks_b)
        readable = (index < num_indices) & (key <= last) & seen_by_first  # some row of the tile may see the key
        if tl.max(readable.to(tl.int32)) > 0:
            block = tl.load(table + column, mask=readable, other=0).to(tl.int64)
            place = index % BLOCK_SIZE
            k_rows = block * k_stride_b + place * k_stride_p + kv_head * k_stride_h
            keys = load_numbers(k_cache, k_rows, 0, BLOCK_D, D, readable, PACKED).to(
                queries.dtype
            )  # [BLOCK_N, BLOCK_D]
            key_scales = scale
            if HAS_SCALES:
                ks = block * ks_stride_b + place * ks_stride_p + kv_head * ks_stride_h
                key_scales = tl.load(k_scale + ks, mask=readable, other=0.0)  # [BLOCK_N]
            score = _scores(
                queries, sink_queries, keys, key_scales, key, sinks_b, scale, soft_cap,
                HAS_SOFT_CAP, HAS_SINK_QUERY, HAS_SCALES,
            )  # fmt: skip
            visible = _sees(key, position, window_b, sinks_b) & readable[None, :] & is_row[:, None]
            score = tl.where(visible, score, float("-inf"))
            row_max, row_sum, weight, rescale = continue_softmax(row_max, row_sum, score)
            v_rows = block * v_stride_b + place * v_stride_p + kv_head * v_stride_h
            values = load_numbers(v_cache, v_rows, 0, BLOCK_E, E, readable, PACKED).to(
                queries.dtype
            )  # [BLOCK_N, BLOCK_E]
            if HAS_SCALES:
                vs = block * vs_stride_b + place * vs_stride_p + kv_head * vs_stride_h
                weight *= tl.load(v_scale + vs, mask=readable, other=0.0)[None, :]
            acc = tl.dot(weight.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")

    # --- add the sink logit to the softmax sum, divide, store ---
    row_max = finite(row_max)
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_logits + head, mask=is_row, other=float("-inf"))
        row_max, row_sum, rescale = add_sink(row_max, row_sum, sink)
        acc *= rescale[:, None]
    inverse_sum = inverse_of(row_sum)
    rows = (first_row + token).to(tl.int64) * (num_kv_heads * GROUP) + head
    kept = (e < E)[None, :] & is_row[:, None]
    tl.store(out + rows[:, None] * E + e[None, :], (acc * inverse_sum[:, None]).to(out.dtype.element_ty), mask=kept)
    if WRITES_STATISTICS:
        tl.store(statistics + rows * 2, row_max, mask=is_row)
        tl.store(statistics + rows * 2 + 1, row_sum, mask=is_row)


@triton.jit(do_not_specialize=["table_stride", "num_kv_heads"])
def add_mass(
    mass,  # [B, columns] float32
    q,  # [T, H, D]
    sink_q,  # [T, H, D] queries for the sink tokens, strides as q's; or unused
    k_cache,  # [ids, P, KVH, D]
    statistics,  # [T, H, 2] float32
    block_table,  # [B, columns] int32
    key_blocks,  # [B, columns] int32
    num_columns,  # [B] int32
    window,  # [B] int32
    sinks,  # [B] int32
    start,  # [B] int32
    query_offset,  # [B + 1] int32
    k_scale,  # [ids, P, KVH] float32: scales of quantised keys; or unused
    scale,
    soft_cap,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_p,
    k_stride_h,
    ks_stride_b,
    ks_stride_p,
    ks_stride_h,
    table_stride,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,  # P
    GROUP: tl.constexpr,  # G
    D: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINK_QUERY: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PACKED: tl.constexpr,  # caches of int4
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # P, padded
    BLOCK_D: tl.constexpr,
):
    """Add to mass[b, column] the probabilities 2 ** (score - maximum) / sum of the column's keys, over all rows and heads.

    The grid is (B, columns).
    """
    b, column = tl.program_id(0), tl.program_id(1)
    if column >= tl.load(num_columns + b):
        return
    place = b.to(tl.int64) * table_stride + column
    block = tl.load(block_table + place).to(tl.int64)
    window_b, sinks_b = _load_window(window, b), tl.load(sinks + b)
    first_row, end_row = tl.load(query_offset + b), tl.load(query_offset + b + 1)
    offset = tl.arange(0, BLOCK_N)
    key = tl.load(key_blocks + place) * BLOCK_SIZE + offset
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    last = tl.load(start + b) + end_row - first_row - 1
    readable = (offset < BLOCK_SIZE) & (key <= last)  # slots after the last row's key may hold anything
    total = tl.zeros([BLOCK_N], tl.float32)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    KEY_TYPE: tl.constexpr = tl.float32 if UPCAST else q.dtype.element_ty
    for kv_head in range(0, num_kv_heads):
        k_rows = block * k_stride_b + offset * k_stride_p + kv_head * k_stride_h
        keys = load_numbers(k_cache, k_rows, 0, BLOCK_D, D, readable, PACKED).to(KEY_TYPE)  # [BLOCK_N, BLOCK_D]
        key_scales = scale
        if HAS_SCALES:
            ks = block * ks_stride_b + offset * ks_stride_p + kv_head * ks_stride_h
            key_scales = tl.load(k_scale + ks, mask=readable, other=0.0)  # [BLOCK_N]
        for tile_row in range(first_row, end_row, TOKENS):
            row = tile_row + m // GROUP  # [BLOCK_M]
            is_row = (row < end_row) & (m < TOKENS * GROUP)
            head = kv_head * GROUP + m % GROUP
            q_rows = row.to(tl.int64) * q_stride_t + head * q_stride_h
            queries = load_queries(q, q_rows, d, D, is_row, UPCAST)
            sink_queries = queries
            if HAS_SINK_QUERY:
                sink_queries = load_queries(sink_q, q_rows, d, D, is_row, UPCAST)
            score = _scores(
                queries, sink_queries, keys, key_scales, key, sinks_b, scale, soft_cap,
                HAS_SOFT_CAP, HAS_SINK_QUERY, HAS_SCALES,
            )  # fmt: skip
            position = tl.load(start + b) + row - first_row
            visible = _sees(key, position, window_b, sinks_b) & readable[None, :] & is_row[:, None]
            at = statistics + (row.to(tl.int64) * (num_kv_heads * GROUP) + head) * 2
            row_max = tl.load(at, mask=is_row, other=0.0)
            row_sum = tl.load(at + 1, mask=is_row, other=1.0)
            inverse = 1.0 / tl.where(row_sum > 0, row_sum, 1.0)
            share = tl.exp2(tl.where(visible, score - row_max[:, None], float("-inf"))) * inverse[:, None]
            total += tl.sum(share, 0)
    tl.store(mass + place, tl.load(mass + place) + tl.sum(total, 0))
