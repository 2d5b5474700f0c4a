"""The kernels of an MoE layer's experts on CPUs: `gather_rows`, `gate_up` and `down_and_sum`, one after the other.

    gather_rows    copies the rows of x, sorted by expert, so that each expert has consecutive rows
    gate_up        gated activations of these rows
    down_and_sum   their products with `down`, and each token's weighted sum, in the order of k

- pair: one token and one expert that it chose; pair t K + k is the k-th expert of token t.
- place: a row among the sorted rows. Pairs of the same expert keep their order.
- slot: where a kernel looks for an expert with rows: a place, where there are no more pairs than experts (the expert is that of
  its first place), else an expert's number. So the number of items follows from shapes.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.language import helper
from transom_kernels.cpu.rows import limited_gate, limited_up
from transom_kernels.cpu.simd import (
    NUM_BYTES,
    STORE,
    float_of_bits,
    fma,
    load_f32,
    load_i64,
    load_scalar_f32,
    row_access,
    sigmoid,
    splat,
    store_f32,
    store_i64,
    tanh,
)
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, each_item, scratch
from transom_kernels.moe.cpu_product import PANEL_BYTES, make_multiply

EXPERTS_PER_ITEM = 16

_GELU_SLOPE, _GELU_CUBIC = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


def make_gather_rows(dtype: str) -> Any:
    """An item is a pair, or after the pairs 16 experts.

    Arguments: 0 x [T, N], 1 experts [P], 2 weights [P] float32 or 0, 3 rows [P, padded N], 4 places [P], 5 expert_at [P],
    6 first_of [E], 7 count_of [E], 8 P, 9 K, 10 N, 11 padded N, 12 E, 13 x's row stride in bytes. Integers are int64. With weights
    a row is multiplied by its weight and rounded. `expert_at` is the expert of a place that is its expert's first, else -1.
    """
    load, load_part, store, store_part, size = row_access(dtype)

    @helper
    def copy_row(x, factor, row, width, padded):
        """Copy a row times a factor, and pad it with zeros."""
        full = width // LANES * LANES
        for n in range(0, full, LANES):
            store(row + n * size, load(x + n * size) * factor)
        if full < width:
            store_part(row + full * size, load_part(x + full * size, width - full) * factor, width - full)
        for n in range(width, padded, LANES):
            store_part(row + n * size, splat(0.0), min(LANES, padded - n))

    @each_item
    def gather_rows(arguments, thread, item):
        experts, pairs = argument(arguments, 1), argument(arguments, 8)
        if item >= pairs:
            begin = (item - pairs) * EXPERTS_PER_ITEM
            for expert in range(begin, min(begin + EXPERTS_PER_ITEM, argument(arguments, 12))):
                first, count = _count(experts, pairs, expert)
                store_i64(argument(arguments, 6) + 8 * expert, first)
                store_i64(argument(arguments, 7) + 8 * expert, count)
            return
        expert = load_i64(experts + 8 * item)
        first, _ = _count(experts, pairs, expert)
        _, earlier = _count(experts, item, expert)
        place = first + earlier
        store_i64(argument(arguments, 4) + 8 * item, place)
        store_i64(argument(arguments, 5) + 8 * place, expert if earlier == 0 else -1)
        x = argument(arguments, 0) + item // argument(arguments, 9) * argument(arguments, 13)
        width, padded, weights = argument(arguments, 10), argument(arguments, 11), argument(arguments, 2)
        factor = splat(load_scalar_f32(weights + 4 * item)) if weights != 0 else splat(1.0)
        copy_row(x, factor, argument(arguments, 3) + place * padded * size, width, padded)

    return gather_rows


@helper
def _count(experts, pairs, expert):
    """How many of the first `pairs` pairs have a smaller expert, and how many have this one."""
    smaller, equal = 0, 0
    for pair in range(pairs):
        other = load_i64(experts + 8 * pair)
        smaller += other < expert
        equal += other == expert
    return smaller, equal


def make_gate_up(kind: str, dtype: str, activation: str) -> Any:
    """An item is a slot and one panel of its expert: 32 activations of all rows.

    Arguments: 0 rows [P, columns], 1 weight, 2 bias [E, panels, 64] float32 or 0, 3 activations [P, 32 panels], 4 expert_at,
    5 first_of, 6 count_of, 7 whether slots are places, 8 panels, 9 bytes of a panel, 10 units of a row, 11 bytes of a row, 12 gain,
    13 whether there is a limit, 14 limit, 15 offset of ups. Scratch: 64 bytes, and 256 for each pair and 15 more.
    """
    store, size = STORE[dtype], NUM_BYTES[dtype]
    multiply = make_multiply(kind, dtype)
    is_silu = activation == "silu"

    @helper
    def active(gate, gain):
        if is_silu:
            return gate * sigmoid(gain * gate)
        inner = splat(_GELU_SLOPE) * fma(gate * gate * gate, splat(_GELU_CUBIC), gate)
        return splat(0.5) * gate * (splat(1.0) + tanh(inner))

    @each_item
    def gate_up(arguments, thread, item):
        panels = argument(arguments, 8)
        slot, panel = item // panels, item % panels
        expert = load_i64(argument(arguments, 4) + 8 * slot) if argument(arguments, 7) != 0 else slot
        count = load_i64(argument(arguments, 6) + 8 * expert) if expert >= 0 else 0
        if count == 0:
            return
        first, stride = load_i64(argument(arguments, 5) + 8 * expert), argument(arguments, 11)
        weight = argument(arguments, 1) + (expert * panels + panel) * argument(arguments, 9)
        rows, sums = argument(arguments, 0) + first * stride, scratch(thread) + 64
        multiply(rows, stride, count, weight, argument(arguments, 10), sums, scratch(thread))
        bias = argument(arguments, 2)
        if bias != 0:
            bias += (expert * panels + panel) * PANEL_BYTES
        gain, limit = splat(float_of_bits(argument(arguments, 12))), float_of_bits(argument(arguments, 14))
        has_limit, offset = argument(arguments, 13) != 0, splat(float_of_bits(argument(arguments, 15)))
        out = argument(arguments, 3) + (first * panels + panel) * 32 * size
        for row in range(count):
            for half in range(2):
                at = row * PANEL_BYTES + half * 128
                gate, up = load_f32(sums + at), load_f32(sums + at + 64)
                if bias != 0:
                    gate, up = gate + load_f32(bias + half * 128), up + load_f32(bias + half * 128 + 64)
                if has_limit:
                    gate, up = limited_gate(gate, limit), limited_up(up, limit)
                store(out + (row * panels * 32 + half * 16) * size, active(gate, gain) * (up + offset))

    return gate_up


def make_down_and_sum(kind: str, dtype: str) -> Any:
    """An item is one panel of every expert: 64 outputs of all tokens.

    Arguments: 0 activations [P, columns], 1 weight, 2 bias [E, panels, 64] float32 or 0, 3 weights [P] float32 or 0 (all are 1),
    4 out [T, N], 5 places, 6 expert_at, 7 first_of, 8 count_of, 9 whether slots are places, 10 slots, 11 panels, 12 bytes of a
    panel, 13 units of a row, 14 bytes of a row, 15 T, 16 K, 17 N. Scratch: 64 bytes, and 256 for each pair and 15 more.
    """
    _, _, store, store_part, size = row_access(dtype)
    multiply = make_multiply(kind, dtype)

    @each_item
    def down_and_sum(arguments, thread, panel):
        panels, sums = argument(arguments, 11), scratch(thread) + 64
        bias, stride = argument(arguments, 2), argument(arguments, 14)
        # each expert's products
        for slot in range(argument(arguments, 10)):
            expert = load_i64(argument(arguments, 6) + 8 * slot) if argument(arguments, 9) != 0 else slot
            count = load_i64(argument(arguments, 8) + 8 * expert) if expert >= 0 else 0
            if count > 0:
                first = load_i64(argument(arguments, 7) + 8 * expert)
                weight = argument(arguments, 1) + (expert * panels + panel) * argument(arguments, 12)
                rows, products = argument(arguments, 0) + first * stride, sums + first * PANEL_BYTES
                multiply(rows, stride, count, weight, argument(arguments, 13), products, scratch(thread))
                if bias != 0:
                    addend = bias + (expert * panels + panel) * PANEL_BYTES
                    for at in range(0, count * PANEL_BYTES, 64):
                        place = products + at
                        store_f32(place, load_f32(place) + load_f32(addend + at % PANEL_BYTES))
        # each token's sum
        num_chosen, width, weights = argument(arguments, 16), argument(arguments, 17), argument(arguments, 3)
        for token in range(argument(arguments, 15)):
            for part in range(min(4, (width - panel * 64 + LANES - 1) // LANES)):
                total = splat(0.0)
                for pair in range(token * num_chosen, (token + 1) * num_chosen):
                    place = load_i64(argument(arguments, 5) + 8 * pair)
                    factor = splat(load_scalar_f32(weights + 4 * pair)) if weights != 0 else splat(1.0)
                    total = fma(factor, load_f32(sums + place * PANEL_BYTES + part * 64), total)
                column = panel * 64 + part * LANES
                out = argument(arguments, 4) + (token * width + column) * size
                if width - column >= LANES:
                    store(out, total)
                else:
                    store_part(out, total, width - column)

    return down_and_sum
