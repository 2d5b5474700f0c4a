"""The Triton kernel `prepare_and_write`: norms and rotates queries and keys, scales values, and writes keys and values into the
cache.

    q_out[t] = query_scale[t] * hadamard(after(rotate(norm(q[t]))))     a new tensor
    k_cache[slot of t] = hadamard(after(rotate(norm(k[t]))))            norm: RMS norm of each head, with or without a weight
    v_cache[slot of t] = value_factor * norm(v[t])                      after: RMS norm of each head without a weight

Every step is optional (constexpr flags). All steps compute in float32. Results are rounded once, or quantised for quantised caches,
when they are stored. The grid is (T, blocks of heads): the first programs of a token compute its query heads, the
next ones its key heads, the last ones its value heads, `BLOCK_H` heads each.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width, R rotated width, P block size in tokens.
"""

import triton
import triton.language as tl

from transom_kernels.quantised_kv.triton_rows import store_quantised
from transom_kernels.triton_math import multiply_hadamard, partner


@triton.jit
def _prepared(
    rows,  # pointers to heads, [BLOCK_H, 1]
    weight_rows,  # pointers to the heads' weights, [BLOCK_H, 1], or unused
    cos,  # pointers to this token's rows of the tables
    signed_sin,
    kept,  # [BLOCK_H]: heads that exist
    eps,
    D: tl.constexpr,
    R: tl.constexpr,  # 0: no rotation
    BEGIN: tl.constexpr,  # first rotated element of a head
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,  # log2 of the Hadamard matrix's blocks; 0: no matrix
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return heads, float32 [BLOCK_H, BLOCK_D], after the steps that flags name: norm, rotation, second norm, Hadamard matrix."""
    d = tl.arange(0, BLOCK_D)
    inside = kept[:, None] & (d < D)[None, :]
    value = tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    # RMS norm
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= inverse_rms
        if HAS_WEIGHT:
            value *= tl.load(weight_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    # rotation: each element with its partner, which is loaded and normed a second time
    if R > 0:
        r = d - BEGIN
        is_rotated = (r >= 0) & (r < R)
        rotates = inside & is_rotated[None, :]
        pair = BEGIN + partner(r, R, INTERLEAVED)
        other = tl.load(rows + pair[None, :], mask=rotates, other=0.0).to(tl.float32)
        if NORM:
            other *= inverse_rms
            if HAS_WEIGHT:
                other *= tl.load(weight_rows + pair[None, :], mask=rotates, other=0.0).to(tl.float32)
        cosine = tl.load(cos + r, mask=is_rotated, other=1.0).to(tl.float32)
        sine = tl.load(signed_sin + r, mask=is_rotated, other=0.0).to(tl.float32)
        value = value * cosine[None, :] + other * sine[None, :]
    if NORM_AFTER:
        value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    if LOG_HADAMARD > 0:
        value = multiply_hadamard(value, BLOCK_H, BLOCK_D, LOG_HADAMARD)
    return value


@triton.jit
def prepare_and_write(
    q,  # [T, H, D], strided
    k,  # [T, KVH, D]
    v,  # [T, KVH, E]
    q_out,  # [T, H, D]
    k_cache,  # [ids, P, KVH, D]
    v_cache,  # [ids, P, KVH, E]
    slots,  # [T] int64: block * P + offset; below 0: not written
    cos,  # [T, R], or unused
    signed_sin,  # [T, R], or unused: the sine, negated for the first element of each pair
    q_weight,  # [H, D], or unused
    k_weight,  # [KVH, D]
    query_scale,  # [T], or unused
    k_scale,  # [ids, P, KVH] float32: scales of quantised keys, or unused
    v_scale,  # [ids, P, KVH] float32, or unused
    value_factor,
    eps,
    q_stride_t,
    k_stride_t,
    v_stride_t,
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
    BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_Q_WEIGHT: tl.constexpr,
    HAS_K_WEIGHT: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr,
    TO_INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,  # of a quantised cache's format; 0: the cache is not quantised
    PACKED: tl.constexpr,  # int4
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Compute `BLOCK_H` query heads, key heads or value heads of one token; the module's docstring has the formulas."""
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KVH + BLOCK_H - 1) // BLOCK_H
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    # --- query heads ---
    if head_block < Q_BLOCKS:
        head = head_block * BLOCK_H + h
        values = _prepared(
            q + token * q_stride_t + head[:, None] * D, q_weight + head[:, None] * D, cos + token * R, signed_sin + token * R,
            head < H, eps, D, R, BEGIN, INTERLEAVED, NORM, HAS_Q_WEIGHT, NORM_AFTER, LOG_HADAMARD, BLOCK_H,
            BLOCK_D,
        )  # fmt: skip
        if HAS_QUERY_SCALE:
            values *= tl.load(query_scale + token).to(tl.float32)
        inside = (head < H)[:, None] & (d < D)[None, :]
        tl.store(q_out + (token * H + head[:, None]) * D + d[None, :], values.to(q_out.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    is_written = slot + tl.zeros([BLOCK_H], tl.int64) >= 0

    # --- key heads ---
    if head_block < Q_BLOCKS + KV_BLOCKS:
        head = (head_block - Q_BLOCKS) * BLOCK_H + h
        kept = (head < KVH) & is_written
        keys = _prepared(
            k + token * k_stride_t + head[:, None] * D, k_weight + head[:, None] * D, cos + token * R, signed_sin + token * R,
            head < KVH, eps, D, R, BEGIN, INTERLEAVED, NORM, HAS_K_WEIGHT, NORM_AFTER, LOG_HADAMARD, BLOCK_H,
            BLOCK_D,
        )  # fmt: skip
        k_rows = block * k_stride_b + offset * k_stride_p + head * k_stride_h
        if LARGEST > 0:
            places = block * ks_stride_b + offset * ks_stride_p + head * ks_stride_h
            store_quantised(
                k_cache, k_scale, k_rows, places, keys, d < D, kept, LARGEST, TO_INTEGER, PACKED, BLOCK_D
            )  # fmt: skip
        else:
            place = k_cache + k_rows[:, None] + d[None, :]
            tl.store(place, keys.to(k_cache.dtype.element_ty), mask=kept[:, None] & (d < D)[None, :])
        return

    # --- value heads ---
    head = (head_block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + h
    e = tl.arange(0, BLOCK_E)
    inside = (head < KVH)[:, None] & (e < E)[None, :]
    values = tl.load(v + token * v_stride_t + head[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    if VALUE_NORM:
        values *= tl.rsqrt(tl.sum(values * values, 1) / E + eps)[:, None]
    values *= value_factor
    v_rows = block * v_stride_b + offset * v_stride_p + head * v_stride_h
    kept = (head < KVH) & is_written
    if LARGEST > 0:
        places = block * vs_stride_b + offset * vs_stride_p + head * vs_stride_h
        store_quantised(v_cache, v_scale, v_rows, places, values, e < E, kept, LARGEST, TO_INTEGER, PACKED, BLOCK_E)
    else:
        place = v_cache + v_rows[:, None] + e[None, :]
        tl.store(place, values.to(v_cache.dtype.element_ty), mask=kept[:, None] & (e < E)[None, :])
