"""The CPU kernel `prepare_and_write`, in numba: norms and rotates queries and keys, scales queries and values, and writes keys and
values into the cache. `cpu.py` launches it.

    q_out[t] = query_scale[t] * hadamard(after(rotate(norm(q[t]))))     a new tensor
    k_cache[slot of t] = hadamard(after(rotate(norm(k[t]))))            norm: RMS norm of each head, with or without a weight
    v_cache[slot of t] = value_factor * norm(v[t])                      after: RMS norm of each head without a weight

Every step is optional. All steps compute in float32, in a thread's own memory. Results are rounded once, or quantised for quantised
caches, when they are stored. A work item is a group of one token's heads, in the order query, key and value heads.

Legend: H query heads, KVH KV heads.
"""

from typing import Any

from transom_kernels.cpu.rows import make_hadamard, make_inverse_rms, make_rotate
from transom_kernels.cpu.simd import (
    LOAD_LANES,
    LOAD_SCALAR,
    NUM_BYTES,
    STORE_LANES,
    float_of_bits,
    fma,
    lane_sum,
    load_f32,
    load_i64,
    splat,
    sqrt,
    store_f32,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.kv_write.cpu import AT
from transom_kernels.quantised_kv.cpu_rows import cache_address, make_quantise_row


def make_prepare_and_write(
    dtype: str, kv_dtype: str, cache_dtype: str, table_dtype: str, weight_dtype: str, interleaved: bool
) -> Any:
    """Build the kernel for queries of `dtype`, keys and values of `kv_dtype`, and a cache that is stored as `cache_dtype`."""
    size, kv_size = NUM_BYTES[dtype], NUM_BYTES[kv_dtype]
    load_query, load_kv = _make_load(dtype, weight_dtype), _make_load(kv_dtype, weight_dtype)
    prepare_query = _make_prepare(load_query, dtype, table_dtype, weight_dtype, interleaved)
    prepare_key = _make_prepare(load_kv, kv_dtype, table_dtype, weight_dtype, interleaved)
    store_query, store_cache = _make_store(dtype), _make_cache_store(cache_dtype)
    load_scale = LOAD_SCALAR[dtype]

    @helper
    def query(arguments, work, token, head):
        after = prepare_query(arguments, work, token, head, AT.q, AT.q_weight)
        scale = splat(1.0)
        if argument(arguments, AT.query_scale):
            scale = splat(load_scale(argument(arguments, AT.query_scale) + token * size))
        width = argument(arguments, AT.width)
        place = argument(arguments, AT.q_out) + (token * argument(arguments, AT.heads) + head) * width * size
        store_query(work, place, width, after, scale)

    @helper
    def key(arguments, work, token, head, block, offset):
        after = prepare_key(arguments, work, token, head, AT.k, AT.k_weight)
        place = cache_address(arguments, AT.keys, block, offset, head)
        scale_place = cache_address(arguments, AT.key_scales, block, offset, head)
        store_cache(work, place, scale_place, argument(arguments, AT.width), after, splat(1.0))

    @helper
    def value(arguments, work, token, head, block, offset):
        width, eps = argument(arguments, AT.value_width), float_of_bits(argument(arguments, AT.eps))
        row = row_address(arguments, AT.v, token) + head * width * kv_size
        load_kv(row, work, width, argument(arguments, AT.value_norm), 0, eps)
        factor = splat(float_of_bits(argument(arguments, AT.value_factor)))
        place = cache_address(arguments, AT.values, block, offset, head)
        scale_place = cache_address(arguments, AT.value_scales, block, offset, head)
        store_cache(work, place, scale_place, width, factor, splat(1.0))

    @each_item
    def prepare_and_write(arguments, thread, item):
        work = scratch(thread)
        heads, kv_heads = argument(arguments, AT.heads), argument(arguments, AT.kv_heads)
        all_heads = heads + kv_heads + argument(arguments, AT.value_heads)
        per_item = argument(arguments, AT.heads_per_item)
        parts = (all_heads + per_item - 1) // per_item
        token, first = item // parts, item % parts * per_item
        last = min(first + per_item, all_heads)
        for head in range(first, min(last, heads)):
            query(arguments, work, token, head)
        if last > heads:
            slot = load_i64(argument(arguments, AT.slots) + token * 8)
            if slot >= 0:
                block_size = argument(arguments, AT.block_size)
                block, offset = slot // block_size, slot % block_size
                for head in range(max(first, heads), min(last, heads + kv_heads)):
                    key(arguments, work, token, head - heads, block, offset)
                for head in range(max(first, heads + kv_heads), last):
                    value(arguments, work, token, head - heads - kv_heads, block, offset)

    return prepare_and_write


def _make_prepare(load_row: Any, dtype: str, table_dtype: str, weight_dtype: str, interleaved: bool) -> Any:
    """Build prepare(arguments, work, token, head, rows, weights), which norms and rotates a query or key head into `work`.

    `rows` and `weights` are the numbers of their argument words. `prepare` returns the factor of the norm after rotation, by which
    the store then multiplies the head: the Hadamard product in between is linear, so the factor may come last.
    """
    size, weight_size = NUM_BYTES[dtype], NUM_BYTES[weight_dtype]
    rotate = make_rotate("f32", table_dtype, interleaved=interleaved)
    inverse_rms, multiply_hadamard = make_inverse_rms("f32"), make_hadamard()

    @helper
    def prepare(arguments, work, token, head, rows, weights):
        width, eps = argument(arguments, AT.width), float_of_bits(argument(arguments, AT.eps))
        row = row_address(arguments, rows, token) + head * width * size
        weight = argument(arguments, weights)
        weight = weight + head * width * weight_size if weight else 0
        load_row(row, work, width, argument(arguments, AT.norm), weight, eps)
        if argument(arguments, AT.rotated):
            cos, signed_sin = row_address(arguments, AT.cos, token), row_address(arguments, AT.signed_sin, token)
            rotate(work + argument(arguments, AT.first_rotated) * 4, cos, signed_sin, argument(arguments, AT.rotated))
        after = splat(1.0)
        if argument(arguments, AT.norm_after):
            after = splat(inverse_rms(work, width, eps))
        if argument(arguments, AT.hadamard_block):
            multiply_hadamard(work, width, argument(arguments, AT.hadamard_block))
        return after

    return prepare


def _make_load(dtype: str, weight_dtype: str) -> Any:
    """Build load_row(row, work, width, norm, weight, eps), which copies a head to `work` as float32 and normalises it if `norm`.

    `work` is a whole number of 16-lane vectors; the lanes after the head are 0.
    """
    load, size = LOAD_LANES[dtype], NUM_BYTES[dtype]
    load_weight, weight_size = LOAD_LANES[weight_dtype], NUM_BYTES[weight_dtype]

    @helper
    def load_row(row, work, width, norm, weight, eps):
        total = splat(0.0)
        for k in range(0, width, 16):
            lanes = load(row + k * size, width - k)
            store_f32(work + k * 4, lanes)
            total = fma(lanes, lanes, total)
        if norm:
            scale = splat(1.0 / sqrt(lane_sum(total) / width + eps))
            for k in range(0, width, 16):
                lanes = load_f32(work + k * 4) * scale
                if weight:
                    lanes = lanes * load_weight(weight + k * weight_size, width - k)
                store_f32(work + k * 4, lanes)

    return load_row


def _make_cache_store(stored: str) -> Any:
    """Build store_row(work, place, scale_place, width, first, second): it stores work * first * second, quantised or rounded."""
    if stored not in NUM_BYTES:
        return make_quantise_row(stored)
    store_numbers = _make_store(stored)

    @helper
    def store_row(work, place, scale_place, width, first, second):
        store_numbers(work, place, width, first, second)

    return store_row


def _make_store(dtype: str) -> Any:
    """Build store_row(work, place, width, first, second), which stores work * first * second, rounded once."""
    store, size = STORE_LANES[dtype], NUM_BYTES[dtype]

    @helper
    def store_row(work, place, width, first, second):
        for k in range(0, width, 16):
            store(place + k * size, load_f32(work + k * 4) * first * second, width - k)

    return store_row
