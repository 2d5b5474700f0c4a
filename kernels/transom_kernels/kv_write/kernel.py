"""Queries and keys normalised, rotated and written in one pass over a token's projections, values with them, in Triton.

Legend: T tokens, H query heads, KVH heads, D key width, E value width, R rotated width, P block size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import partner, round_to_nearest


@triton.jit
def _prepared(
    rows,  # pointers to heads, [BLOCK_H, 1]
    weight_rows,  # likewise, or unused
    cos,  # pointers to this token's tables
    signed_sin,
    kept,  # [BLOCK_H]
    eps,
    D: tl.constexpr,
    R: tl.constexpr,  # 0: no rotation
    BEGIN: tl.constexpr,  # of what is rotated
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads normalised, rotated, and normalised without a weight, as asked for; float32 [BLOCK_H, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    inside = kept[:, None] & (d < D)[None, :]
    mine = tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        length = tl.rsqrt(tl.sum(mine * mine, 1) / D + eps)[:, None]
        mine *= length
        if HAS_WEIGHT:
            mine *= tl.load(weight_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if R > 0:
        r = d - BEGIN
        is_turned = (r >= 0) & (r < R)
        rotates = inside & is_turned[None, :]
        pair = BEGIN + partner(r, R, INTERLEAVED)
        other = tl.load(rows + pair[None, :], mask=rotates, other=0.0).to(tl.float32)
        if NORM:
            other *= length
            if HAS_WEIGHT:
                other *= tl.load(weight_rows + pair[None, :], mask=rotates, other=0.0).to(tl.float32)
        turn = tl.load(cos + r, mask=is_turned, other=1.0).to(tl.float32)
        cross = tl.load(signed_sin + r, mask=is_turned, other=0.0).to(tl.float32)
        mine = mine * turn[None, :] + other * cross[None, :]
    if NORM_AFTER:
        mine *= tl.rsqrt(tl.sum(mine * mine, 1) / D + eps)[:, None]
    return mine


@triton.jit
def _store(place, values, scale, inside, TO_INTEGER: tl.constexpr, LARGEST: tl.constexpr):
    """Into a cache of the same number format, or of 8 bits (`LARGEST` above 0) under a scale."""
    if LARGEST > 0:
        values = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
        if TO_INTEGER:
            values = round_to_nearest(values)
    tl.store(place, values.to(place.dtype.element_ty), mask=inside)


@triton.jit
def prepare_and_write(
    q,  # [T, H, D], strided
    k,  # [T, KVH, D]
    v,  # [T, KVH, E]
    q_out,  # [T, H, D]
    k_cache,  # [ids, P, KVH, D]
    v_cache,  # [ids, P, KVH, E]
    slots,  # [T] int64; below 0: not written
    cos,  # [T, R], or unused
    signed_sin,
    q_weight,  # [H, D], or unused
    k_weight,  # [KVH, D]
    query_scale,  # [T], or unused
    k_scale,  # [KVH] float32, or unused
    v_scale,
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
    VALUE_NORM: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr,
    TO_INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """`BLOCK_H` heads of one token: first the programs of queries, then of keys, then of values, if there are any."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    KV_PARTS: tl.constexpr = (KVH + BLOCK_H - 1) // BLOCK_H
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    if part < Q_PARTS:
        head = part * BLOCK_H + h
        values = _prepared(
            q + token * q_stride_t + head[:, None] * D, q_weight + head[:, None] * D, cos + token * R, signed_sin + token * R,
            head < H, eps, D, R, BEGIN, INTERLEAVED, NORM, HAS_Q_WEIGHT, NORM_AFTER, BLOCK_D,
        )  # fmt: skip
        if HAS_QUERY_SCALE:
            values *= tl.load(query_scale + token).to(tl.float32)
        inside = (head < H)[:, None] & (d < D)[None, :]
        tl.store(q_out + (token * H + head[:, None]) * D + d[None, :], values.to(q_out.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    is_written = slot + tl.zeros([BLOCK_H], tl.int64) >= 0
    if part < Q_PARTS + KV_PARTS:
        head = (part - Q_PARTS) * BLOCK_H + h
        kept = (head < KVH) & is_written
        keys = _prepared(
            k + token * k_stride_t + head[:, None] * D, k_weight + head[:, None] * D, cos + token * R, signed_sin + token * R,
            head < KVH, eps, D, R, BEGIN, INTERLEAVED, NORM, HAS_K_WEIGHT, NORM_AFTER, BLOCK_D,
        )  # fmt: skip
        place = k_cache + block * k_stride_b + offset * k_stride_p + head[:, None] * k_stride_h + d[None, :]
        scale = tl.load(k_scale + head, mask=head < KVH, other=1.0)[:, None] if LARGEST > 0 else 1.0
        _store(place, keys, scale, kept[:, None] & (d < D)[None, :], TO_INTEGER, LARGEST)
        return
    head = (part - Q_PARTS - KV_PARTS) * BLOCK_H + h
    e = tl.arange(0, BLOCK_E)
    inside = (head < KVH)[:, None] & (e < E)[None, :]
    values = tl.load(v + token * v_stride_t + head[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    if VALUE_NORM:
        values *= tl.rsqrt(tl.sum(values * values, 1) / E + eps)[:, None]
    values *= value_factor
    place = v_cache + block * v_stride_b + offset * v_stride_p + head[:, None] * v_stride_h + e[None, :]
    scale = tl.load(v_scale + head, mask=head < KVH, other=1.0)[:, None] if LARGEST > 0 else 1.0
    _store(place, values, scale, inside & is_written[:, None], TO_INTEGER, LARGEST)
