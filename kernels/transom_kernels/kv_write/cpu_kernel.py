"""The CPU kernel `prepare_and_write`, in numba: norms and rotates queries and keys, scales queries and values, and writes keys and
values into the cache. `cpu.py` launches it.

    q_out[t] = query_scale[t] * hadamard(after(rotate(norm(q[t]))))     a new tensor
    k_cache[slot of t] = hadamard(after(rotate(norm(k[t]))))            norm: RMS norm of each head, with or without a weight
    v_cache[slot of t] = value_factor * norm(v[t])                      after: RMS norm of each head without a weight

Every step is optional. All steps are float32, in a thread's own memory; values are rounded once, where they are stored, and rows of
quantised caches are quantised there. An item is
some heads of one token, in the order query heads, key heads, value heads.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width, R rotated width, P block size in tokens.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from transom_kernels.cpu.rows import make_hadamard, make_inverse_rms, make_rotate
from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    LOAD_SCALAR,
    NUM_BYTES,
    STORE,
    STORE_PART,
    float_of_bits,
    fma,
    lane_sum,
    load_f32,
    load_i64,
    splat,
    sqrt,
    store_f32,
)
from transom_kernels.cpu.work import argument, claim, finish, scratch
from transom_kernels.quantised_kv.cpu_rows import make_quantise_row


def make_prepare_and_write(
    dtype: str, kv_dtype: str, cache_dtype: str, table_dtype: str, weight_dtype: str, interleaved: bool
) -> Any:
    """Arguments; 0 means that a tensor is absent, and strides are in bytes:

     0 q, 1 k, 2 v, 3 q_out, contiguous, 4 k_cache, 5 v_cache, 6 slots [T] int64, below 0: not written,
     7 cos, 8 signed_sin, 9 q_weight [H, D], 10 k_weight [KVH, D], 11 query_scale [T],
    12 H, 13 KVH, 14 heads of v, 15 D, 16 E, 17 R, 18 first rotated element of a head, 19 P, 20 heads of an item,
    21 token stride of q, 22 of k, 23 of v, 24 block, token and head stride of k_cache, 27 of v_cache, 30 row stride of cos,
    31 of signed_sin, 32 norm, 33 norm after rotation, 34 norm of values, 35 value_factor, 36 eps; of quantised caches
    37 k_scale, 38 its block, token and head stride, 41 v_scale, 42 its strides;
    45 width of the Hadamard matrix's blocks, 0: none.
    """
    size, kv_size, weight_size = NUM_BYTES[dtype], NUM_BYTES[kv_dtype], NUM_BYTES[weight_dtype]
    rotate = make_rotate("f32", table_dtype, interleaved=interleaved)
    inverse_rms = make_inverse_rms("f32")
    load_query, load_kv = _make_load(dtype, weight_dtype), _make_load(kv_dtype, weight_dtype)
    multiply_hadamard = make_hadamard()
    store_query, store_cache = _make_store(dtype), _make_cache_store(cache_dtype)
    load_scale = LOAD_SCALAR[dtype]

    @njit(error_model="numpy")
    def turn(arguments, work, token):  # type: ignore[no-untyped-def]
        """Rotate a head in `work`; return the scale of the norm after rotation."""
        if argument(arguments, 17):
            cos = argument(arguments, 7) + token * argument(arguments, 30)
            signed_sin = argument(arguments, 8) + token * argument(arguments, 31)
            rotate(work + argument(arguments, 18) * 4, cos, signed_sin, argument(arguments, 17))
        if argument(arguments, 33):
            return splat(inverse_rms(work, argument(arguments, 15), float_of_bits(argument(arguments, 36))))
        return splat(1.0)

    @njit(error_model="numpy")
    def query(arguments, work, token, head):  # type: ignore[no-untyped-def]
        width, weight = argument(arguments, 15), argument(arguments, 9)
        row = argument(arguments, 0) + token * argument(arguments, 21) + head * width * size
        weight = weight + head * width * weight_size if weight else 0
        load_query(row, work, width, argument(arguments, 32), weight, float_of_bits(argument(arguments, 36)))
        after = turn(arguments, work, token)
        if argument(arguments, 45):
            multiply_hadamard(work, width, argument(arguments, 45))
        scale = splat(1.0)
        if argument(arguments, 11):
            scale = splat(load_scale(argument(arguments, 11) + token * size))
        place = argument(arguments, 3) + (token * argument(arguments, 12) + head) * width * size
        store_query(work, place, width, after, scale)

    @njit(error_model="numpy")
    def key(arguments, work, token, head, block, offset):  # type: ignore[no-untyped-def]
        width, weight = argument(arguments, 15), argument(arguments, 10)
        row = argument(arguments, 1) + token * argument(arguments, 22) + head * width * kv_size
        weight = weight + head * width * weight_size if weight else 0
        load_kv(row, work, width, argument(arguments, 32), weight, float_of_bits(argument(arguments, 36)))
        after = turn(arguments, work, token)
        if argument(arguments, 45):
            multiply_hadamard(work, width, argument(arguments, 45))
        place = argument(arguments, 4) + block * argument(arguments, 24) + offset * argument(arguments, 25)
        scale = argument(arguments, 37) + block * argument(arguments, 38) + offset * argument(arguments, 39)
        scale += head * argument(arguments, 40)
        store_cache(work, place + head * argument(arguments, 26), scale, width, after, splat(1.0))

    @njit(error_model="numpy")
    def value(arguments, work, token, head, block, offset):  # type: ignore[no-untyped-def]
        width = argument(arguments, 16)
        row = argument(arguments, 2) + token * argument(arguments, 23) + head * width * kv_size
        load_kv(row, work, width, argument(arguments, 34), 0, float_of_bits(argument(arguments, 36)))
        place = argument(arguments, 5) + block * argument(arguments, 27) + offset * argument(arguments, 28)
        factor = splat(float_of_bits(argument(arguments, 35)))
        scale = argument(arguments, 41) + block * argument(arguments, 42) + offset * argument(arguments, 43)
        scale += head * argument(arguments, 44)
        store_cache(work, place + head * argument(arguments, 29), scale, width, factor, splat(1.0))

    def prepare_and_write(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            work = scratch(thread)
            heads, kv_heads, per_item = argument(arguments, 12), argument(arguments, 13), argument(arguments, 20)
            all_heads = heads + kv_heads + argument(arguments, 14)
            parts = (all_heads + per_item - 1) // per_item
            token, first = item // parts, item % parts * per_item
            last = min(first + per_item, all_heads)
            for head in range(first, min(last, heads)):
                query(arguments, work, token, head)
            if last > heads:
                slot = load_i64(argument(arguments, 6) + token * 8)
                if slot >= 0:
                    block, offset = slot // argument(arguments, 19), slot % argument(arguments, 19)
                    for head in range(max(first, heads), min(last, heads + kv_heads)):
                        key(arguments, work, token, head - heads, block, offset)
                    for head in range(max(first, heads + kv_heads), last):
                        value(arguments, work, token, head - heads - kv_heads, block, offset)
            finish(thread)
            item = claim(thread)

    return prepare_and_write


def _make_load(dtype: str, weight_dtype: str) -> Any:
    """load_row(row, work, width, norm, weight, eps): copy a head to `work` as float32, and normalise it if `norm`.

    `work` has whole vectors; what is behind the head is 0.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    load_weight, load_weight_part, weight_size = LOAD[weight_dtype], LOAD_PART[weight_dtype], NUM_BYTES[weight_dtype]

    @njit(error_model="numpy")
    def load_row(row, work, width, norm, weight, eps):  # type: ignore[no-untyped-def]
        full, rest = width // 16 * 16, width % 16
        total = splat(0.0)
        for k in range(0, full, 16):
            lanes = load(row + k * size)
            store_f32(work + k * 4, lanes)
            total = fma(lanes, lanes, total)
        if rest:
            lanes = load_part(row + full * size, rest)
            store_f32(work + full * 4, lanes)
            total = fma(lanes, lanes, total)
        if norm:
            scale = splat(1.0 / sqrt(lane_sum(total) / width + eps))
            for k in range(0, full, 16):
                lanes = load_f32(work + k * 4) * scale
                store_f32(work + k * 4, lanes * load_weight(weight + k * weight_size) if weight else lanes)
            if rest:
                lanes = load_f32(work + full * 4) * scale
                if weight:
                    lanes = lanes * load_weight_part(weight + full * weight_size, rest)
                store_f32(work + full * 4, lanes)

    return load_row


def _make_cache_store(stored: str) -> Any:
    """store_row(work, place, scale_place, width, first, second): store work * first * second, quantised or rounded once."""
    if stored not in NUM_BYTES:
        return make_quantise_row(stored)
    store_numbers = _make_store(stored)

    @njit(error_model="numpy")
    def store_row(work, place, scale_place, width, first, second):  # type: ignore[no-untyped-def]
        store_numbers(work, place, width, first, second)

    return store_row


def _make_store(dtype: str) -> Any:
    """store_row(work, place, width, first, second): store work * first * second, rounded once."""
    store, store_part, size = STORE[dtype], STORE_PART[dtype], NUM_BYTES[dtype]

    @njit(error_model="numpy")
    def store_row(work, place, width, first, second):  # type: ignore[no-untyped-def]
        full, rest = width // 16 * 16, width % 16
        for k in range(0, full, 16):
            store(place + k * size, load_f32(work + k * 4) * first * second)
        if rest:
            store_part(place + full * size, load_f32(work + full * 4) * first * second, rest)

    return store_row
