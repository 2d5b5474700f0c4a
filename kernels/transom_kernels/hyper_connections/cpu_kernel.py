"""Hyper-connections for CPUs, in numba. `op.py` has the formulas, `cpu.py` launches the kernels.

Sums over streams and over a row are in one order, so a token does not depend on the others.

Legend: T tokens, S residual streams (up to 16), N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.row_products import make_row_products
from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    ROUND,
    STORE,
    STORE_PART,
    exp,
    float_of_bits,
    fma,
    keep_nan,
    keep_part,
    lane_max,
    lane_sum,
    load_f32,
    load_part_f32,
    load_scalar_f32,
    sigmoid,
    splat,
    sqrt,
    store_f32,
    store_part_f32,
    store_scalar_f32,
)
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, claim, finish, helper, scratch

_ROW = 4 * LANES  # bytes of a row of coefficients in scratch


def make_normalise_streams(dtype: str) -> Any:
    """An item is one stream of a token, and reads all of the token's streams.

    Arguments: x [T, S, N], out [T, S, N] float32, S, N, x's token stride and stream stride in bytes, eps.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    inverse_rms = _make_inverse_rms(dtype)

    def normalise_streams(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            streams, width, stream_stride = argument(arguments, 2), argument(arguments, 3), argument(arguments, 5)
            token = argument(arguments, 0) + item // streams * argument(arguments, 4)
            factor = splat(inverse_rms(token, streams, width, stream_stride, float_of_bits(argument(arguments, 6))))
            x, out = token + item % streams * stream_stride, argument(arguments, 1) + item * width * 4
            for n in range(0, width - LANES + 1, LANES):
                store_f32(out + 4 * n, load(x + n * size) * factor)
            rest = width % LANES
            if rest:
                n = width - rest
                store_part_f32(out + 4 * n, load_part(x + n * size, rest) * factor, rest)
            finish(thread)
            item = claim(thread)

    return normalise_streams


def make_project_streams(dtype: str, tile_size: int) -> Any:
    """An item is a tile of tokens and of coefficients; tokens change first.

    Arguments: x [T, S, N], weight [M, S N] float32, out [T, M] float32, T, S, N, M, x's token stride and stream stride in bytes,
    eps. Scratch: S tiles of products.
    """
    inverse_rms, products = _make_inverse_rms(dtype), make_row_products(dtype, tile_size)

    def project_streams(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            tokens, streams = argument(arguments, 3), argument(arguments, 4)
            width, coefficients = argument(arguments, 5), argument(arguments, 6)
            token_stride, stream_stride = argument(arguments, 7), argument(arguments, 8)
            tiles = (tokens + tile_size - 1) // tile_size
            first, column = item % tiles * tile_size, item // tiles * tile_size
            rows, columns = min(tile_size, tokens - first), min(tile_size, coefficients - column)
            x, sums, sum_bytes = argument(arguments, 0) + first * token_stride, scratch(thread), 4 * tile_size**2
            weight = argument(arguments, 1) + column * streams * width * 4
            for stream in range(streams):
                products(
                    x + stream * stream_stride, token_stride, rows - 1, weight + stream * width * 4,
                    streams * width * 4, columns - 1, width, sums + stream * sum_bytes, 4 * tile_size,
                )  # fmt: skip
            for row in range(rows):
                eps = float_of_bits(argument(arguments, 9))
                factor = inverse_rms(x + row * token_stride, streams, width, stream_stride, eps)
                out = argument(arguments, 2) + ((first + row) * coefficients + column) * 4
                for index in range(columns):
                    total = 0.0
                    for stream in range(streams):
                        total += load_scalar_f32(sums + stream * sum_bytes + 4 * (row * tile_size + index))
                    store_scalar_f32(out + 4 * index, total * factor)
            finish(thread)
            item = claim(thread)

    return project_streams


def _make_inverse_rms(dtype: str) -> Any:
    """inverse_rms(token, S, N, stream stride, eps) over all streams of a token."""
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]

    @helper
    def inverse_rms(token, streams, width, stream_stride, eps):  # type: ignore[no-untyped-def]
        total = splat(0.0)
        for stream in range(streams):
            x = token + stream * stream_stride
            for n in range(0, width - LANES + 1, LANES):
                lanes = load(x + n * size)
                total = fma(lanes, lanes, total)
            rest = width % LANES
            if rest:
                lanes = load_part(x + (width - rest) * size, rest)
                total = fma(lanes, lanes, total)
        return 1.0 / sqrt(lane_sum(total) / (streams * width) + eps)

    return inverse_rms


@helper
def _coefficients(projected, scale, base, at, count):  # type: ignore[no-untyped-def]
    """projected * scale + base of `count` coefficients from `at` on."""
    product = load_part_f32(projected + 4 * at, count) * load_part_f32(scale + 4 * at, count)
    return product + load_part_f32(base + 4 * at, count)


@helper
def _balanced_mix(rows, projected, scale, base, size, rounds, eps):  # type: ignore[no-untyped-def]
    """Write the mixing matrix to `rows`: softmax over targets, then Sinkhorn's iteration, columns first and last."""
    for row in range(size):
        logits = keep_part(_coefficients(projected, scale, base, (2 + row) * size, size), size, float("-inf"))
        below = logits - splat(lane_max(logits))
        shares = keep_part(keep_nan(exp(below), below), size, 0.0)
        store_f32(rows + row * _ROW, keep_part(shares / splat(lane_sum(shares)) + splat(eps), size, 0.0))
    for turn in range(2 * rounds - 1):
        if turn % 2 == 0:
            total = splat(0.0)
            for row in range(size):
                total = total + load_f32(rows + row * _ROW)
            divisor = keep_part(total + splat(eps), size, 1.0)
            for row in range(size):
                store_f32(rows + row * _ROW, load_f32(rows + row * _ROW) / divisor)
        else:
            for row in range(size):
                values = load_f32(rows + row * _ROW)
                store_f32(rows + row * _ROW, values / splat(lane_sum(values) + eps))


def make_pre_and_mix(dtype: str, chunk: int) -> Any:
    """An item is `chunk` elements of a token's input; in a sublayer a token's first item is its post and mix instead.

    Arguments: x [T, S, N], projected [T, M], scale [M], base [M], out [T, N], post [T, S] or 0, mix [T, S, S] or 0, S, N, M, x's
    token stride and stream stride in bytes, rounds of Sinkhorn's iteration, eps. Scratch: S + 1 rows of 16 float32.
    """
    load, load_part, store, store_part = LOAD[dtype], LOAD_PART[dtype], STORE[dtype], STORE_PART[dtype]
    bytes_ = NUM_BYTES[dtype]

    def pre_and_mix(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            size, width = argument(arguments, 7), argument(arguments, 8)
            post, mix = argument(arguments, 5), argument(arguments, 6)
            mixes = 1 if mix != 0 else 0
            parts = (width + chunk - 1) // chunk + mixes
            token, part = item // parts, item % parts - mixes
            projected = argument(arguments, 1) + token * argument(arguments, 9) * 4
            scale, base = argument(arguments, 2), argument(arguments, 3)
            eps, rows = float_of_bits(argument(arguments, 13)), scratch(thread)
            if part < 0:
                _balanced_mix(rows, projected, scale, base, size, argument(arguments, 12), eps)
                for row in range(size):
                    store_part_f32(mix + (token * size + row) * size * 4, load_f32(rows + row * _ROW), size)
                logits = _coefficients(projected, scale, base, size, size)
                store_part_f32(post + token * size * 4, splat(2.0) * keep_nan(sigmoid(logits), logits), size)
            else:
                logits = _coefficients(projected, scale, base, 0, size)
                store_f32(rows, keep_nan(sigmoid(logits), logits) + splat(eps))
                x = argument(arguments, 0) + token * argument(arguments, 10)
                out = argument(arguments, 4) + token * width * bytes_
                for n in range(part * chunk, min((part + 1) * chunk, width), LANES):
                    total, rest = splat(0.0), min(LANES, width - n)
                    for stream in range(size):
                        at = x + stream * argument(arguments, 11) + n * bytes_
                        values = load(at) if rest == LANES else load_part(at, rest)
                        total = fma(splat(load_scalar_f32(rows + 4 * stream)), values, total)
                    if rest == LANES:
                        store(out + n * bytes_, total)
                    else:
                        store_part(out + n * bytes_, total, rest)
            finish(thread)
            item = claim(thread)

    return pre_and_mix


def make_post_and_mix(dtype: str, chunk: int) -> Any:
    """An item is `chunk` elements of all of a token's streams.

    Arguments: y [T, N], x [T, S, N], post [T, S] float32, mix [T, S, S] float32, out [T, S, N], S, N, y's row stride, x's token
    stride and stream stride in bytes. Values are rounded where separate operators would write a tensor. Scratch: S + 1 rows of 16
    float32.
    """
    load, load_part, store, store_part = LOAD[dtype], LOAD_PART[dtype], STORE[dtype], STORE_PART[dtype]
    bytes_, rounded = NUM_BYTES[dtype], ROUND[dtype]

    def post_and_mix(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            size, width = argument(arguments, 5), argument(arguments, 6)
            parts = (width + chunk - 1) // chunk
            token, part = item // parts, item % parts
            rows = scratch(thread)  # the mix, then post
            for row in range(size):
                share = load_part_f32(argument(arguments, 3) + (token * size + row) * size * 4, size)
                store_f32(rows + row * _ROW, rounded(share))
            post = rows + size * _ROW
            store_f32(post, rounded(load_part_f32(argument(arguments, 2) + token * size * 4, size)))
            y = argument(arguments, 0) + token * argument(arguments, 7)
            x = argument(arguments, 1) + token * argument(arguments, 8)
            out = argument(arguments, 4) + token * size * width * bytes_
            for n in range(part * chunk, min((part + 1) * chunk, width), LANES):
                rest = min(LANES, width - n)
                addend = load(y + n * bytes_) if rest == LANES else load_part(y + n * bytes_, rest)
                for to in range(size):
                    total = splat(0.0)
                    for stream in range(size):
                        at = x + stream * argument(arguments, 9) + n * bytes_
                        values = load(at) if rest == LANES else load_part(at, rest)
                        total = fma(splat(load_scalar_f32(rows + stream * _ROW + 4 * to)), values, total)
                    total = fma(splat(load_scalar_f32(post + 4 * to)), addend, rounded(total))
                    place = out + (to * width + n) * bytes_
                    if rest == LANES:
                        store(place, total)
                    else:
                        store_part(place, total, rest)
            finish(thread)
            item = claim(thread)

    return post_and_mix
